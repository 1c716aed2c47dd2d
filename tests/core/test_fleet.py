"""Admission, dispatch, cancelling and the life of replicas, one scenario at a time."""

import random
from dataclasses import replace

import pytest

from sluice.core.admission import NS_PER_S
from sluice.core.errors import InternalError
from sluice.core.events import (
    Abort,
    Arrived,
    Cancelled,
    Dispatch,
    Ended,
    Fail,
    FleetDraining,
    Progress,
    Reject,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    StartReplica,
    Tick,
    WakeAt,
)
from sluice.core.fleet import Fleet
from sluice.core.fleet_replica import RestartLimits
from sluice.core.lifecycle import ReplicaState
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.request import EndReason, PhaseTimes, Rung, Usage
from tests.core.fleet_rig import (
    LIMITS,
    Driver,
    dispatched,
    one_slot,
    rejects,
    report,
    request,
    seconds,
    two_replicas,
)

# ------------------------------------------------------------------------------------ the queue


def test_d07_of_ten_at_once_one_runs_two_wait_and_seven_are_refused() -> None:
    driver = one_slot()
    effects = driver.arrive(0, *(request(f"r{i}") for i in range(10)))
    assert dispatched(effects) == [("r0", "m-0")]
    refused = rejects(effects)
    assert [r.request_id for r in refused] == [f"r{i}" for i in range(3, 10)]
    assert {(r.status, r.reason, r.measured, r.threshold) for r in refused} == {
        (429, "queue_full", 4, 3)
    }
    assert all(r.retry_after_s is not None and r.retry_after_s > 0 for r in refused)


def test_d07_refusals_leave_nothing_behind_and_the_next_request_runs() -> None:
    driver = one_slot()
    driver.arrive(0, *(request(f"r{i}") for i in range(3)))
    effects = driver.arrive(0.1, *(request(f"x{i}") for i in range(5000)))
    assert len(rejects(effects)) == 5000
    assert driver.fleet.requests == 3
    for second, name in ((2, "r0"), (4, "r1"), (6, "r2")):
        driver.complete(second, name)
    assert dispatched(driver.arrive(10, request("last"))) == [("last", "m-0")]


def test_d07_choices_count_as_places() -> None:
    driver = one_slot(queue=3, limits=replace(LIMITS, sequences_max=4))
    driver.arrive(0, request("r0", choices=3), request("r1", choices=2))
    assert (driver.pool.places, driver.pool.places_max) == (5, 7)
    (refused,) = rejects(driver.arrive(0, request("three", choices=3)))
    assert (refused.reason, refused.measured, refused.threshold) == ("queue_full", 8, 7)
    assert not rejects(driver.arrive(0, request("two", choices=2)))


@pytest.mark.parametrize("at_s", [2.0, 3.0])
def test_d07_retry_after_follows_the_service_time(at_s: float) -> None:
    waits = []
    for service_s in (2.0, 4.0):
        driver = one_slot()
        driver.arrive(0, *(request(f"r{i}") for i in range(3)))
        driver.complete(at_s, "r0", service_s)
        driver.arrive(at_s, request("r3"))
        (refused,) = rejects(driver.arrive(at_s, request("x")))
        assert refused.retry_after_s is not None
        # There is room when the one that runs has ended; told times are up to half a space later,
        # and the space between them is the service time over the utilisation counted on.
        assert service_s <= refused.retry_after_s <= service_s * (1 + 0.5 / 0.75)
        waits.append(refused.retry_after_s)
    assert waits[0] < waits[1]


def test_retry_after_follows_what_changes_at_the_same_instant() -> None:
    driver = one_slot(queue=1)
    driver.arrive(0, request("r0"), request("r1"))
    (before,) = rejects(driver.arrive(8, request("x", prompt=11)))
    driver.complete(8, "r0", 8.0)
    driver.arrive(8, request("r2"))
    (after,) = rejects(driver.arrive(8, request("y", prompt=12)))
    assert before.retry_after_s is not None
    assert after.retry_after_s is not None
    assert before.retry_after_s < 2
    assert after.retry_after_s >= 8


