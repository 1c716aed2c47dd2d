"""What becomes of a request that cannot start at once: the rungs of its class, one after another.

Called by ``core/door.py`` for each arrival, with a door that knows the pool. The order of the
rungs is the request's own; whether a rung holds is the door's judgement. Nothing is changed here.
"""

from dataclasses import dataclass, replace
from typing import Protocol, assert_never

from sluice.core.admission import Refusal
from sluice.core.request import Request, Rung


class Door(Protocol):
    """Judges one request at one instant; ``None`` is consent."""

    def starts(self, request: Request) -> Refusal | None:
        """Why the request, in this shape, cannot start at once and be on time."""

    def waits(self, request: Request) -> Refusal | None:
        """Why the request, in this shape, cannot wait and be on time."""

    def smaller(self, request: Request) -> str | None:
        """The smaller model that would accept it, if there is one."""


@dataclass(frozen=True, slots=True)
class Stays:
    """The request is accepted, in the shape that the ladder gave it."""

    request: Request


@dataclass(frozen=True, slots=True)
class Leaves:
    """The request goes to the smaller ``model``; ``refusal`` is what it is spared."""

    model: str
    refusal: Refusal


def walk(request: Request, door: Door) -> Stays | Leaves | Refusal:
    """The first rung that holds, else the refusal that the last one gave."""
    refusal = door.starts(request)
    if refusal is None:
        return Stays(request)
    for rung in request.overload:
        match rung:
            case Rung.SHORTEN:
                shorter = shortened(request)
                if shorter is not None:
                    request, refusal = shorter, door.starts(shorter)
            case Rung.SMALLER:
                model = door.smaller(request)
                if model is not None:
                    return Leaves(model, refusal)
            case Rung.QUEUE:
                refusal = door.waits(request)
            case Rung.REFUSE | Rung.FALLBACK:
                return refusal
            case _:
                assert_never(rung)
        if refusal is None:
            return Stays(request)
    return refusal


def shortened(request: Request) -> Request | None:
    """The request with its output limited as its class says, ``None`` where that is no less."""
    tokens = request.shorten_tokens
    if tokens is None or tokens >= request.output_tokens_max:
        return None
    degraded = (*request.degraded, Rung.SHORTEN)
    return replace(request, output_tokens_max=tokens, degraded=degraded)
