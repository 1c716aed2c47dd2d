"""Counting single requests: what is known of clients that left, and slow replicas."""

import pytest

from sluice.core.costmodel import Coefficients, Load
from sluice.core.request import Request
from sluice.planner.faulty import Condition
from sluice.planner.outcome import Counting, Life
from sluice.workload.asks import Ask, Part

S = 1_000_000_000


def life(number, **fields):
    request = Request(str(number), 0, (1,), 8, ttft_due_ns=S)
    return Life(Ask(number, 0, (Part(1, 1),), 8), request, "m", **fields)


@pytest.mark.parametrize(
    ("first_ns", "left_ns", "unknown"),
    [(None, S // 2, 1), (S // 2, 2 * S, 1), (None, 2 * S, 0), (3 * S // 2, 2 * S, 0)],
    ids=["before it was due", "served in time", "waited in vain", "served too late"],
)
def test_a_client_that_left_after_its_first_token_was_due_was_not_served(
    first_ns, left_ns, unknown
):
    counting = Counting(20)
    counting.left(life(0, first_ns=first_ns), left_ns)
    whole = counting.outcome.whole
    assert (whole.left, whole.unknown, whole.met) == (1, unknown, 0)


def test_the_interval_is_of_the_requests_of_which_the_share_is():
    counting = Counting(20)
    for number in range(20):
        counting.left(life(number), S // 2 if number % 2 else 2 * S)
    outcome = counting.outcome
    assert sum(requests for requests, _ in outcome.batches) == 10
    assert outcome.attainment == 0.0
    assert outcome.attainment_half_width == 0.0


def test_requests_behind_the_last_one_are_not_counted():
    counting = Counting(3, 1)
    for number in range(5):
        counting.refused(life(number), "queue_full")
    assert counting.outcome.whole.requests == counting.outcome.reasons["queue_full"] == 2
    assert counting.complete


def test_two_faults_at_a_time_multiply_and_each_ends_by_itself():
    condition = Condition(Coefficients(step_ns=1e6))
    condition.slow(2.0)
    condition.slow(3.0)
    usual_ns = condition.times.predict_ns(Load(1, 1))
    assert condition.predict_ns(Load(1, 1)) == pytest.approx(6 * usual_ns)
    condition.recover(2.0)
    assert condition.factor == 3.0
    condition.recover(3.0)
    assert condition.factor == 1.0
    condition.stall(5)
    condition.stall(7)
    assert condition.stall_ns == 12
