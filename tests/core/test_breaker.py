"""The breaker of a remote replica: opens for what is the replica's fault, closes after a trial."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.breaker import Breaker, BreakerState
from sluice.core.limits import BreakerLimits

LIMITS = BreakerLimits()
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def opened() -> Breaker:
    breaker = Breaker(LIMITS)
    for number in range(LIMITS.in_a_row):
        breaker.began(str(number))
        breaker.failed(str(number), 0)
    assert breaker.state(0) is OPEN
    return breaker


def test_faults_in_a_row_open_it():
    breaker = Breaker(LIMITS)
    for _ in range(LIMITS.in_a_row - 1):
        breaker.failed("r", 0)
    assert breaker.state(0) is CLOSED
    breaker.failed("r", 0)
    assert breaker.state(0) is OPEN
    assert breaker.wait_ns(0) == LIMITS.open_ns_min


def test_a_share_of_faults_opens_it_though_others_succeed():
    breaker = Breaker(LIMITS)
    for number in range(LIMITS.outcomes_min // 2):
        assert breaker.state(number) is CLOSED
        breaker.succeeded("r", number)
        breaker.failed("r", number)
    assert breaker.state(LIMITS.outcomes_min) is OPEN


def test_faults_that_are_rare_do_not_open_it():
    breaker = Breaker(LIMITS)
    for number in range(1000):
        if number % 4 == 0:
            breaker.failed("r", number * NS_PER_S // 100)
        else:
            breaker.succeeded("r", number * NS_PER_S // 100)
        assert breaker.state(number * NS_PER_S // 100) is CLOSED


def test_faults_of_long_ago_do_not_count():
    breaker = Breaker(LIMITS)
    for number in range(100):
        breaker.failed("r", number * LIMITS.window_ns)
        breaker.succeeded("r", number * LIMITS.window_ns + 1)
        assert breaker.state(number * LIMITS.window_ns + 1) is CLOSED


def test_requests_that_leave_without_an_outcome_do_not_open_it():
    """Such are the clients' own faults, and clients that went away."""
    breaker = Breaker(LIMITS)
    for number in range(1000):
        breaker.began(str(number))
        breaker.left(str(number))
    assert breaker.state(0) is CLOSED


def test_one_trial_closes_it():
    breaker, later_ns = opened(), LIMITS.open_ns_min
    assert breaker.state(later_ns) is HALF_OPEN
    assert breaker.wait_ns(later_ns) == 0
    breaker.began("trial")
    assert breaker.wait_ns(later_ns) is None
    breaker.succeeded("trial", later_ns)
    assert breaker.state(later_ns) is CLOSED
    assert breaker.wait_ns(later_ns) == 0


def test_a_failed_trial_opens_it_for_twice_the_time_up_to_a_bound():
    breaker, now_ns, waits_ns = opened(), 0, [LIMITS.open_ns_min]
    for _ in range(8):
        now_ns += waits_ns[-1]
        breaker.began("trial")
        breaker.failed("trial", now_ns)
        waits_ns.append(breaker.wait_ns(now_ns) or 0)
    assert [ns // NS_PER_S for ns in waits_ns] == [1, 2, 4, 8, 16, 30, 30, 30, 30]


def test_a_trial_that_is_cancelled_makes_room_for_the_next():
    breaker, later_ns = opened(), LIMITS.open_ns_min
    breaker.began("trial")
    breaker.left("trial")
    assert breaker.wait_ns(later_ns) == 0


def test_what_was_sent_before_it_opened_neither_closes_it_nor_prolongs_it():
    breaker = opened()
    breaker.succeeded("old", 1)
    breaker.failed("older", 2)
    assert breaker.wait_ns(2) == LIMITS.open_ns_min - 2


def test_after_a_trial_earlier_faults_are_forgotten():
    breaker, later_ns = opened(), LIMITS.open_ns_min
    breaker.began("trial")
    breaker.succeeded("trial", later_ns)
    breaker.failed("r", later_ns)
    assert breaker.state(later_ns) is CLOSED


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["began", "left", "succeeded", "failed"]),
            st.integers(0, 5),
            st.integers(0, 3 * NS_PER_S),
        ),
        max_size=80,
    )
)
def test_at_most_one_trial_and_it_never_stays_open_for_ever(steps):
    breaker, now_ns = Breaker(LIMITS), 0
    on_board = set[str]()
    for kind, number, gap_ns in steps:
        now_ns += gap_ns
        request = str(number)
        if kind == "began":
            if breaker.wait_ns(now_ns) != 0 or request in on_board:
                continue
            breaker.began(request)
            on_board.add(request)
            if breaker.state(now_ns) is not CLOSED:
                assert breaker.wait_ns(now_ns) is None
        elif request in on_board:
            on_board.remove(request)
            breaker.left(request) if kind == "left" else getattr(breaker, kind)(request, now_ns)
    for request in sorted(on_board):
        breaker.left(request)
    later_ns = now_ns + LIMITS.open_ns_max
    assert breaker.wait_ns(later_ns) == 0
    breaker.began("last")
    breaker.succeeded("last", later_ns)
    assert breaker.state(later_ns) is CLOSED
