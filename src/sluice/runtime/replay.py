"""Feeds a recorded replica's events into a fresh one and compares what both decided.

The same events at the same times give the same plans and endings; the first difference means that
the policy is not the one that was recorded. Entries come from ``runtime/recording.py``, in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.core.costmodel import LinearCostModel
from sluice.core.events import End, ReplicaEffect, RunStep
from sluice.core.replica import Replica
from sluice.runtime.recording import Entry, PlanShape, ReplicaStart, read_entry, shape_of

Decision = PlanShape | End


@dataclass(frozen=True, slots=True)
class Difference:
    """Where replay and recording part, after so many equal events. ``None`` means no decision."""

    t_ns: int
    events: int
    recorded: Decision | None
    replayed: Decision | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far a replay came."""

    events: int
    steps: int
    difference: Difference | None


def replay(entries: Iterable[Entry]) -> Replayed:
    """Replay one replica's entries up to the first difference, if there is one.

    Raises ``ValueError`` where the entries do not begin with a start or cannot be read.
    """
    replica: Replica | None = None
    expected: list[Decision] = []
    events = steps = t_ns = 0
    for entry in entries:
        value = read_entry(entry)
        if isinstance(value, PlanShape | End):
            if not expected or expected[0] != value:
                replayed = expected[0] if expected else None
                return Replayed(events, steps, Difference(entry.t_ns, events, value, replayed))
            steps += isinstance(value, PlanShape)
            del expected[0]
            continue
        if expected:
            break
        if isinstance(value, ReplicaStart):
            replica = Replica(value.limits, LinearCostModel(value.cost.seed, value.cost))
            continue
        if replica is None:
            raise ValueError("the recording does not begin with the start of its replica")
        events, t_ns = events + 1, entry.t_ns
        expected = decisions(replica.handle(value, entry.t_ns))
    difference = Difference(t_ns, events, None, expected[0]) if expected else None
    return Replayed(events, steps, difference)


def decisions(effects: list[ReplicaEffect]) -> list[Decision]:
    """What of the effects is compared, in the order in which recordings have it."""
    found: list[Decision] = []
    for effect in effects:
        if isinstance(effect, RunStep):
            found.append(shape_of(effect.plan))
        elif isinstance(effect, End):
            found.append(effect)
    return found
