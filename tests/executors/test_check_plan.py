"""What no executor may be asked to compute is refused before it touches memory."""

import pytest

from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.step import Plan, Row
from sluice.executors.base import StepError, check_plan

LIMITS = ReplicaLimits(context_tokens_max=64, block_size=4, blocks_total=8, sequences_max=4)
A, B = SequenceId("a", 0), SequenceId("b", 0)


def plan_of(*rows):
    return Plan(1, rows, 0)


def test_rows_that_share_a_prefix_and_write_to_blocks_of_their_own_pass():
    check_plan(
        plan_of(
            Row(A, (7,), 6, (0, 1), sample=True),
            Row(B, (7, 8, 9), 4, (0, 2), sample=True),
        ),
        LIMITS,
    )


@pytest.mark.parametrize(
    ("tokens", "past", "blocks", "words"),
    [
        ((), 3, (2,), "no token"),
        ((7, 8), 3, (2,), "1 blocks cannot hold 5 tokens"),
        ((7,), 0, (8,), "outside the pool of 8"),
        ((7,), 4, (-1, 2), "outside the pool"),
        ((7,), 7, (0, 1), "two rows write"),
    ],
)
def test_row_that_cannot_be_computed_is_blamed_on_its_sequence(tokens, past, blocks, words):
    good = Row(A, (7,), 6, (0, 1), sample=True)
    with pytest.raises(StepError, match=words) as caught:
        check_plan(plan_of(good, Row(B, tokens, past, blocks, sample=True)), LIMITS)
    assert caught.value.blamed == (B,)