def test_retry_after_falls_as_the_running_request_proceeds() -> None:
    waits = []
    for late_s in (0.1, 3.0):
        driver = one_slot(queue=0)
        driver.arrive(0, request("warm"))
        driver.complete(4, "warm", 4.0)
        driver.arrive(4, request("runs"))
        driver.at(4 + late_s, Progress("runs", round(20 * late_s / 4.0)))
        (refused,) = rejects(driver.arrive(4 + late_s, request("x")))
        assert refused.retry_after_s is not None
        waits.append(refused.retry_after_s)
    assert 3.9 <= waits[0] <= 4.0 * (1 + 0.5 / 0.75)
    assert 1.0 <= waits[1] <= 1.0 + 4.0 * 0.5 / 0.75


def test_retry_after_uses_load_reports_before_the_first_completion() -> None:
    driver = one_slot(queue=0)
    slow = report(step_ns=seconds(0.2), prefill_tokens_per_s=10.0)
    driver.at(0, ReplicaReported("m-0", slow))
    driver.arrive(0, request("runs"))
    (refused,) = rejects(driver.arrive(0, request("x")))
    assert refused.retry_after_s is not None
    # 10 tokens at 10/s, then 20 steps of 0.2 s; up to half a space of 4 s over 0.75 later.
    assert 5.0 <= refused.retry_after_s <= 7.7


def test_retry_after_is_spread() -> None:
    driver = one_slot(queue=0)
    driver.arrive(0, request("runs"))
    waits = {r.retry_after_s for r in rejects(driver.arrive(0, *(request(f"{i}") for i in "abcd")))}
    assert len(waits) == 4


def test_waiting_requests_go_in_order_of_tier_then_arrival() -> None:
    driver = one_slot(queue=9)
    names = [("r0", 1), ("low", 1), ("low2", 1), ("high", 0)]
    driver.arrive(0, *(request(name, tier=tier) for name, tier in names))
    order = []
    running = "r0"
    for second in (1, 2, 3):
        ((running, _),) = dispatched(driver.complete(second, running))
        order.append(running)
    assert order == ["high", "low", "low2"]


def test_a_wait_past_its_deadline_is_refused_with_numbers() -> None:
    driver = one_slot()
    driver.arrive(0, request("r0"), request("r1"))
    wake = driver.fleet.handle(Arrived("m", request("r2", queue_due_ns=seconds(5))), 0)
    assert wake == [WakeAt(seconds(5))]
    (refused,) = rejects(driver.at(5, Tick()))
    assert refused == replace(refused, request_id="r2", status=429, reason="queue_deadline")
    assert (refused.measured, refused.threshold) == (5, 5)
    assert [r.request_id for r in rejects(driver.at(60, Tick()))] == ["r1"]
    assert driver.pool.places == 1


def test_an_early_tick_asks_for_the_same_time_again() -> None:
    driver = one_slot()
    driver.arrive(0, request("r0"), request("r1"))
    assert driver.fleet.handle(Tick(), seconds(60) - 1) == [WakeAt(seconds(60))]


# ------------------------------------------------------------------------ what can never be served


@pytest.mark.parametrize(
    ("prompt", "output", "measured"),
    [(2048, 1, 2048), (3000, 1, 3000), (2000, 200, 2200)],
    ids=["no room for a token", "prompt over", "prompt and output over"],
)
def test_d03_a_request_over_the_context_is_refused_at_once(
    prompt: int, output: int, measured: int
) -> None:
    driver = one_slot()
    (refused,) = rejects(driver.arrive(0, request("r", prompt, output)))
    assert (refused.status, refused.reason) == (400, "context_length_exceeded")
    assert (refused.measured, refused.threshold) == (measured, 2048)
    assert refused.retry_after_s is None


def test_d03_a_request_that_fills_the_context_exactly_runs() -> None:
    assert dispatched(one_slot().arrive(0, request("r", 2000, 48))) == [("r", "m-0")]


def test_a_request_over_the_kv_pool_is_refused_at_once() -> None:
    driver = one_slot(limits=replace(LIMITS, blocks_total=4))
    (refused,) = rejects(driver.arrive(0, request("r", 100, 29)))
    assert (refused.reason, refused.measured, refused.threshold) == (
        "context_length_exceeded",
        129,
        128,
    )


