"""What a placement is asked for: a place for one incarnation of a replica, and its end.

A placement decides where a replica runs and whether there is room. It is told the rest: which
replica, when to start it and when to end it. ``replica.PlacedReplica`` speaks with what was placed
over the channel and never asks where it is. Nothing about requests may get in here.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from sluice.cluster.channel import GatewayChannel


@dataclass(frozen=True, slots=True)
class Needs:
    """What one replica takes of the machine that it runs on.

    ``cpus`` is what it is promised of the processors, ``None`` where it shares them.
    ``memory_bytes`` is what it takes once its model is loaded, 0 where that is not known.
    ``resources`` are amounts of what an operator has named.
    """

    cpus: float | None = None
    gpus: float = 0.0
    memory_bytes: int = 0
    resources: tuple[tuple[str, float], ...] = field(default=())

    def __str__(self) -> str:
        parts = [] if self.cpus is None else [f"{self.cpus:g} processors"]
        if self.gpus:
            parts.append(f"{self.gpus:g} GPUs")
        if self.memory_bytes:
            parts.append(f"{self.memory_bytes / 2**30:.2f} GiB of memory")
        parts += [f"{amount:g} of {name}" for name, amount in self.resources]
        return ", ".join(parts) or "nothing in particular"


class NotPlaced(Exception):
    """There is no place for a replica; the words say what it needs and what there is.

    ``permanent`` says that it would not fit even if nothing else ran.
    """

    def __init__(self, words: str, *, permanent: bool = False) -> None:
        super().__init__(words)
        self.permanent = permanent


class Placed(Protocol):
    """One incarnation of a replica: it was started somewhere and has not been buried yet."""

    @property
    def channel(self) -> GatewayChannel:
        """The way to it."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process, ``None`` where that is on another machine or not known."""
        ...

    async def leave(self, wait_s: float) -> str:
        """Wait until it has ended, ending it after ``wait_s``, and say how; may be called again."""
        ...

    async def dismiss(self, wait_s: float) -> None:
        """The same for one that is not wanted any more: it has no fault that might be its place's.

        What is loaded need not end by itself when its channel is closed, and is not waited for
        then.
        """
        ...


# Finds a place and starts the replica there; raises ``NotPlaced``. It leaves nothing behind where
# it is cancelled.
Place = Callable[[], Awaitable[Placed]]
