"""The transition tables: every pair of states is tried."""

from itertools import product

import pytest

from sluice.core.errors import InternalError
from sluice.core.lifecycle import (
    REPLICA_MOVES,
    SEQUENCE_MOVES,
    ReplicaState,
    SequenceState,
    moved,
)
from sluice.core.request import Request
from sluice.core.sequence import generation_of


@pytest.mark.parametrize(
    ("moves", "states"), [(SEQUENCE_MOVES, SequenceState), (REPLICA_MOVES, ReplicaState)]
)
def test_only_listed_transitions_are_legal(moves, states):
    assert set(moves) == set(states)
    for current, target in product(states, states):
        if target in moves[current]:
            assert moved(moves, current, target) is target
        else:
            with pytest.raises(InternalError, match=f"{current} to {target}"):
                moved(moves, current, target)


@pytest.mark.parametrize(
    ("moves", "start"),
    [(SEQUENCE_MOVES, SequenceState.WAITING), (REPLICA_MOVES, ReplicaState.STOPPED)],
)
def test_every_state_can_be_reached(moves, start):
    seen, border = {start}, [start]
    while border:
        for target in moves[border.pop()]:
            if target not in seen:
                seen.add(target)
                border.append(target)
    assert seen == set(moves)


def test_illegal_transition_changes_nothing():
    (sequence,) = generation_of(Request("a", 0, (1, 2), 3), 0, 0).sequences
    with pytest.raises(InternalError):
        sequence.move(SequenceState.DECODE)
    assert sequence.state is SequenceState.WAITING