def test_more_choices_than_a_replica_runs_are_refused() -> None:
    (refused,) = rejects(one_slot(queue=9).arrive(0, request("r", choices=2)))
    assert (refused.status, refused.reason, refused.measured, refused.threshold) == (
        400,
        "too_many_choices",
        2,
        1,
    )


def test_an_unknown_model_or_a_used_id_changes_nothing() -> None:
    driver = one_slot()
    driver.arrive(0, request("r"))
    before = driver.pool
    with pytest.raises(KeyError):
        driver.arrive(0, request("x"), model="unknown")
    with pytest.raises(ValueError, match="r is in use"):
        driver.arrive(0, request("r"))
    assert driver.pool == before


# -------------------------------------------------------------------------------------- cancelling


def test_d06_cancelled_waiters_are_never_dispatched() -> None:
    driver = one_slot(queue=9)
    driver.arrive(0, *(request(name) for name in "ABCDE"))
    assert driver.at(1, *(Cancelled(name) for name in "BCD")) == []
    assert driver.pool.waiting == 1
    assert dispatched(driver.complete(5, "A")) == [("E", "m-0")]


def test_a_cancelled_running_request_is_aborted_and_its_place_is_free_at_once() -> None:
    driver = one_slot()
    driver.arrive(0, request("A"), request("B"))
    effects = driver.at(1, Cancelled("A"))
    assert effects[0] == Abort("A", "m-0")
    assert dispatched(effects) == [("B", "m-0")]
    late = driver.at(1, Ended("A", EndReason.CANCELLED, Usage(10, 0, 3), PhaseTimes()))
    assert late == []
    assert driver.pool.places == 1


def test_d08_no_place_leaks_over_cycles_of_cancel_fail_and_loss() -> None:
    driver = Driver(PoolLimits("m", ("m-0",)), restarts=RestartLimits(losses_max=10**6))
    limits = replace(LIMITS, sequences_max=2)
    driver.at(0, ReplicaReady("m-0", limits))
    for cycle in range(50):
        now_s = 100.0 * cycle
        driver.arrive(now_s, *(request(f"{cycle}{x}") for x in "abcde"))
        driver.at(now_s, Progress(f"{cycle}a", 1), Cancelled(f"{cycle}a"))
        failed = Ended(f"{cycle}b", EndReason.FAILED, Usage(10, 0, 0), PhaseTimes())
        driver.at(now_s, failed, Cancelled(f"{cycle}e"))
        driver.at(now_s, ReplicaLost("m-0", "gone"))
        driver.at(now_s + 40, Tick())
        driver.at(now_s + 40, ReplicaReady("m-0", limits))
        driver.at(now_s + 40, ReplicaLost("m-0", "gone"))
        driver.at(now_s + 99, Tick())
        driver.at(now_s + 99, ReplicaReady("m-0", limits))
        view = driver.pool
        assert (view.places, view.waiting_places, driver.fleet.requests) == (0, 0, 0)
    assert len(dispatched(driver.arrive(5000, request("x"), request("y")))) == 2


# ------------------------------------------------------------------------------- which replica


def test_equal_replicas_share_the_load() -> None:
    driver = two_replicas()
    effects = driver.arrive(0, *(request(f"r{i}") for i in range(8)))
    names = [name for _, name in dispatched(effects)]
    assert names.count("a") == names.count("b") == 4


def test_the_decision_keeps_the_scores_of_all_replicas() -> None:
    driver = two_replicas()
    driver.arrive(0, request("r0"))
    (effect,) = driver.arrive(0, request("r1"))
    assert isinstance(effect, Dispatch)
    assert [score.replica_id for score in effect.scores] == ["b", "a"]
    assert effect.scores[0].score < effect.scores[1].score


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    driver = two_replicas()
    shared = request("r0", 640)
    ((_, first),) = dispatched(driver.arrive(0, shared))
    other = replace(shared, id="r1", prompt=tuple(range(5000, 5640)))
    ((_, second),) = dispatched(driver.arrive(0, other))
    assert first != second
    driver.at(1, Progress("r0", 1), Progress("r1", 1))
    again = [replace(shared, id=f"again{i}") for i in range(3)]
    for follower in again:
        ((_, picked),) = dispatched(driver.arrive(1, follower))
        assert picked == first
        driver.at(1, Progress(follower.id, 1))


