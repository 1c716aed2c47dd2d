"""Virtual token counters: who is ahead, against a memory without bounds and over schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.fairness import CREDIT_TOKENS, DEPARTED_MAX, UNITS, FairShares

QUANTUM = 100


def shares_of(*tenants, weight=1.0):
    shares = FairShares(quantum_tokens=QUANTUM)
    for tenant in tenants:
        shares.enter(tenant, weight)
    return shares


def test_nobody_is_ahead_alone():
    shares = shares_of("a")
    shares.charge("a", 10 * CREDIT_TOKENS)
    assert not shares.ahead("a")
    shares.leave("a")
    assert not shares.ahead("a")


def test_more_than_a_quantum_beyond_the_least_served_is_ahead():
    shares = shares_of("a", "b")
    shares.charge("a", QUANTUM)
    assert not shares.ahead("a")
    shares.charge("a", 1)
    assert shares.ahead("a")
    assert not shares.ahead("b")
    shares.charge("b", 1)
    assert not shares.ahead("a")


def test_of_two_that_had_the_same_the_one_that_asks_for_more_is_ahead():
    shares = shares_of("much", "little")
    shares.claim("much", 3 * QUANTUM)
    shares.claim("little", QUANTUM)
    assert shares.ahead("much")
    assert not shares.ahead("little")
    shares.claim("much", -QUANTUM)
    assert not shares.ahead("much")
    shares.charge("much", 1)
    assert shares.ahead("much")


def test_claims_count_by_weight():
    shares = shares_of("light")
    shares.enter("heavy", 3.0)
    shares.claim("heavy", 3 * QUANTUM)
    assert not shares.ahead("heavy")
    shares.claim("heavy", 1)
    assert shares.ahead("heavy")


def test_a_weight_of_three_is_owed_three_times_as_much():
    shares = shares_of("a")
    shares.enter("heavy", 3.0)
    shares.charge("heavy", 3 * QUANTUM)
    assert not shares.ahead("heavy")
    shares.charge("heavy", 1)
    assert shares.ahead("heavy")


def test_time_without_requests_earns_no_credit():
    shares = shares_of("a", "b")
    shares.leave("b")
    shares.charge("a", 50 * QUANTUM)
    shares.enter("b", 1.0)
    assert not shares.ahead("a")
    shares.charge("b", QUANTUM + 1)
    assert shares.ahead("b")


def test_leaving_and_returning_does_not_forgive():
    shares = shares_of("a", "b")
    shares.charge("a", 5 * QUANTUM)
    shares.leave("a")
    assert shares.ahead("a"), "judged before it enters again"
    shares.enter("a", 1.0)
    assert shares.ahead("a")


def test_a_tenant_stays_until_its_last_request_left():
    shares = shares_of("a", "a", "b")
    shares.leave("a")
    shares.charge("a", 5 * QUANTUM)
    assert shares.ahead("a")
    shares.leave("a")
    with pytest.raises(KeyError):
        shares.leave("a")


def test_a_pause_of_everybody_carries_no_debt_to_a_newcomer():
    shares = shares_of("a")
    shares.charge("a", 50 * QUANTUM)
    shares.leave("a")
    shares.enter("b", 1.0)
    shares.enter("a", 1.0)
    assert not shares.ahead("a")


def test_one_long_request_saves_up_no_more_than_the_credit():
    shares = shares_of("idle", "busy")
    shares.charge("busy", 100 * CREDIT_TOKENS)
    shares.charge("idle", CREDIT_TOKENS)
    assert not shares.ahead("busy")
    shares.charge("idle", QUANTUM + 1)
    assert shares.ahead("idle")


def test_what_is_charged_to_an_absent_tenant_is_not_kept():
    shares = shares_of("a")
    shares.charge("ghost", 5 * QUANTUM)
    assert not shares.ahead("ghost")
    shares.enter("ghost", 1.0)
    assert not shares.ahead("ghost")


def test_a_hundred_thousand_names_leave_a_bounded_memory():
    shares = shares_of("stays")
    for number in range(100_000):
        shares.enter(f"tenant-{number}", 1.0)
        shares.charge(f"tenant-{number}", 2 * QUANTUM)
        shares.leave(f"tenant-{number}")
    assert len(shares._active) == 1
    assert len(shares._departed) <= DEPARTED_MAX
    assert shares.ahead("tenant-99999"), "the latest are remembered"


TENANTS = "abcde"


class Unbounded:
    """The same rules with nothing forgotten and nothing cached, in the words of the paper."""

    def __init__(self):
        self.requests = dict.fromkeys(TENANTS, 0)
        self.units = dict.fromkeys(TENANTS, 0)
        self.weights = dict.fromkeys(TENANTS, 1.0)
        self.last_left = 0

    def active(self):
        return [tenant for tenant in TENANTS if self.requests[tenant]]

    def start(self):
        here = [self.units[tenant] for tenant in self.active()]
        return max(self.last_left, min(here)) if here else self.last_left

    def enter(self, tenant, weight):
        if not self.requests[tenant]:
            self.units[tenant] = max(self.units[tenant], self.start())
        self.weights[tenant] = weight
        self.requests[tenant] += 1

    def leave(self, tenant):
        self.requests[tenant] -= 1
        if not self.active():
            self.last_left = max(self.last_left, self.units[tenant])

    def charge(self, tenant, tokens):
        if self.requests[tenant]:
            self.units[tenant] += round(tokens * UNITS / self.weights[tenant])
        top = max(self.units[t] for t in TENANTS)
        for other in TENANTS:
            self.units[other] = max(self.units[other], top - CREDIT_TOKENS * UNITS)

    def ahead(self, tenant):
        if not [other for other in self.active() if other != tenant]:
            return False
        return self.units[tenant] - self.start() > QUANTUM * UNITS


steps = st.tuples(
    st.sampled_from(("enter", "leave", "charge")),
    st.sampled_from(TENANTS),
    st.sampled_from((1, 40, 99, 101, 500, CREDIT_TOKENS // 2, 2 * CREDIT_TOKENS)),
    st.sampled_from((0.5, 1.0, 3.0)),
)


@given(st.lists(steps, max_size=60))
def test_what_is_forgotten_and_cached_changes_no_answer(schedule):
    shares, oracle = FairShares(quantum_tokens=QUANTUM), Unbounded()
    for verb, tenant, tokens, weight in schedule:
        if verb == "enter":
            shares.enter(tenant, weight)
            oracle.enter(tenant, weight)
        elif verb == "charge":
            shares.charge(tenant, tokens)
            oracle.charge(tenant, tokens)
        elif oracle.requests[tenant]:
            shares.leave(tenant)
            oracle.leave(tenant)
        for name in TENANTS:
            assert shares.ahead(name) == oracle.ahead(name), name


@given(
    st.lists(st.integers(1, 300), min_size=200, max_size=200),
    st.sampled_from((1.0, 2.0, 5.0)),
)
def test_two_that_always_wait_are_served_within_a_bound(sizes, weight):
    """As a queue does it: who is not ahead goes first, then in order of arrival, a before b."""
    shares = FairShares(quantum_tokens=QUANTUM)
    shares.enter("a", weight)
    shares.enter("b", 1.0)
    served = {"a": 0.0, "b": 0.0}
    for size in sizes:
        tenant = min("ab", key=lambda name: (shares.ahead(name), name))
        shares.charge(tenant, size)
        served[tenant] += size / (weight if tenant == "a" else 1.0)
        assert abs(served["a"] - served["b"]) <= QUANTUM + max(sizes)
