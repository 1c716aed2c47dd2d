"""What a replica's loop is given to talk to: its gateway, and who keeps a record.

Called by ``runtime/realtime.py``; ``cluster`` and ``wiring`` bring what is behind. Nothing is done
here.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from sluice.core.events import ReplicaEffect, ReplicaEvent
from sluice.runtime.messages import FromReplica, ToReplica


class Channel(Protocol):
    """The gateway, as a replica sees it."""

    def receive(self, wait_s: float) -> Sequence[ToReplica]:
        """Return what has come, waiting up to ``wait_s`` for the first."""
        ...

    def send(self, messages: Sequence[FromReplica]) -> None:
        """Send messages in order."""
        ...


# Sees every event with its time and effects.
Record = Callable[[ReplicaEvent, int, Sequence[ReplicaEffect]], None]


def record_nothing(event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]) -> None:
    """Keep no record."""
