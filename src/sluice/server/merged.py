"""The generation of an exchange: the calls of one request, taken from the gateway as one.

Of several calls (the prompts of one completion request) all are admitted or none: a refusal of one
withdraws the others, at no charge. Their pieces are interleaved as they come, with choices
renumbered; one that fails ends the whole, because its answer would not be whole.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import assert_never

from sluice.core.errors import InternalError, Overloaded, RequestError
from sluice.core.request import COMPLETE, EndReason, Usage
from sluice.runtime.generation import Call, ChoiceEnded, Delta, Finished, Piece, Terms
from sluice.server.exchange import Exchange
from sluice.server.ports import Gateway, Generation


class generating:  # noqa: N801 - used like a function
    """Hand calls of equally many choices over, and free what they hold when the block is left.

    Entering raises what the gateway raises for the first refusal. A class, since a generator costs
    several times as much and this is on the path of every request.
    """

    def __init__(self, exchange: Exchange, gateway: Gateway, calls: Sequence[Call]) -> None:
        self._exchange, self._gateway, self._calls = exchange, gateway, calls
        self._attendance = exchange.attended()
        self._generation: Generation | None = None

    async def __aenter__(self) -> Generation:
        gateway, calls = self._gateway, self._calls
        entered = False
        self._attendance.__enter__()
        try:
            if len(calls) > 1:
                await gateway.check_together(calls)
            self._exchange.handed_over = True
            if len(calls) == 1:
                generation: Generation = await gateway.generate(calls[0])
            else:
                generation = await _together(gateway, calls)
            self._generation = generation
            try:
                await generation.settled()
            except (Overloaded, RequestError):
                generation.withdraw()
                raise
            entered = True
            return generation
        finally:
            if not entered:
                await self.__aexit__()

    async def __aexit__(self, *exception: object) -> None:
        if self._generation is not None:
            self._generation.cancel()
        self._attendance.__exit__()


async def _together(gateway: Gateway, calls: Sequence[Call]) -> Generation:
    with ExitStack() as undo:
        parts: list[Generation] = []
        for call in calls:
            try:
                part = await gateway.generate(call)
            except (Overloaded, RequestError):
                for earlier in parts:
                    earlier.withdraw()
                raise
            undo.callback(part.cancel)
            parts.append(part)
        undo.pop_all()
    return Merged(parts, calls[0].choices)


class Merged:
    """The generations of several calls as one; ``choices`` is the number of each.

    One piece of each call is waited for at a time, so a slow reader holds all calls back.
    """

    def __init__(self, parts: Sequence[Generation], choices: int) -> None:
        self._parts = parts
        self._choices = choices
        self._waiting: dict[asyncio.Task[Piece], int] = {}

    @property
    def model(self) -> str:
        """The models that answer, each once."""
        return ", ".join(dict.fromkeys(part.model for part in self._parts))

    @property
    def replica(self) -> str:
        """The replicas that answer, each once."""
        return ", ".join(dict.fromkeys(part.replica for part in self._parts))

    @property
    def terms(self) -> Terms:
        """The terms of all calls: what any of them had to take."""
        terms = [part.terms for part in self._parts]
        limits = [one.output_tokens_max for one in terms if one.output_tokens_max is not None]
        return Terms(
            slo_class=terms[0].slo_class,
            degraded=tuple(dict.fromkeys(rung for one in terms for rung in one.degraded)),
            output_tokens_max=min(limits, default=None),
            model_asked=next((one.model_asked for one in terms if one.model_asked), ""),
        )

    @property
    def relay(self) -> None:
        """Calls that belong together are never given to a remote engine."""

    async def settled(self) -> None:
        """Wait for every call."""
        for part in self._parts:
            await part.settled()

    def cancel(self) -> None:
        """Cancel every call."""
        for task in self._waiting:
            task.cancel()
        for part in self._parts:
            part.cancel()

    def withdraw(self) -> None:
        """Withdraw every call."""
        for part in self._parts:
            part.withdraw()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        pieces = [aiter(part) for part in self._parts]
        endings: list[Finished] = []
        for number, source in enumerate(pieces):
            self._waiting[loop.create_task(_next(source))] = number
        while self._waiting:
            await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            # In the order of the calls, not of the set that ``wait`` returns.
            for task in [task for task in self._waiting if task.done()]:
                number, piece = self._waiting.pop(task), task.result()
                match piece:
                    case Finished():
                        if piece.reason not in COMPLETE:
                            yield piece
                            return
                        endings.append(piece)
                        continue
                    case Delta() | ChoiceEnded():
                        yield replace(piece, choice=piece.choice + number * self._choices)
                    case _:
                        assert_never(piece)
                self._waiting[loop.create_task(_next(pieces[number]))] = number
        yield _joined(endings)


async def _next(pieces: AsyncIterator[Piece]) -> Piece:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        raise InternalError("the gateway's pieces ended without Finished") from None


def _joined(endings: Sequence[Finished]) -> Finished:
    """One ending for all; token counts add up, phases are those of the call that ended last."""
    usages = [ending.usage for ending in endings]
    total = Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
    )
    cut = any(ending.reason is EndReason.LENGTH for ending in endings)
    return Finished(EndReason.LENGTH if cut else EndReason.STOP, total, endings[-1].phases)