def test_a_replica_short_of_kv_comes_last() -> None:
    driver = two_replicas()
    full = report(running=1, blocks_free=2)
    driver.at(1, ReplicaReported("a", full), ReplicaReported("b", report()))
    effects = driver.arrive(1, *(request(f"r{i}", 64) for i in range(4)))
    assert {name for _, name in dispatched(effects)} == {"b"}


def test_d20_a_replica_with_an_old_report_gets_few_requests_while_others_report() -> None:
    driver = Driver(PoolLimits("m", ("r1", "r2", "r3")))
    limits = replace(LIMITS, sequences_max=100, blocks_total=100_000)
    driver.at(0, *(ReplicaReady(name, limits) for name in ("r1", "r2", "r3")))
    driver.at(0, *(ReplicaReported(name, report()) for name in ("r1", "r2", "r3")))
    picked = []
    for i in range(100):
        now_s = 60 + i / 10
        driver.at(now_s, ReplicaReported("r2", report()), ReplicaReported("r3", report()))
        picked += [name for _, name in dispatched(driver.arrive(now_s, request(f"x{i}")))]
    assert len(picked) == 100
    assert picked.count("r1") <= 5


def test_d20_with_all_reports_old_requests_spread_by_own_counts() -> None:
    driver = Driver(PoolLimits("m", ("r1", "r2", "r3")))
    limits = replace(LIMITS, sequences_max=100, blocks_total=100_000)
    driver.at(0, *(ReplicaReady(name, limits) for name in ("r1", "r2", "r3")))
    effects = driver.arrive(60, *(request(f"x{i}") for i in range(99)))
    counts = [[name for _, name in dispatched(effects)].count(name) for name in ("r1", "r2", "r3")]
    assert sum(counts) == 99
    assert all(28 <= count <= 38 for count in counts)
    assert [r.report_age_ns for r in driver.pool.replicas] == [None, None, None]


# ------------------------------------------------------------------------- the life of a replica


def test_the_first_tick_starts_every_replica_and_no_other_does() -> None:
    fleet = Fleet([PoolLimits("m", ("a", "b"))], chance=random.Random(0))
    assert fleet.handle(Tick(), 0) == [StartReplica("a"), StartReplica("b")]
    assert fleet.handle(Tick(), 1) == []


def test_before_a_replica_is_ready_requests_are_refused_with_the_time_to_ready() -> None:
    driver = Driver(PoolLimits("m", ("m-0",)))
    (refused,) = rejects(driver.arrive(4, request("r")))
    assert (refused.status, refused.reason) == (503, "not_ready")
    assert refused.retry_after_s is not None
    assert 6 <= refused.retry_after_s <= 7.5  # 10 s are assumed until a load was seen
    driver.at(5, ReplicaReady("m-0", LIMITS), ReplicaLost("m-0", "gone"))
    (again,) = rejects(driver.arrive(5, request("r")))
    assert again.retry_after_s is not None
    assert 5 <= again.retry_after_s <= 6.3  # no back-off, and the 5 s that the load took


def test_a_lost_replica_is_started_again_at_once_then_with_growing_waits_then_rarely() -> None:
    limits = RestartLimits(losses_max=4)
    driver = Driver(PoolLimits("m", ("m-0",)), restarts=limits)
    now_s = 0.0
    waits, states = [], []
    for _ in range(5):
        driver.at(now_s, ReplicaReady("m-0", LIMITS))
        driver.at(now_s, ReplicaLost("m-0", "exit status 1"))
        (view,) = driver.pool.replicas
        assert view.start_ns is not None
        waits.append(view.start_ns / NS_PER_S - now_s)
        states.append(view.state)
        assert view.error == "exit status 1"
        now_s = view.start_ns / NS_PER_S
        assert driver.at(now_s, Tick()) == [StartReplica("m-0")]
    assert waits == [0, 1, 2, 60, 60]
    assert states == [ReplicaState.BACKOFF] * 3 + [ReplicaState.CRASH_LOOP] * 2


