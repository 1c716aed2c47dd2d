"""What a remote replica may be given, by window, breaker and quota together."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.events import Outcome
from sluice.core.gate import REST_NS_MAX, REST_NS_MIN, RemoteGate
from sluice.core.limits import BreakerLimits
from sluice.core.quota import Left, QuotaLeft
from sluice.core.window import FIRST

LIMITS = BreakerLimits()


def gate() -> RemoteGate:
    return RemoteGate(64, LIMITS)


def end(one: RemoteGate, outcome: Outcome, now_ns: int = 0, rest_ns: int | None = None) -> None:
    one.began("r", 1, now_ns)
    one.ended("r", outcome, now_ns, places=0, rest_ns=rest_ns)


def test_faults_close_it_for_all_and_one_goes_as_a_trial():
    one = gate()
    for _ in range(LIMITS.in_a_row):
        end(one, Outcome.FAULT)
    assert one.wait_ns(1, 0) == LIMITS.open_ns_min
    later_ns = LIMITS.open_ns_min
    assert (one.wait_ns(1, later_ns), one.places(later_ns)) == (0, 1)
    one.began("trial", 1, later_ns)
    assert one.wait_ns(1, later_ns) is None
    one.ended("trial", Outcome.GOOD, later_ns, places=0)
    assert (one.wait_ns(1, later_ns), one.places(later_ns)) == (0, FIRST)


def test_clients_own_faults_close_nothing():
    one = gate()
    for _ in range(100):
        end(one, Outcome.VOID)
    assert (one.wait_ns(1, 0), one.places(0)) == (0, FIRST)


def test_a_replica_that_refuses_rests_as_long_as_it_asks_for():
    one = gate()
    end(one, Outcome.FULL, rest_ns=7 * NS_PER_S)
    assert one.wait_ns(1, 0) == 7 * NS_PER_S
    assert one.wait_ns(1, 7 * NS_PER_S) == 0


def test_one_that_does_not_say_rests_longer_with_each_refusal_in_a_row():
    one, now_ns, rests = gate(), 0, []
    for _ in range(8):
        end(one, Outcome.FULL, now_ns)
        rests.append(one.wait_ns(1, now_ns))
        now_ns += rests[-1] or 0
    assert rests[:3] == [REST_NS_MIN, 2 * REST_NS_MIN, 4 * REST_NS_MIN]
    assert rests[-1] == REST_NS_MAX
    end(one, Outcome.GOOD, now_ns)
    end(one, Outcome.FULL, now_ns)
    assert one.wait_ns(1, now_ns) == REST_NS_MIN


def test_refusals_make_the_window_smaller_and_open_no_breaker():
    one = gate()
    for number in range(20):
        end(one, Outcome.FULL, number * 10 * NS_PER_S)
    assert one.places(200 * NS_PER_S) == 1
    assert one.wait_ns(1, 200 * NS_PER_S) == 0


def test_a_vendors_quota_holds_back_what_it_does_not_cover():
    one = gate()
    one.began("r", 10, 0)
    one.quota.told(QuotaLeft(tokens=Left(1000, 100, 90 * NS_PER_S)), "r", 0)
    assert one.wait_ns(100, 0) == 0
    assert (one.wait_ns(500, 0) or 0) > 30 * NS_PER_S


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
        if one.wait_ns(1, now_ns) == 0:
            end(one, outcome, now_ns, rest_ns if outcome is Outcome.FULL else None)
    wait_ns = one.wait_ns(1, now_ns)
    assert wait_ns is not None
    assert wait_ns <= 60 * NS_PER_S
    assert one.wait_ns(1, now_ns + wait_ns) == 0
    assert one.places(now_ns + wait_ns) >= 1
