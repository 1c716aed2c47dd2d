"""What a remote replica may be given, by window, breaker and quota together."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.events import Outcome
from sluice.core.gate import (
    REST_NS_MAX,
    REST_NS_MIN,
    AfterTrial,
    Opening,
    OpenNow,
    OpensAt,
    RemoteGate,
)
from sluice.core.limits import BreakerLimits
from sluice.core.quota import Left, QuotaLeft
from sluice.core.window import FIRST

LIMITS = BreakerLimits()


def gate() -> RemoteGate:
    return RemoteGate(64, LIMITS)


def opening(one: RemoteGate, now_ns: int = 0, tokens: int = 1, held: int = 0) -> Opening:
    return one.opening(tokens, held + 1, now_ns)


def wait_ns(one: RemoteGate, now_ns: int = 0, tokens: int = 1) -> int:
    """Time until it opens; fails where that is not known."""
    found = opening(one, now_ns, tokens)
    assert not isinstance(found, AfterTrial)
    return found.at_ns - now_ns if isinstance(found, OpensAt) else 0


def end(one: RemoteGate, outcome: Outcome, now_ns: int = 0, rest_ns: int | None = None) -> None:
    one.began("r", 1, now_ns)
    one.ended("r", outcome, now_ns, places=0, rest_ns=rest_ns)


def broken() -> RemoteGate:
    """One whose breaker has just opened."""
    one = gate()
    for _ in range(LIMITS.in_a_row):
        end(one, Outcome.FAULT)
    return one


def test_faults_close_it_for_all_and_one_goes_as_a_trial():
    one = broken()
    assert opening(one) == OpensAt(LIMITS.open_ns_min, broken=True)
    later_ns = LIMITS.open_ns_min
    assert opening(one, later_ns) == OpenNow(1)
    one.began("trial", 1, later_ns)
    assert opening(one, later_ns) == AfterTrial()
    one.ended("trial", Outcome.GOOD, later_ns, places=0)
    assert opening(one, later_ns) == OpenNow(FIRST)


def test_a_trial_goes_beside_what_is_still_there_and_no_second_one_does():
    one, later_ns = broken(), LIMITS.open_ns_min
    assert one.seats(6, 0) == 6
    assert opening(one, later_ns, held=6) == OpenNow(7)
    assert one.opening(1, 9, later_ns) == OpenNow(9)  # with three choices
    assert one.seats(6, later_ns) == 7
    one.began("trial", 1, later_ns)
    assert opening(one, later_ns, held=7) == AfterTrial()
    assert one.seats(7, later_ns) == 7


def test_a_rest_in_the_half_open_state_is_no_open_breaker():
    one, later_ns = broken(), LIMITS.open_ns_min
    one.quota.rest(3 * NS_PER_S, later_ns)
    assert opening(one, later_ns) == OpensAt(later_ns + 3 * NS_PER_S, broken=False)


def test_one_that_serves_again_rests_no_more():
    one = gate()
    end(one, Outcome.FULL, rest_ns=200 * NS_PER_S)
    one.serve(64)
    assert opening(one) == OpenNow(FIRST)
    end(one, Outcome.FULL)
    assert wait_ns(one) == REST_NS_MIN


def test_clients_own_faults_close_nothing():
    one = gate()
    for _ in range(100):
        end(one, Outcome.VOID)
    assert opening(one) == OpenNow(FIRST)


def test_a_replica_that_refuses_rests_as_long_as_it_asks_for():
    one = gate()
    end(one, Outcome.FULL, rest_ns=7 * NS_PER_S)
    assert wait_ns(one) == 7 * NS_PER_S
    assert wait_ns(one, 7 * NS_PER_S) == 0


def test_one_that_does_not_say_rests_longer_with_each_refusal_in_a_row():
    one, now_ns, rests = gate(), 0, []
    for _ in range(8):
        end(one, Outcome.FULL, now_ns)
        rests.append(wait_ns(one, now_ns))
        now_ns += rests[-1]
    assert rests[:3] == [REST_NS_MIN, 2 * REST_NS_MIN, 4 * REST_NS_MIN]
    assert rests[-1] == REST_NS_MAX
    end(one, Outcome.GOOD, now_ns)
    end(one, Outcome.FULL, now_ns)
    assert wait_ns(one, now_ns) == REST_NS_MIN


def test_refusals_make_the_window_smaller_and_open_no_breaker():
    one = gate()
    for number in range(20):
        end(one, Outcome.FULL, number * 10 * NS_PER_S)
    assert opening(one, 200 * NS_PER_S) == OpenNow(1)


def test_a_vendors_quota_holds_back_what_it_does_not_cover():
    one = gate()
    one.began("r", 10, 0)
    one.quota.told(QuotaLeft(tokens=Left(1000, 100, 90 * NS_PER_S)), "r", 0)
    assert wait_ns(one, tokens=100) == 0
    assert wait_ns(one, tokens=500) > 30 * NS_PER_S


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Outcome)),
            st.integers(0, 2 * NS_PER_S),
            st.one_of(st.none(), st.integers(0, 60 * NS_PER_S)),
        ),
        max_size=60,
    )
)
def test_it_opens_again_whatever_came(steps):
    one, now_ns = gate(), 0
    for outcome, gap_ns, rest_ns in steps:
        now_ns += gap_ns
        if isinstance(opening(one, now_ns), OpenNow):
            end(one, outcome, now_ns, rest_ns if outcome is Outcome.FULL else None)
    left_ns = wait_ns(one, now_ns)
    assert left_ns <= 60 * NS_PER_S
    found = opening(one, now_ns + left_ns)
    assert isinstance(found, OpenNow)
    assert found.places >= 1
