"""From pieces of a generation to an HTTP answer, streamed or whole.

``chat``, ``completions`` and ``responses`` bring an ``Encoder`` that knows their chunk shape; the
order of events and what happens on a failure are decided here, once for all of them. Headers are
sent with the first text, so that a call that fails before it gets a proper status.
"""

from collections.abc import AsyncIterator
from typing import Protocol, assert_never

import msgspec

from sluice.core.errors import InternalError
from sluice.core.request import COMPLETE
from sluice.runtime.generation import ChoiceEnded, Delta, Finished, Piece
from sluice.server.exchange import Exchange
from sluice.server.ports import Generation
from sluice.server.problems import Headers, header_text, unfinished

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


class Encoder(Protocol):
    """Turns the pieces of one call into events. Each method may return ``b""`` for none."""

    def delta(self, delta: Delta) -> bytes:
        """Events for new text."""
        ...

    def ended(self, ended: ChoiceEnded) -> bytes:
        """Events for a completed choice."""
        ...

    def finished(self, finished: Finished) -> bytes:
        """The last events of a complete answer, terminator included."""
        ...


def answer_headers(generation: Generation) -> Headers:
    """Headers that say who answers, and what was done to the answer."""
    degraded = generation.terms.disclosed
    return [
        (b"x-sluice-model", header_text(generation.model)),
        (b"x-sluice-replica", header_text(generation.replica)),
        *([(b"x-sluice-degraded", ", ".join(degraded).encode())] if degraded else []),
    ]


async def stream(exchange: Exchange, generation: Generation, encoder: Encoder) -> None:
    """Answer with an event stream.

    Raises the error that an incomplete ending stands for; the caller turns it into a status before
    the first text and into an error event after it. No terminator follows an error event.
    """
    async for piece in generation:
        match piece:
            case Delta():
                events = encoder.delta(piece) if _visible(piece) else b""
            case ChoiceEnded():
                events = encoder.ended(piece)
            case Finished():
                if piece.reason not in COMPLETE:
                    raise unfinished(piece)
                if not exchange.started:
                    await exchange.open_stream(answer_headers(generation))
                await exchange.close_stream(encoder.finished(piece))
                return
            case _:
                assert_never(piece)
        if events:
            if not exchange.started:
                await exchange.open_stream(answer_headers(generation))
            await exchange.write(events)
    raise InternalError("the gateway's pieces ended without Finished")


async def complete_pieces(generation: Generation) -> AsyncIterator[Piece]:
    """The pieces of an answer that is to be sent whole; raises where it is not complete."""
    async for piece in generation:
        if isinstance(piece, Finished) and piece.reason not in COMPLETE:
            raise unfinished(piece)
        yield piece
        if isinstance(piece, Finished):
            return
    raise InternalError("the gateway's pieces ended without Finished")


def _visible(delta: Delta) -> bool:
    return bool(delta.text or delta.tool_calls or delta.logprobs)