def test_one_that_never_became_ready_waits_from_its_first_loss_on() -> None:
    driver = Driver(PoolLimits("m", ("m-0",)))
    waits, now_s = [], 0.0
    for _ in range(3):
        driver.at(now_s, ReplicaLost("m-0", "exit status 1"))
        (view,) = driver.pool.replicas
        assert view.start_ns is not None
        waits.append(view.start_ns / NS_PER_S - now_s)
        now_s = view.start_ns / NS_PER_S
        driver.at(now_s, Tick())
    assert waits == [0.5, 1, 2]


def test_losses_long_ago_are_forgotten() -> None:
    driver = Driver(PoolLimits("m", ("m-0",)), restarts=RestartLimits(losses_max=2))
    for now_s in (0, 1000, 2000):
        driver.at(now_s, ReplicaReady("m-0", LIMITS), ReplicaLost("m-0", "gone"))
        assert driver.pool.replicas[0].state is ReplicaState.BACKOFF
        driver.at(now_s + 1, Tick())


def test_a_loss_reported_twice_counts_once_and_a_ready_out_of_order_raises() -> None:
    driver = one_slot()
    driver.at(1, ReplicaLost("m-0", "first"), ReplicaLost("m-0", "second"))
    view = driver.pool.replicas[0]
    assert (view.losses, view.error) == (1, "first")
    with pytest.raises(InternalError):
        driver.at(1, ReplicaReady("m-0", LIMITS))
    assert driver.pool.replicas[0] == view


def test_a_late_report_of_a_lost_replica_is_ignored() -> None:
    driver = one_slot()
    driver.at(1, ReplicaLost("m-0", "gone"), ReplicaReported("m-0", report(running=9)))
    assert driver.pool.replicas[0].report is None


def test_requests_of_a_lost_replica_move_once_and_those_with_tokens_fail() -> None:
    driver = two_replicas()
    driver.arrive(0, *(request(f"r{i}") for i in range(4)))
    on_a = list(driver.fleet._replicas["a"].on_board)
    driver.at(1, Progress(on_a[0], 3))
    effects = driver.at(2, ReplicaLost("a", "killed"))
    (failed,) = [e for e in effects if isinstance(e, Fail)]
    assert (failed.request_id, failed.reason) == (on_a[0], EndReason.FAILED)
    assert "3 tokens" in failed.error
    assert "killed" in failed.error
    assert [
        (e.request_id, e.replica_id, e.attempt) for e in effects if isinstance(e, Dispatch)
    ] == [(on_a[1], "b", 2)]


def test_a_request_on_board_of_two_losses_is_not_tried_again() -> None:
    driver = one_slot()
    driver.arrive(0, request("poison"), request("next"))
    driver.at(1, ReplicaLost("m-0", "killed"))
    driver.at(2, Tick())
    effects = driver.at(3, ReplicaReady("m-0", LIMITS))
    assert dispatched(effects) == [("poison", "m-0")]
    effects = driver.at(4, ReplicaLost("m-0", "killed"))
    assert [e.request_id for e in effects if isinstance(e, Fail)] == ["poison"]
    driver.at(6, Tick())
    assert dispatched(driver.at(6, ReplicaReady("m-0", LIMITS))) == [("next", "m-0")]


def test_a_request_on_board_of_a_replica_that_fell_silent_is_not_tried_again() -> None:
    driver = one_slot()
    driver.arrive(0, request("poison"), request("next"))
    effects = driver.at(1, ReplicaLost("m-0", "silent for 30 s", silent=True))
    (failed,) = [e for e in effects if isinstance(e, Fail)]
    assert (failed.request_id, failed.reason) == ("poison", EndReason.FAILED)
    assert "silent for 30 s" in failed.error
    driver.at(2, Tick())
    assert dispatched(driver.at(3, ReplicaReady("m-0", LIMITS))) == [("next", "m-0")]


