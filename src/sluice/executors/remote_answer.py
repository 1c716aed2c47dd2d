"""One answer of a remote engine on its way, with everything that can go wrong with it.

``remote.py`` makes one for each request that it sends. Here is decided when an upstream is late or
silent, what is not the answer that was asked for, and whether an answer that is left has to be
stopped. What events mean is decided in ``answers.py``.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

from sluice.executors.answers import (
    NO_TIMES,
    StreamReader,
    estimated_usage,
    read_whole,
    times_of_headers,
)
from sluice.executors.faults import Source, fault_of_reply
from sluice.executors.http_connection import Connection, Disconnected, Head, NotHttp
from sluice.executors.lookout import Lookout
from sluice.executors.stream import (
    Chunk,
    EngineTimes,
    FirstTokenLate,
    Garbage,
    Headers,
    Lost,
    Reply,
    UpstreamError,
    UpstreamRequest,
    UpstreamUsage,
)

_REPLY_BYTES_MAX = 1024**2


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Bounds on what one answer may make us hold."""

    event_bytes_max: int = 1024**2
    whole_bytes_max: int = 64 * 1024**2


class Leaving(NamedTuple):
    """How an answer is left: ``whole`` if all of it has come, else the id to abort, if any."""

    whole: bool
    abort_id: str


