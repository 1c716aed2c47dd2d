"""An upstream that does what its script says, byte by byte: for tests and benchmarks of clients.

A test names a ``Route``: for each request that came in, the acts to perform as its answer. Nothing
is checked or completed, so that every fault can be written down: half a chunk, a wrong length, an
answer to nobody. ``engine_answers.py`` has the shapes of real engines. Listens on loopback only.
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self, assert_never, cast

from sluice.executors.http_pool import Address

_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Send:
    """Write these bytes."""

    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Wait:
    """Write nothing for so long."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Write nothing until ``ScriptedUpstream.release`` is called, or until the peer is gone."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection in order."""


@dataclass(frozen=True, slots=True)
class Reset:
    """End the connection as a crash does."""


@dataclass(frozen=True, slots=True)
class Until:
    """Write nothing until this is set, or until the peer is gone."""

    event: asyncio.Event


Act = Send | Wait | Hold | Until | Close | Reset
# A generator may decide as it goes; it is closed when its last act is done or its peer is gone.
Script = Iterable[Act]


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came in; header names in lower case."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header given in lower case."""
        return next((value for key, value in self.headers if key == name), None)


Route = Callable[[Received], Script]


def head(status: int = 200, *headers: tuple[str, str], length: int | None = None) -> bytes:
    """The head of an answer: chunked unless ``length`` is given or a header says otherwise."""
    lines = [f"HTTP/1.1 {status} {'OK' if status < 300 else 'No'}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length is not None:
        lines.append(f"content-length: {length}")
    elif not any(name == "connection" for name, _ in headers):
        lines.append("transfer-encoding: chunked")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def http_chunk(raw: bytes) -> bytes:
    """One chunk of a chunked body; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(raw), raw)


def whole(
    body: bytes, status: int = 200, *headers: tuple[str, str], kind: str = "application/json"
) -> tuple[Act, ...]:
    """An answer in one piece."""
    return (Send(head(status, ("content-type", kind), *headers, length=len(body)) + body),)


STREAM_HEAD = head(200, ("content-type", "text/event-stream; charset=utf-8"))


def stream(events: Sequence[bytes], gap_s: float = 0.0) -> tuple[Act, ...]:
    """An event stream, each event a chunk and a write of its own, ``gap_s`` apart."""
    acts: list[Act] = [Send(STREAM_HEAD)]
    for event in events:
        if gap_s:
            acts.append(Wait(gap_s))
        acts.append(Send(http_chunk(event)))
    return (*acts, Send(http_chunk(b"")))


def raw_of(script: Script) -> bytes:
    """All bytes that a script writes."""
    return b"".join(act.raw for act in script if isinstance(act, Send))


def cut(script: Script, at_bytes: int) -> tuple[Act, ...]:
    """The same bytes in one write up to a position, then the end of the connection."""
    return (Send(raw_of(script)[:at_bytes]), Close())


class ScriptedUpstream:
    """A server on a free port of loopback.

    ``requests`` are those that came in whole, ``connections`` counts the dials, ``open_now`` the
    connections that are open.
    """

    def __init__(self, route: Route, tls: ssl.SSLContext | None = None) -> None:
        self.route = route
        self.requests: list[Received] = []
        self.connections = 0
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._port = 0
        self._peers = set[_Peer]()
        self._released = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def open_now(self) -> int:
        """Connections that are open."""
        return len(self._peers)

    def hits(self, path: str) -> int:
        """Requests for a path."""
        return sum(request.path == path for request in self.requests)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._port, "not started"
        return self._port

    def address(self, tls: ssl.SSLContext | None = None) -> Address:
        """Where a client finds it."""
        return Address("127.0.0.1", self.port, tls)

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Peer(self), "127.0.0.1", port, ssl=self._tls
        )
        self._port = int(self._server.sockets[0].getsockname()[1])

    def refuse(self) -> None:
        """Stop listening; what is open stays."""
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        """Stop listening and reset what is open."""
        self.refuse()
        for peer in tuple(self._peers):
            peer.reset()
        await self.until(lambda: not self._peers)

    def release(self) -> None:
        """Let all scripts that hold go on."""
        self._released.set()

    async def until(self, holds: Callable[[], bool], within_s: float = 5.0) -> None:
        """Wait for what changes when requests come or connections end. Raises ``TimeoutError``."""
        async with asyncio.timeout(within_s):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def _opened(self, peer: "_Peer") -> None:
        self.connections += 1
        self._peers.add(peer)
        self._changed.set()

    def _closed(self, peer: "_Peer") -> None:
        self._peers.discard(peer)
        self._changed.set()

    def _arrived(self, request: Received) -> Script:
        self.requests.append(request)
        self._changed.set()
        return self.route(request)

    async def _hold(self) -> None:
        await self._released.wait()


class _Peer(asyncio.Protocol):
    """One connection of a client: reads requests, performs scripts in turn."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        self._upstream = upstream
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def reset(self) -> None:
        """End the connection with an RST."""
        if self._transport is None:
            return
        peer = self._transport.get_extra_info("socket")
        if peer is not None:  # under TLS, a closing transport has none any more
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._upstream._opened(self)  # noqa: SLF001

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._task is not None:
            self._task.cancel()
        self._upstream._closed(self)  # noqa: SLF001

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, piece: bytes) -> None:
        self._buffer += piece
        if self._task is None and (request := self._take_request()):
            script = self._upstream._arrived(request)  # noqa: SLF001
            self._task = asyncio.get_running_loop().create_task(self._perform(script))

    def _take_request(self) -> Received | None:
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return None
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = tuple((name.lower(), value.strip()) for name, _, value in pairs)
        size = next((int(value) for name, value in headers if name == "content-length"), 0)
        begin = end + len(_HEAD_END)
        if len(self._buffer) < begin + size:
            return None
        body = bytes(self._buffer[begin : begin + size])
        del self._buffer[: begin + size]
        method, path, _ = first.split(" ")
        return Received(method, path, headers, body)

    async def _perform(self, script: Script) -> None:
        try:
            for act in script:
                if self._transport is None:
                    return
                await self._do(act, self._transport)
        finally:
            if isinstance(script, Generator):
                script.close()
        self._task = None
        if self._buffer:
            self.data_received(b"")

    async def _do(self, act: Act, transport: asyncio.Transport) -> None:
        match act:
            case Send(raw):
                transport.write(raw)
                await self._writable.wait()
            case Wait(wait_s):
                await asyncio.sleep(wait_s)
            case Hold():
                await self._upstream._hold()  # noqa: SLF001
            case Until(event):
                await event.wait()
            case Close():
                transport.close()
            case Reset():
                self.reset()
            case _:
                assert_never(act)
