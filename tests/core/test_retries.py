"""The retry budget: an outage is not multiplied."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.limits import RetryLimits
from sluice.core.retries import RetryBudget

LIMITS = RetryLimits()


def test_d13_retries_are_at_most_a_tenth_of_the_requests_beside_what_was_saved():
    budget, retried = RetryBudget(LIMITS), []
    for _ in range(2000):
        budget.asked()
        retried.append(budget.take(0))
    assert sum(retried[100:]) <= 190
    assert sum(retried) <= 200 + LIMITS.saved_max


@given(st.lists(st.booleans(), max_size=300))
def test_retries_never_exceed_the_budget(steps):
    """True is a request, false an attempt to retry."""
    budget, requests, retries = RetryBudget(LIMITS), 0, 0
    for is_request in steps:
        if is_request:
            budget.asked()
            requests += 1
        elif budget.take(0):
            retries += 1
        assert retries <= LIMITS.saved_max + requests / LIMITS.requests_per_retry
        assert 0 <= budget.left <= LIMITS.saved_max


def test_one_request_is_retried_as_often_as_it_may_and_no_more():
    budget = RetryBudget(RetryLimits(per_request=2))
    assert [budget.take(retries) for retries in (0, 1, 2)] == [True, True, False]


def test_a_refused_retry_costs_nothing():
    budget = RetryBudget(LIMITS)
    before = budget.left
    assert not budget.take(LIMITS.per_request)
    assert budget.left == before


@pytest.mark.parametrize("seed", range(5))
def test_waits_double_and_differ_within_bounds(seed):
    budget, chance = RetryBudget(LIMITS), Random(seed)
    for retries in range(12):
        waits = {budget.wait_ns(retries, chance) for _ in range(20)}
        most_ns = min(LIMITS.wait_ns_max, LIMITS.wait_ns_min * 2**retries)
        assert most_ns / 2 <= min(waits) <= max(waits) <= most_ns
        assert len(waits) > 10