def test_a_second_wait_of_one_request_may_end_at_the_same_time_as_its_first() -> None:
    driver = one_slot()
    driver.arrive(0, request("r", deadline_ns=seconds(9)), request("next", deadline_ns=seconds(9)))
    driver.at(1, ReplicaLost("m-0", "killed"))
    effects = driver.at(9, Tick())
    assert [e.request_id for e in effects if isinstance(e, Fail)] == ["r"]
    assert [e.reason for e in effects if isinstance(e, Fail)] == [EndReason.EXPIRED]
    assert [r.request_id for r in rejects(effects)] == ["next"]


def test_a_pool_in_a_crash_loop_ends_those_who_wait() -> None:
    driver = Driver(PoolLimits("m", ("m-0",)), restarts=RestartLimits(losses_max=1))
    driver.at(0, ReplicaReady("m-0", LIMITS))
    driver.arrive(0, request("ran"), request("waited"))
    effects = driver.at(1, ReplicaLost("m-0", "killed"))
    assert [(e.request_id, e.reason) for e in effects if isinstance(e, Fail)] == [
        ("ran", EndReason.FAILED)
    ]
    (refused,) = rejects(effects)
    assert (refused.request_id, refused.status, refused.reason) == ("waited", 503, "not_ready")
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 60
    assert driver.fleet.requests == 0


def test_a_replica_lost_for_good_is_not_started_again_and_its_waiting_are_told_so() -> None:
    driver = one_slot()
    driver.arrive(0, request("ran"), request("waited"))
    effects = driver.at(1, ReplicaLost("m-0", "no such file", permanent=True))
    assert [e.request_id for e in effects if isinstance(e, Fail)] == ["ran"]
    for refused in (*rejects(effects), *rejects(driver.arrive(2, request("late")))):
        assert (refused.status, refused.reason) == (503, "load_failed")
        assert refused.retry_after_s is None
    view = driver.pool.replicas[0]
    assert (view.state, view.error) == (ReplicaState.FAILED, "no such file")
    assert view.start_ns is None
    assert driver.at(1000, Tick()) == []
    assert driver.at(1001, FleetDraining(seconds(1002)), Tick()) == []
    assert driver.fleet.requests == 0


def test_a_model_with_one_failed_replica_is_served_by_the_other() -> None:
    driver = two_replicas()
    driver.at(1, ReplicaLost("a", "no such file", permanent=True))
    assert dispatched(driver.arrive(2, request("r"))) == [("r", "b")]


# ------------------------------------------------------------------------------------ draining


def test_a_draining_fleet_admits_nothing_and_finishes_what_it_accepted() -> None:
    driver = one_slot()
    driver.arrive(0, request("A"), request("B"))
    assert driver.at(1, FleetDraining(seconds(31))) == []
    (refused,) = rejects(driver.arrive(2, request("C")))
    assert (refused.status, refused.reason) == (503, "draining")
    assert refused.retry_after_s is not None
    assert 29 <= refused.retry_after_s <= 36.25
    assert dispatched(driver.complete(3, "A")) == [("B", "m-0")]
    driver.complete(5, "B")
    assert driver.fleet.requests == 0


@pytest.mark.parametrize("state", ["starting", "free", "concurrency", "draining"])
def test_a_refusal_that_does_not_depend_on_the_prompt_is_foreseen(state: str) -> None:
    driver = Driver(PoolLimits("m", ("m-0",)), tenants=(TenantLimits("t", concurrency=1),))
    if state != "starting":
        driver.at(1, ReplicaReady("m-0", LIMITS))
    if state == "concurrency":
        driver.arrive(2, request("A", tenant="t"))
    if state == "draining":
        driver.at(2, FleetDraining(seconds(30)))
    before = driver.fleet.pools(driver.now_ns), driver.fleet.requests
    least = replace(request("C", tenant="t"), prompt=(), output_tokens_max=1)
    foreseen = driver.fleet.refusal_before("m", least, driver.now_ns)
    assert (driver.fleet.pools(driver.now_ns), driver.fleet.requests) == before
    refused = rejects(driver.arrive(driver.now_ns / NS_PER_S, request("C", tenant="t")))
    if foreseen is None:
        assert state == "free"
        assert refused == []
    else:
        assert replace(refused[0], retry_after_s=None) == replace(foreseen, retry_after_s=None)
    assert driver.fleet.draining is (state == "draining")


