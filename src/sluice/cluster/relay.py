"""The answer of a remote engine on its way to the client, pulled by the server's own task.

A ``Relay`` belongs to one call; each dispatch of the call gives it an ``Attempt`` at one replica.
What comes before the first output is held back, so that until then another replica can still
answer. Whether one does is the fleet's decision: an attempt that failed tells its replica's
listener, and the relay goes on with the next attempt or, where the call has failed, raises what its
client is to be told. Where it ended in another way its stream says so.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from sluice.cluster.forward import Forward
from sluice.cluster.upstream_errors import error_for_client
from sluice.core.request import EndReason
from sluice.executors.stream import (
    Answer,
    Chunk,
    Garbage,
    StreamExecutor,
    UpstreamError,
    UpstreamRequest,
)
from sluice.runtime.streams import PieceStream

_CUT_FINISHES = frozenset({"length", "incomplete"})
# What comes before the first output is a role, and perhaps a prompt told back.
_HELD_BYTES_MAX = 1024**2


class Relay:
    """See ``runtime.streams.Relay``. ``stream`` is that of the call, ``forward`` what is asked.

    ``number`` is that of the attempt, at whatever kind of replica, that comes next or is made.
    """

    def __init__(self, stream: PieceStream, forward: Forward) -> None:
        self._stream = stream
        self.forward = forward
        self.number = 1
        self._attempts = 0
        self._next: Attempt | None = None
        self._present: Attempt | None = None
        self._fault: UpstreamError | None = None

    @property
    def attempt_id(self) -> str:
        """The id of the next attempt at its engine. The one before may just be stopped there, by
        its own."""
        request_id = self.forward.request.id
        return f"{request_id}-{self._attempts + 1}" if self._attempts else request_id

    def take(self, attempt: "Attempt") -> None:
        """The call is dispatched."""
        self._attempts += 1
        self._next = attempt

    @property
    def content_type(self) -> str:
        """What the engine calls the answer that is being passed on."""
        return "" if self._present is None else self._present.content_type

    def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]:
        """Pass the answer on; see ``runtime.streams.Relay``."""
        return self

    async def __anext__(self) -> tuple[bytes, bool]:
        # No generators on this path: one costs more than all that is done here for a piece.
        while (attempt := self._present or await self._attempt()) is not None:
            self._present = attempt
            try:
                piece = await attempt.piece()
            except UpstreamError as error:
                fault: UpstreamError | None = error
            else:
                fault = attempt.broken
                if piece is not None:
                    return piece
            if fault is None:
                raise StopAsyncIteration
            self._present, self._fault = None, fault
            attempt.on_failed(attempt, fault)
        if self._fault is not None and self._stream.reason is EndReason.FAILED:
            raise error_for_client(self._fault) from self._fault
        raise StopAsyncIteration

    async def _attempt(self) -> "Attempt | None":
        """The next attempt, ``None`` where the call is over."""
        while self._next is None and not self._stream.over:
            await self._stream.news()
        attempt, self._next = self._next, None
        return None if self._stream.over else attempt


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at one replica, ``upstream``. ``clock`` gives monotonic nanoseconds.

    ``asked`` is gone once the engine has it, and what was sent of the call once output is there.
    ``expires_s`` is when its deadline passes, by the loop's time.

    ``on_begun`` is told of the head of an answer, ``on_tokens`` of output that goes out,
    ``on_ended`` of the whole answer before its last bytes do, ``on_failed`` of what broke it, and
    ``on_text``, where texts are recorded, of all bytes. None of them is called once it was left.
    """

    forward: Forward
    engine: StreamExecutor
    asked: UpstreamRequest | None
    clock: Callable[[], int]
    on_begun: "Callable[[Attempt, Answer], None]"
    on_tokens: "Callable[[Attempt, int], None]"
    on_ended: "Callable[[Attempt, Answer], None]"
    on_failed: "Callable[[Attempt, UpstreamError], None]"
    on_text: "Callable[[Attempt, bytes], None] | None" = None
    dispatched_ns: int = 0
    upstream: str = ""
    first_ns: int | None = None
    tokens: int = 0
    cut: bool = False
    left: bool = False
    broken: UpstreamError | None = None
    expires_s: float | None = None
    _opening: asyncio.Task[Any] | None = None
    _answer: Answer | None = None
    _is_over: bool = False
    _held: list[bytes] = field(default_factory=list)
    _held_bytes: int = 0

    @property
    def request_id(self) -> str:
        """Id of the call."""
        return self.forward.request.id

    @property
    def streamed(self) -> bool:
        """Whether its answer comes in events."""
        return self.forward.raw.streamed

    @property
    def content_type(self) -> str:
        """What the engine calls its answer; empty before there is one."""
        for name, value in () if self._answer is None else self._answer.headers:
            if name == "content-type":
                return value
        return ""

    def leave(self) -> None:
        """Stop it: nobody wants the answer. Its reader finds nothing more."""
        if self.left:
            return
        self.left = True
        if self._answer is not None:
            self._answer.close()
        elif self._opening is not None:
            self._opening.cancel()

    def break_off(self, error: UpstreamError) -> None:
        """Stop it: its engine is taken for dead, and its reader is to know."""
        self.broken = error
        self.leave()

    async def piece(self) -> tuple[bytes, bool] | None:
        """The next bytes to pass on, and whether they are the last; ``None`` where it was left.

        Raises ``UpstreamError``.
        """
        answer = self._answer or await self._opened()
        if answer is None or self._is_over:
            return None
        goes_on = False
        try:
            async for chunk in answer:
                if self.left:
                    return None
                self._note(chunk)
                if chunk.last:
                    self._is_over = True
                    self.on_ended(self, answer)
                    return self._passed(chunk.raw), True
                if self.first_ns is not None:
                    goes_on = True
                    return self._passed(chunk.raw), False
                self._hold(chunk.raw)
        except UpstreamError:
            if not self.left:
                raise
        finally:
            if not goes_on:
                answer.close()
        return None

    async def _opened(self) -> Answer | None:
        """Ask. While that lasts, ``leave`` cancels the task, which is the reader's own."""
        asked, self.asked = self.asked, None
        if self.left or asked is None:
            return None
        self._opening = task = asyncio.current_task()
        try:
            self._answer = await self.engine.open(asked)
        except asyncio.CancelledError:
            if task is None or not self.left or task.uncancel():
                raise  # the reader itself is cancelled
            return None
        finally:
            self._opening = None
        self.on_begun(self, self._answer)
        return self._answer

    def _note(self, chunk: Chunk) -> None:
        """Count what a chunk holds, and tell what goes out."""
        if self.on_text is not None:
            self.on_text(self, chunk.raw)
        for _, finish in chunk.finishes:
            if finish in _CUT_FINISHES:
                self.cut = True
        if not chunk.tokens or not self.forward.raw.streamed:
            return
        self.tokens += chunk.tokens
        if self.first_ns is None:
            self.first_ns = self.clock()
            self.forward.raw.sent.drop()
        self.on_tokens(self, chunk.tokens)

    def _hold(self, raw: bytes) -> None:
        self._held.append(raw)
        self._held_bytes += len(raw)
        if self._held_bytes > _HELD_BYTES_MAX:
            raise Garbage(self.upstream, f"{_HELD_BYTES_MAX} bytes came without any output")

    def _passed(self, raw: bytes) -> bytes:
        if not self._held:
            return raw
        held = b"".join((*self._held, raw))
        self._held.clear()
        return held