class RemoteAnswer:
    """One answer on its way; see ``Answer``."""

    def __init__(
        self,
        source: Source,
        connection: Connection,
        request: UpstreamRequest,
        limits: AnswerLimits,
        lookout: Lookout,
        on_end: Callable[["RemoteAnswer", Connection, Leaving], None],
    ) -> None:
        self._source, self._connection = source, connection
        # Not the request itself: its body is not needed any more.
        self._id, self._streamed, self._any_body = request.id, request.streamed, request.any_body
        self._deadlines = request.deadlines
        self._limits, self._lookout, self._on_end = limits, lookout, on_end
        self._reader = StreamReader(source, request.usage_events, limits.event_bytes_max)
        self._ready: deque[Chunk | UpstreamError] = deque()
        self._times = NO_TIMES
        self._usage: UpstreamUsage | None = None
        self._begun = self._whole = self._closed = False
        self._activity = 0
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._due_s: float | None = None
        first = request.deadlines.first_token_s
        self._expect_within(first if request.streamed else request.deadlines.whole_s)
        self.status = 0
        self.headers: Headers = ()

    @property
    def age_s(self) -> float:
        """Seconds since the request was sent."""
        return self._loop.time() - self._sent_s

    async def begin(self) -> None:
        """Wait for the head. Raises ``UpstreamError`` unless it is that of the answer asked for;
        one that does not begin, or whose caller leaves, is closed."""
        begun = False
        try:
            head = await self._connection.read_head()
            if not 200 <= head.status < 300:
                reply = await read_reply(self._source, self._connection, _REPLY_BYTES_MAX)
                self._whole = True
                raise fault_of_reply(self._source, reply)
            self.status, self.headers = head.status, head.headers
            self._times = times_of_headers(head.headers)
            await self._check_kind(head)
            begun = True
        except (NotHttp, Disconnected) as error:
            raise self._fault_of(error) from error
        finally:
            if not begun:
                self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._closed or self._whole:
                self.close()
                raise StopAsyncIteration
            try:
                if self._streamed:
                    self._take(await self._connection.read())
                else:
                    await self._read_whole()
            except (NotHttp, Disconnected) as error:
                self._ready.append(self._fault_of(error))
            except UpstreamError as error:
                self._ready.append(error)
        item = self._ready.popleft()
        if isinstance(item, UpstreamError):
            self.close()
            raise item
        self._whole = item.last
        return item

    def usage(self) -> UpstreamUsage:
        """Counts of what has come so far."""
        usage = self._usage or self._reader.usage
        return usage or estimated_usage(self._reader.tokens, self._reader.characters)

    def engine_times(self) -> EngineTimes:
        """The engine's own times, as far as they have come."""
        told = self._reader.times
        return self._times if told is NO_TIMES else told

    def close(self) -> None:
        """Give the connection back, or cancel what still runs."""
        if self._closed:
            return
        self._closed = True
        left = self._ready[-1] if self._ready else None
        whole = self._whole or (isinstance(left, Chunk) and left.last)
        gone = isinstance(self._connection.fault, Disconnected)
        if not whole:
            self._connection.break_off(Disconnected("left by the caller"))
        abort_id = "" if whole or gone else self._id
        self._on_end(self, self._connection, Leaving(whole, abort_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    async def _check_kind(self, head: Head) -> None:
        """Refuse a 200 that is not what was asked for; an error in it is told as that error."""
        encoding = head.header("content-encoding") or "identity"
        kind = (head.header("content-type") or "").partition(";")[0].strip().lower()
        if encoding.lower() != "identity":
            raise self._garbage(f"content-encoding {encoding}, which was not asked for")
        if self._any_body:
            return
        if not self._streamed:
            if "json" not in kind:
                raise self._garbage(f"asked for JSON, got {kind or 'no content type'}")
        elif kind != "text/event-stream":
            with contextlib.suppress(NotHttp, Disconnected, Garbage):
                body = await read_body(self._source, self._connection, _REPLY_BYTES_MAX)
                item, _ = read_whole(self._source, body)
                if isinstance(item, UpstreamError) and not isinstance(item, Garbage):
                    self._whole = True
                    raise item
            raise self._garbage(f"asked for a stream, got {kind or 'no content type'}")

    def _take(self, piece: bytes) -> None:
        """Read a piece of a stream; an empty one is its end."""
        reader = self._reader
        self._ready += reader.feed(piece) if piece else reader.end()
        if reader.activity != self._activity:
            self._activity = reader.activity
            if self._begun or reader.tokens:
                self._begun = True
                self._expect_within(self._deadlines.silence_s)

    async def _read_whole(self) -> None:
        body = await read_body(self._source, self._connection, self._limits.whole_bytes_max)
        item, times = read_whole(self._source, body)
        if times is not NO_TIMES:
            self._times = times
        if self._any_body and isinstance(item, Garbage):
            item = Chunk(body, last=True)
        if isinstance(item, Chunk):
            self._usage = item.usage
        self._ready.append(item)

    def _expect_within(self, wait_s: float | None) -> None:
        """Set the time by which the upstream must be heard of."""
        self._due_s = None if wait_s is None else self._loop.time() + wait_s
        if self._due_s is not None:
            self._lookout.by(self._due_s)

    def look(self, now_s: float) -> float | None:
        """Break it off where it is late. Returns when to look again, ``None`` for not at all."""
        if self._due_s is None or self._closed or self._whole:
            return None
        if self._due_s <= now_s:
            if not self._ready and not self._connection.held_back:
                self._connection.break_off(self._late())
                return None
            # The caller takes its time, which is not the upstream's silence.
            self._expect_within(self._deadlines.silence_s)
        return self._due_s

    def _late(self) -> UpstreamError:
        if not self._begun:
            return FirstTokenLate(self._source.name, round(self.age_s, 3))
        silence_s = self._deadlines.silence_s
        return Lost(self._source.name, f"nothing came for {silence_s:g} s", self._reader.tokens)

    def _garbage(self, message: str) -> Garbage:
        return Garbage(self._source.name, message, self._reader.tokens)

    def _fault_of(self, error: NotHttp | Disconnected) -> UpstreamError:
        if isinstance(error, NotHttp):
            return self._garbage(str(error))
        return Lost(self._source.name, str(error), self._reader.tokens)


async def read_body(source: Source, connection: Connection, bytes_max: int) -> bytes:
    """The rest of a body. Raises ``Garbage`` for one over the limit, or what broke it."""
    pieces, length = list[bytes](), 0
    while piece := await connection.read():
        length += len(piece)
        if length > bytes_max:
            raise Garbage(source.name, f"the answer is over {bytes_max} bytes")
        if connection.complete and not pieces:
            return piece
        pieces.append(piece)
    return b"".join(pieces)


async def read_reply(source: Source, connection: Connection, bytes_max: int) -> Reply:
    """A whole answer. Raises ``UpstreamError``."""
    try:
        head = await connection.read_head()
        body = await read_body(source, connection, bytes_max)
    except NotHttp as error:
        raise Garbage(source.name, str(error)) from error
    except Disconnected as error:
        raise Lost(source.name, str(error)) from error
    return Reply(head.status, head.headers, body)
