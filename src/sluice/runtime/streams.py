"""Pieces of one call on their way from the gateway to the client.

A stream never refuses a piece and never blocks the one who puts it: where the reader is behind,
text deltas of the same choice are joined, so what waits is bounded by the choices, and its text by
the call's output limit. How long a reader may be behind is the server's decision.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

from sluice.core.request import EndReason, Rung
from sluice.runtime.generation import Delta, Finished, Piece, Retrieval, Terms

# More pieces than this waiting means that the reader is behind and deltas are joined. A reader that
# keeps up has one or two waiting, so its chunks stay one token each.
PENDING_PIECES_MAX = 32


class Relay(Protocol):
    """The answer of a remote engine: bytes to pass on, and whether they are the last.

    It ends without the last where the call was ended from here: the stream then says why. Iterating
    raises ``SluiceError`` where the engine gives no whole answer.
    """

    @property
    def content_type(self) -> str:
        """The engine's word for what was passed on."""
        ...

    def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]: ...


class PieceStream:
    """One call's answer. Iterating gives its pieces, the last of them ``Finished``.

    One reader, in the event loop that puts. ``on_cancel`` is called once, by the first ``cancel``
    before the end; ``withdrawn`` says then that it was none of the client's doing.

    ``model`` is the one that answers, on these ``terms``, and ``replica`` the id of its replica,
    empty until the call is dispatched. ``relay`` is what to pass on instead of pieces, where that
    is a remote one. Once it is ``over``, nothing will be added any more.
    """

    def __init__(
        self,
        model: str,
        slo_class: str,
        on_cancel: Callable[[], None],
        retrieval: Retrieval | None = None,
    ) -> None:
        self.model = model
        self.terms = Terms(slo_class, retrieval=retrieval)
        self.replica = ""
        self._on_cancel = on_cancel
        self._pending: deque[Piece] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._refusal: Exception | None = None
        self.over = False
        self.relay: Relay | None = None
        self.withdrawn = False

    @property
    def reason(self) -> EndReason | None:
        """Why it ended; ``None`` where that was read, or it was refused, cancelled or goes on."""
        last = self._pending[-1] if self._pending else None
        return last.reason if isinstance(last, Finished) else None

    def shortened(self, output_tokens_max: int) -> None:
        """Note that the answer is limited to fewer tokens than were asked for."""
        degraded = tuple(dict.fromkeys((*self.terms.degraded, Rung.SHORTEN)))
        self.terms = replace(self.terms, degraded=degraded, output_tokens_max=output_tokens_max)

    def retargeted(self, model: str, rung: Rung) -> None:
        """Note that another model answers than the one asked for."""
        degraded = (*self.terms.degraded, rung)
        self.terms = replace(self.terms, degraded=degraded, model_asked=self.model)
        self.model = model

    def dispatched(self, replica_id: str, relay: Relay | None = None) -> None:
        """Note which replica answers, and what passes its answer on where it is a remote one."""
        self.replica = replica_id
        self.relay = relay
        self._wake()

    async def settled(self) -> None:
        """Wait until a replica has the call, so that model and terms are final.

        Returns as well where the call is over. Raises what ``refuse`` was given.
        """
        while not (self.replica or self._pending or self.over):
            await self.news()
        self.raise_refusal()

    def put(self, piece: Piece) -> None:
        """Add a piece. Pieces after ``Finished`` are dropped."""
        if self.over:
            return
        self._pending.append(piece)
        if isinstance(piece, Finished):
            self.over = True
        elif len(self._pending) > PENDING_PIECES_MAX:
            self._pending = _joined(self._pending)
        self._wake()

    def refuse(self, error: Exception) -> None:
        """End the call by an error that its reader gets instead of a further piece."""
        if not self.over:
            self.over = True
            self._refusal = error
            self._wake()

    def raise_refusal(self) -> None:
        """Raise what ``refuse`` was given, if it was called."""
        if self._refusal is not None:
            raise self._refusal

    def cancel(self) -> None:
        """The reader wants no more. Safe at any time and more than once."""
        # It knows this stream: they would keep one another, and the body, until the collector came.
        self.relay = None
        if not self.over:
            self.over = True
            self._pending.clear()
            self._wake()
            self._on_cancel()

    def withdraw(self) -> None:
        """Cancel a call that is refused after all, with others that it belongs to."""
        self.withdrawn = True
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Iterate over the pieces; one reader only."""
        return self

    async def __anext__(self) -> Piece:
        """Wait for the next piece. Raises what ``refuse`` was given, once no piece is left."""
        while not self._pending:
            self.raise_refusal()
            if self.over:
                raise StopAsyncIteration
            await self.news()
        return self._pending.popleft()

    def news(self) -> asyncio.Future[None]:
        """What to await until something was added or decided; for the one reader."""
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def _joined(pieces: deque[Piece]) -> deque[Piece]:
    """Join the deltas of each choice; the order within a choice stays."""
    joined: deque[Piece] = deque()
    place: dict[int, int] = {}
    for piece in pieces:
        if not isinstance(piece, Delta):
            joined.append(piece)
            continue
        at = place.get(piece.choice)
        if at is None:
            place[piece.choice] = len(joined)
            joined.append(piece)
            continue
        earlier = joined[at]
        assert isinstance(earlier, Delta)
        joined[at] = Delta(
            choice=piece.choice,
            text=earlier.text + piece.text,
            tokens=earlier.tokens + piece.tokens,
            logprobs=earlier.logprobs + piece.logprobs,
            tool_calls=earlier.tool_calls + piece.tool_calls,
        )
    return joined