def test_too_many_choices_are_not_told_to_come_back_later() -> None:
    driver = one_slot()
    least = replace(request("C"), choices=2, prompt=(), output_tokens_max=1)
    assert driver.fleet.refusal_before("m", least, 0) is None


@pytest.mark.parametrize(
    ("ladder", "reason", "numbers"),
    [
        ((Rung.SMALLER,), "no_free_place", (3, 1)),
        ((Rung.SHORTEN, Rung.QUEUE), "queue_full", (3, 2)),
    ],
)
def test_a_full_queue_is_foreseen_and_its_refusal_is_the_one_that_arrival_gives(
    ladder: tuple[Rung, ...], reason: str, numbers: tuple[float, float]
) -> None:
    driver = one_slot(queue=1)
    driver.arrive(0, request("A"), request("B"))
    asked = replace(request("C"), likeness=7, overload=ladder)
    least = replace(asked, prompt=(), output_tokens_max=1)
    foreseen = driver.fleet.refusal_before("m", least, seconds(1))
    (told,) = rejects(driver.arrive(1, asked))
    assert foreseen is not None
    assert (foreseen.status, foreseen.reason) == (told.status, told.reason) == (429, reason)
    assert (foreseen.measured, foreseen.threshold) == (told.measured, told.threshold) == numbers


def test_a_full_queue_is_not_foreseen_for_what_a_smaller_model_may_answer() -> None:
    small = PoolLimits("s", ("s-0",))
    driver = Driver(PoolLimits("m", ("m-0",), queue_places_max=1, smaller="s"), small)
    driver.at(0, ReplicaReady("m-0", replace(LIMITS, sequences_max=1)))
    driver.arrive(0, request("A"), request("B"))
    least = replace(request("C"), likeness=7, prompt=(), output_tokens_max=1)
    assert driver.fleet.refusal_before("m", least, 1) is not None
    may_leave = replace(least, overload=(Rung.SMALLER, Rung.QUEUE))
    assert driver.fleet.refusal_before("m", may_leave, 1) is None


def test_a_client_refused_before_its_prompt_was_read_is_known_when_it_comes_back() -> None:
    driver = one_slot(queue=1)
    driver.arrive(0, request("A"), request("B"))
    asked = replace(request("C"), likeness=7)
    least = replace(asked, prompt=(), output_tokens_max=1)
    foreseen = driver.fleet.refusal_before("m", least, seconds(1))
    assert foreseen is not None
    assert foreseen.retry_after_s is not None
    assert driver.fleet.pools(seconds(1))[0].bookings == 1
    back_s = 1 + foreseen.retry_after_s
    driver.complete(back_s - 0.1, "A")
    driver.arrive(back_s, asked)
    assert driver.fleet.pools(driver.now_ns)[0].bookings == 0


def test_what_is_left_when_the_grace_period_ends_is_ended() -> None:
    driver = one_slot()
    driver.arrive(0, request("A"), request("B"))
    assert WakeAt(seconds(31)) in driver.fleet.handle(FleetDraining(seconds(31)), seconds(1))
    effects = driver.at(31, Tick())
    assert effects == [
        Abort("A", "m-0"),
        Fail("A", EndReason.SHUTDOWN, "the server is shutting down"),
        Fail("B", EndReason.SHUTDOWN, "the server is shutting down"),
    ]


def test_a_replica_lost_while_draining_is_not_started_again() -> None:
    driver = one_slot()
    driver.arrive(0, request("A"), request("B"))
    driver.at(1, FleetDraining(seconds(31)))
    effects = driver.at(2, ReplicaLost("m-0", "killed"))
    assert [type(effect) for effect in effects] == [Fail, Reject]
    assert driver.at(20, Tick()) == []
    assert driver.pool.replicas[0].state is ReplicaState.STOPPED
