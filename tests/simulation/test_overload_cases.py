"""Priority, queued ghosts and bounded queues, with replicas in virtual time."""

from itertools import pairwise

import pytest

from sluice.core.events import Cancelled
from tests.simulation.overload import MS, Overload, S

SERVICE_TOKENS = 100


def four_slots(**limits):
    return Overload(1, sequences=4, **limits)


def ask(run, at_ns, tier, length=SERVICE_TOKENS):
    return run.call(at_ns, 50, length, tier=tier, ttft_due_ns=None, tpot_ns=None)


def starts(calls):
    return [call.dispatched_ns for call in calls]


def test_d11_a_request_of_high_priority_starts_next_and_low_ones_keep_their_order():
    run = four_slots()
    low = [ask(run, S + n * MS, 5, SERVICE_TOKENS + 7 * n) for n in range(30)]
    high = ask(run, 2 * S, 0)
    run.run()
    assert starts(low) == sorted(starts(low))
    first_end_ns = min(call.ended_ns for call in low)
    assert high.dispatched_ns <= first_end_ns + 60 * MS
    assert len([call for call in low if call.dispatched_ns < high.dispatched_ns]) == 4


def high_load_beside_low(aging_ns):
    """High priority at 95 % of the capacity for 10 minutes, and 20 low ones that wait."""
    run = four_slots(aging_ns=aging_ns)
    # Four of these at a time take 100 steps of about 26 ms.
    gap_ns = int(0.66 * S / 0.95)
    high = [ask(run, S + n * gap_ns, 0) for n in range(600 * S // gap_ns)]
    low = [ask(run, 20 * S, 5) for _ in range(20)]
    return run, high, low


def test_d11_with_aging_every_low_request_starts_within_the_bound_and_one_service_time():
    run, high, low = high_load_beside_low(30 * S)
    run.run()
    service_ns = max(call.ended_ns - call.dispatched_ns for call in low)
    assert max(starts(low)) <= 20 * S + 30 * S + service_ns
    assert all(call.outcome in ("stop", "length") for call in (*low, *high))


def test_d11_in_strict_order_the_longest_wait_of_the_low_tier_rises_instead():
    run, _, low = high_load_beside_low(None)
    waits = []
    for at_s in (30, 50, 70):
        run.run(at_s)
        (view,) = run.core.pools(at_s * S)
        waits.append(dict(view.longest_wait_ns).get(5, 0))
    assert waits == [10 * S, 30 * S, 50 * S]
    assert sum(call.dispatched_ns is None for call in low) > 10


def test_d06_clients_that_left_while_waiting_cost_nothing():
    run = Overload(1, sequences=1)
    a, *ghosts, e = [ask(run, S + n, 1, 200) for n in range(5)]
    for call in ghosts:
        run.fleet.at(S + 100, Cancelled(f"{call.name}.0"))
    run.run()
    assert starts(ghosts) == [None] * 3
    assert [call.outcome for call in ghosts] == ["cancelled"] * 3
    assert e.dispatched_ns - a.ended_ns <= 300 * MS


def test_d07_told_times_follow_the_service_time():
    told = []
    for length in (50, 100):
        run = Overload(1, sequences=1, queue_places_max=2)
        for n in range(3):  # what is known of lengths
            ask(run, n * 10 * S, 1, length)
        burst = [ask(run, 60 * S, 1, length) for _ in range(10)]
        run.run()
        refused = [call for call in burst if call.told_s]
        assert len(refused) == 7
        assert run.reasons == {"queue_full": 7}
        told.append(sorted(call.told_s[0] for call in refused))
    assert all(later > sooner for sooner, later in zip(*told, strict=True))
    gaps = [later - sooner for sooner, later in pairwise(told[1])]
    assert min(gaps) > 0.3 * max(gaps)


@pytest.mark.parametrize("bound", [{"queue_tokens_max": 100}, {"queue_bytes_max": 1000}])
def test_the_queue_is_bounded_in_tokens_and_bytes(bound):
    run = Overload(1, sequences=1, **bound)
    for n in range(6):
        run.call(S + n, 50, 50, ttft_due_ns=None, tpot_ns=None, body_bytes=500)
    run.run()
    (reason,) = run.reasons
    assert reason in ("queue_tokens", "queue_bytes")
    assert run.reasons[reason] == 3
