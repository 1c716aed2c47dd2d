"""One HTTP/1.1 connection to an upstream: sends a request, hands its answer out as it comes.

Used by ``http_pool.py``, which opens and keeps connections, and by ``remote.py``, which knows what
is said over them. A connection carries one exchange at a time. It bounds what it holds: a head and
the framing of a body have a largest size, and reading stops while the caller does not take what has
come. It has no clock: deadlines are the caller's, who ends an exchange with ``break_off``.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple, cast

import httptools

from sluice.executors.stream import Headers

# Heads, and what surrounds the pieces of a body: sizes, extensions and trailers of chunks.
_FRAMING_BYTES_MAX = 64 * 1024
# Where reading pauses. Two reads of an event loop; a token is some 200 bytes.
_HELD_BYTES_MAX = 256 * 1024
# A peer that is gone without a word is noticed within about half a minute.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)


class NotHttp(Exception):
    """The bytes are not an HTTP answer, or its head or framing is over the limit."""


class Disconnected(Exception):
    """The peer closed or reset the connection before the answer was complete."""


class Head(NamedTuple):
    """Status and headers of an answer; names are in lower case, in the order in which they came."""

    status: int
    headers: Headers

    def header(self, name: str) -> str | None:
        """The first value of a header given in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Connection(asyncio.Protocol):
    """One connection. ``exchanges`` counts the requests sent over it."""

    def __init__(self, on_closed: Callable[["Connection"], None]) -> None:
        self._on_closed = on_closed
        self._on_complete: Callable[[Connection], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._body: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._fields: list[tuple[str, str]] = []
        self._status = 0
        self._framing_bytes = 0
        self._expecting = False
        self._sized = False
        self._keep_alive = False
        self.keep_alive_promise: str | None = None  # the header of the last answer
        self.head: Head | None = None
        self.complete = True
        self.fault: Exception | None = None
        self.exchanges = 0
        self.idle_since_s = 0.0
        self.idle_s_max: float | None = None

    # What the caller does.

    @property
    def usable(self) -> bool:
        """Whether a further request can be sent."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and self.complete and self.fault is None

    @property
    def reusable(self) -> bool:
        """Whether the exchange is over and the peer keeps the connection open."""
        return self.usable and self._keep_alive

    @property
    def answered(self) -> bool:
        """Whether a byte of the answer has come."""
        return self._framing_bytes > 0 or self.head is not None

    def send(self, request: bytes, body: bytes = b"") -> None:
        """Begin an exchange with a request that is ready for the wire."""
        assert self.usable, "a connection carries one exchange at a time"
        assert self._transport is not None
        self.head, self.complete, self._expecting = None, False, True
        self._keep_alive = self._sized = False
        self._framing_bytes = self._held_bytes = 0
        self._body.clear()  # what nobody read of the answer before
        self.exchanges += 1
        # One packet where it fits; a large body is not copied for that.
        if len(body) <= _FRAMING_BYTES_MAX:
            self._transport.write(request + body)
        else:
            self._transport.writelines((request, body))

    async def read_head(self) -> Head:
        """Wait for the head. Raises ``NotHttp``, ``Disconnected``, or what broke the exchange."""
        while self.head is None:
            if self.fault is not None:
                raise self.fault
            await self._news()
        return self.head

    async def read(self) -> bytes:
        """All of the body that has come, at least a byte; empty at its end.

        Raises as ``read_head``, once everything before the fault has been given out.
        """
        while not self._body:
            if self.complete:
                return b""
            if self.fault is not None:
                raise self.fault
            await self._news()
        piece = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._held_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return piece

    @property
    def held_back(self) -> bool:
        """Whether the caller, and not the peer, is what the exchange waits for."""
        return bool(self._body) or self._paused

    def break_off(self, fault: Exception) -> None:
        """End the exchange and the connection at once; readers get ``fault``."""
        if self.fault is None:
            self.fault = fault
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def when_complete(self, call: Callable[["Connection"], None]) -> None:
        """Call once the present answer is complete; never if it breaks."""
        self._on_complete = call

    # What the event loop and the parser do.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family in {socket.AF_INET, socket.AF_INET6}:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                peer.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, piece: bytes) -> None:
        if not self._expecting:
            self.break_off(NotHttp("bytes that belong to no request"))
            return
        self._framing_bytes += len(piece)
        try:
            self._parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.break_off(NotHttp(f"not an HTTP answer: {error}"))
            return
        if self._framing_bytes > _FRAMING_BYTES_MAX:
            self.break_off(NotHttp(f"head or framing over {_FRAMING_BYTES_MAX} bytes"))
            return
        if self._held_bytes > _HELD_BYTES_MAX and not self.complete and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.complete and self.fault is None:
            # Without a size the end of the connection is the end of the body.
            if self.head is not None and not self._sized and exc is None:
                self.complete = True
            else:
                self.fault = Disconnected(str(exc) if exc else "connection closed")
        self._transport = None
        self._wake()
        self._on_closed(self)

    def on_message_begin(self) -> None:
        if not self._expecting:  # a second answer right behind the first
            self.break_off(NotHttp("bytes that belong to no request"))
        self._fields, self._sized = [], False
        self.keep_alive_promise = None

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "content-length" or key == "transfer-encoding":  # noqa: PLR1714 - half the time
            self._sized = True
        elif key == "keep-alive":
            self.keep_alive_promise = text
        self._fields.append((key, text))

    def on_headers_complete(self) -> None:
        if not self._expecting:
            return
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self.head = Head(self._status, tuple(self._fields))
        elif self._status < 100:
            # Not interim: a body could follow, which nobody would read.
            self.break_off(NotHttp(f"the status {self._status} does not exist"))
        elif self._status == 101:
            self.break_off(NotHttp("the peer switches protocols"))

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if self._expecting:
            self._body.append(body)
            self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._status < 200 or not self._expecting:
            return  # an interim answer, which the real one follows
        # Only valid in here: asked later, the parser always says no.
        self._keep_alive = self._parser.should_keep_alive()
        self.complete, self._expecting = True, False
        if self._on_complete is not None:
            call, self._on_complete = self._on_complete, None
            call(self)

    def _news(self) -> asyncio.Future[None]:
        """What to await until something has come or happened; for the one reader."""
        assert self._waiter is None or self._waiter.done(), "one reader at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
