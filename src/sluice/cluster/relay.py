"""The answer of a remote engine on its way to the client, pulled by the server's own task.

A ``Relay`` belongs to one call; each dispatch of the call gives it a ``Turn`` at one replica. What
comes before the first output is held back, so that until then another replica can still answer.
Whether one does is the fleet's decision: a turn that failed tells its replica's listener, and the
relay goes on with the next turn or, where the call is over, raises what its client is to be told.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from sluice.cluster.forward import Forward
from sluice.cluster.upstream_errors import error_for_client
from sluice.executors.stream import (
    Answer,
    Chunk,
    StreamExecutor,
    UpstreamError,
    UpstreamRequest,
)
from sluice.runtime.streams import PieceStream

_CUT_FINISHES = frozenset({"length", "incomplete"})


class Relay:
    """See ``runtime.streams.Relay``. ``stream`` is that of the call, ``forward`` what is asked."""

    def __init__(self, stream: PieceStream, forward: Forward) -> None:
        self._stream = stream
        self.forward = forward
        self._next: Turn | None = None
        self._fault: UpstreamError | None = None

    def take(self, turn: "Turn") -> None:
        """The call is dispatched."""
        self._next = turn

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]:
        """Pass the answer on; see ``runtime.streams.Relay``."""
        while (turn := await self._turn()) is not None:
            try:
                async for piece in turn.pieces():
                    yield piece
                return
            except UpstreamError as error:
                self._fault = error
                turn.on_failed(turn, error)
        if self._fault is not None:
            raise error_for_client(self._fault) from self._fault

    async def _turn(self) -> "Turn | None":
        """The next turn, ``None`` where the call is over."""
        while self._next is None and not self._stream.over:
            await self._stream.news()
        turn, self._next = self._next, None
        return None if self._stream.over else turn


@dataclass(slots=True, eq=False)
class Turn:
    """One attempt at one replica. ``clock`` gives monotonic nanoseconds.

    ``on_begun`` is told of the head of an answer, ``on_tokens`` of output that goes out,
    ``on_ended`` of the whole answer before its last bytes do, ``on_failed`` of what broke it, and
    ``on_text``, where texts are recorded, of all bytes. None of them is called once it was left.
    """

    forward: Forward
    engine: StreamExecutor
    asked: UpstreamRequest
    clock: Callable[[], int]
    on_begun: "Callable[[Turn, Answer], None]"
    on_tokens: "Callable[[Turn, int], None]"
    on_ended: "Callable[[Turn, Answer], None]"
    on_failed: "Callable[[Turn, UpstreamError], None]"
    on_text: "Callable[[Turn, bytes], None] | None" = None
    dispatched_ns: int = 0
    first_ns: int | None = None
    tokens: int = 0
    cut: bool = False
    left: bool = False
    expiry: asyncio.TimerHandle | None = None
    _opening: asyncio.Timeout | None = None
    _answer: Answer | None = None
    _held: list[bytes] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """Id of the call."""
        return self.forward.request.id

    def leave(self) -> None:
        """Stop it: nobody wants the answer. Its reader finds nothing more."""
        self.left = True
        if self._answer is not None:
            self._answer.close()
        elif self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())

    async def pieces(self) -> AsyncIterator[tuple[bytes, bool]]:
        """The bytes to pass on. Raises ``UpstreamError``; ends early where it was left."""
        answer = await self._opened()
        if answer is None:
            return
        async with answer:
            try:
                async for chunk in answer:
                    if self.left:
                        return
                    self._note(chunk)
                    if chunk.last:
                        self.on_ended(self, answer)
                        yield self._passed(chunk.raw), True
                        return
                    if self.first_ns is None and not chunk.finishes:
                        self._held.append(chunk.raw)
                    else:
                        yield self._passed(chunk.raw), False
            except UpstreamError:
                if not self.left:
                    raise

    async def _opened(self) -> Answer | None:
        try:
            async with asyncio.timeout(None) as self._opening:
                if self.left:
                    return None
                self._answer = await self.engine.open(self.asked)
                self.on_begun(self, self._answer)
        except TimeoutError:
            if not self.left:
                raise
        finally:
            self._opening = None  # one that is over cannot be rescheduled
        return self._answer

    def _note(self, chunk: Chunk) -> None:
        """Count what a chunk holds, and tell what goes out."""
        if self.on_text is not None:
            self.on_text(self, chunk.raw)
        if any(finish in _CUT_FINISHES for _, finish in chunk.finishes):
            self.cut = True
        if not chunk.tokens or not self.asked.streamed:
            return
        self.tokens += chunk.tokens
        if self.first_ns is None:
            self.first_ns = self.clock()
        self.on_tokens(self, chunk.tokens)

    def _passed(self, raw: bytes) -> bytes:
        if not self._held:
            return raw
        held = b"".join((*self._held, raw))
        self._held.clear()
        return held
