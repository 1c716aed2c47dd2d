"""States of a sequence and of a replica, and which may follow which.

The tables are literal and complete: a pair that is not listed is illegal. ``moved`` is the only way
to change a state; ``core/replica.py`` moves sequences, ``core/fleet.py`` moves replicas. Nothing
here knows why a state changes or what has to be done about it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from sluice.core.errors import InternalError


class SequenceState(StrEnum):
    """Where one choice of a request stands on its replica."""

    WAITING = "waiting"  # holds no block and was never computed
    PREFILL = "prefill"  # resident; some of its known tokens have no KV
    DECODE = "decode"  # resident; only its last sampled token has no KV
    PREEMPTED = "preempted"  # lost its blocks; waits to be computed again
    ENDED = "ended"


class ReplicaState(StrEnum):
    """Where one replica of a model stands, as the fleet sees it."""

    STOPPED = "stopped"  # not running, and not about to
    STARTING = "starting"  # its process was asked for, or loads the model
    WARM = "warm"  # the model is loaded; it gets no request
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, and gets nothing more
    BACKOFF = "backoff"  # was lost; waits for its next start
    CRASH_LOOP = "crash_loop"  # was lost too often of late; starts are rare
    FAILED = "failed"  # another start would fail in the same way


S = SequenceState
R = ReplicaState

SEQUENCE_MOVES: Mapping[SequenceState, tuple[SequenceState, ...]] = {
    S.WAITING: (S.PREFILL, S.ENDED),
    S.PREFILL: (S.DECODE, S.PREEMPTED, S.ENDED),
    S.DECODE: (S.PREEMPTED, S.ENDED),
    S.PREEMPTED: (S.PREFILL, S.ENDED),
    S.ENDED: (),
}

REPLICA_MOVES: Mapping[ReplicaState, tuple[ReplicaState, ...]] = {
    R.STOPPED: (R.STARTING,),
    R.STARTING: (R.WARM, R.READY, R.BACKOFF, R.CRASH_LOOP, R.FAILED, R.STOPPED),
    R.WARM: (R.STARTING, R.BACKOFF, R.CRASH_LOOP, R.FAILED, R.STOPPED),
    R.READY: (R.DRAINING, R.BACKOFF, R.CRASH_LOOP, R.FAILED, R.STOPPED),
    R.DRAINING: (R.READY, R.WARM, R.BACKOFF, R.CRASH_LOOP, R.FAILED, R.STOPPED),
    R.BACKOFF: (R.STARTING, R.STOPPED),
    R.CRASH_LOOP: (R.STARTING, R.STOPPED),
    R.FAILED: (),
}

State = TypeVar("State", SequenceState, ReplicaState)


def moved(moves: Mapping[State, tuple[State, ...]], current: State, target: State) -> State:
    """Return ``target`` where ``moves`` allows it after ``current``; raises ``InternalError``."""
    if target not in moves[current]:
        raise InternalError(
            f"illegal transition of a {type(current).__name__}: {current} to {target}"
        )
    return target
