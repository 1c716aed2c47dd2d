"""Which replicas start, wake, drain and stop, decided by the fleet at times of the test's own."""

from dataclasses import replace
from typing import Any

import pytest

from sluice.core.events import (
    DrainReplica,
    Ended,
    Fail,
    FleetEffect,
    Reconfigured,
    Reject,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    ReplicasPinned,
    Scaled,
    StartReplica,
    StopReplica,
    Tick,
    WarmReplica,
)
from sluice.core.lifecycle import ReplicaState
from sluice.core.limits import Peak, PoolLimits, ScaleLimits
from sluice.core.request import EndReason, PhaseTimes, Usage
from tests.core.fleet_rig import LIMITS, Driver, dispatched, report, request, seconds

WIDE = replace(LIMITS, sequences_max=64)
MINUTE = 60


def scaled(replicas: int = 4, **limits: Any) -> Driver:
    scale = ScaleLimits(replicas_max=replicas, **limits)
    names = tuple(f"m-{number}" for number in range(replicas))
    return Driver(PoolLimits("m", names, scale=scale))


def ticks(driver: Driver, from_s: float, to_s: float, every_s: float = 10) -> list[FleetEffect]:
    """All effects while nothing but time passes."""
    found, at_s = list[FleetEffect](), from_s
    while at_s <= to_s:
        found += driver.at(at_s, Tick())
        at_s += every_s
    return found


def states(driver: Driver) -> list[str]:
    return [one.state.value for one in driver.pool.replicas]


def wanted(driver: Driver) -> int:
    assert driver.pool.scaling is not None
    return driver.pool.scaling.number


def pinned(number: int, **limits: Any) -> Driver:
    """So many replicas serve, and the load decides from the next period on."""
    driver = scaled(**limits)
    driver.at(0, ReplicasPinned("m", number))
    for index in range(number):
        driver.at(1, ReplicaReady(f"m-{index}", WIDE))
    driver.at(1, ReplicasPinned("m", None))
    return driver


def of(kind: type, effects: list[FleetEffect]) -> list[FleetEffect]:
    return [one for one in effects if isinstance(one, kind)]


def test_only_the_least_replicas_start_at_first():
    driver = scaled(replicas_min=2)
    assert states(driver) == ["starting", "starting", "stopped", "stopped"]


def test_a_warm_replica_is_loaded_and_gets_nothing():
    driver = scaled(warm=1)
    assert states(driver)[:2] == ["starting", "starting"]
    driver.at(1, ReplicaReady("m-0", WIDE), ReplicaReady("m-1", WIDE))
    assert states(driver)[:2] == ["ready", "warm"]
    names = [f"r{number}" for number in range(8)]
    effects = driver.arrive(2, *(request(name) for name in names))
    assert {replica for _, replica in dispatched(effects)} == {"m-0"}


def test_a_warm_replica_is_woken_before_a_cold_one_starts_and_the_pool_is_filled_again():
    driver = scaled(warm=1)
    driver.at(1, ReplicaReady("m-0", WIDE), ReplicaReady("m-1", WIDE))
    effects = driver.at(2, ReplicasPinned("m", 2))
    assert of(StartReplica, effects) == [StartReplica("m-1")]
    assert of(WarmReplica, effects) == [WarmReplica("m-2")]
    driver.at(3, ReplicaReady("m-1", WIDE))
    assert states(driver)[:3] == ["ready", "ready", "starting"]


def test_a_warm_replica_takes_the_place_of_a_lost_one_at_once_and_that_one_loads_to_be_warm():
    driver = scaled(warm=1)
    driver.at(1, ReplicaReady("m-0", WIDE), ReplicaReady("m-1", WIDE))
    effects = driver.at(5, ReplicaLost("m-0", "its machine is gone"))
    assert [one.replica_id for one in effects if isinstance(one, StartReplica)] == ["m-1"]
    assert [one.replica_id for one in effects if isinstance(one, WarmReplica)] == ["m-0"]
    driver.at(6, ReplicaReady("m-1", WIDE))
    driver.at(9, ReplicaReady("m-0", WIDE))
    assert states(driver)[:3] == ["warm", "ready", "stopped"]


def test_a_lost_replica_that_served_starts_again_at_once_and_the_next_time_after_a_wait():
    driver = pinned(2)
    lost = driver.at(2, ReplicaLost("m-1", "its machine is gone"))
    assert [one.replica_id for one in lost if isinstance(one, StartReplica)] == ["m-1"]
    driver.at(3, ReplicaReady("m-1", WIDE))
    assert not of(StartReplica, driver.at(4, ReplicaLost("m-1", "killed")))
    assert states(driver)[:2] == ["ready", "backoff"]
    assert len(of(StartReplica, ticks(driver, 4.1, 6, 0.1))) == 1


def test_a_warm_replica_is_woken_between_decisions_once_somebody_has_waited_a_second():
    driver = scaled(warm=1)
    driver.at(1, ReplicaReady("m-0", LIMITS), ReplicaReady("m-1", LIMITS))
    driver.at(10, Tick())
    places = LIMITS.sequences_max
    driver.arrive(11, *(request(f"r{number}") for number in range(places + 1)))
    assert not of(StartReplica, driver.at(11.9, Tick()))
    effects = driver.at(12.1, Tick())
    assert [one.replica_id for one in effects if isinstance(one, StartReplica)][:1] == ["m-1"]
    assert [one.reason for one in effects if isinstance(one, Scaled)] == ["queue_wait"]
    assert dispatched(driver.at(12.5, ReplicaReady("m-1", LIMITS))) == [(f"r{places}", "m-1")]


def test_as_many_warm_replicas_are_woken_as_work_off_what_waits():
    driver = scaled(8, warm=5)
    driver.at(1, *(ReplicaReady(f"m-{number}", LIMITS) for number in range(6)))
    driver.at(2, ReplicaReported("m-0", report(decode_tokens_per_s=10.0)))
    driver.at(10, Tick())
    # Eight that wait take 10 s each; to be gone within 30 s that takes three more.
    driver.arrive(11, *(request(f"r{number}", output=100) for number in range(9)))
    effects = driver.at(12.1, Tick())
    woken = [one.replica_id for one in effects if isinstance(one, StartReplica)]
    assert woken == ["m-1", "m-2", "m-3"]


def test_who_was_woken_between_decisions_stays_for_a_whole_window():
    driver = scaled(warm=1)
    driver.at(1, ReplicaReady("m-0", LIMITS), ReplicaReady("m-1", LIMITS))
    ticks(driver, 10, 700)
    driver.arrive(701, request("one"), request("two"))
    driver.at(702.1, Tick())
    driver.at(702.5, ReplicaReady("m-1", LIMITS))
    driver.complete(704, "one")
    driver.complete(704, "two")
    for at_s in range(710, 1300, 10):
        driver.at(at_s, Tick())
        assert wanted(driver) == 2
    ticks(driver, 1300, 1320)
    assert wanted(driver) == 1


def test_nothing_is_taken_away_before_a_whole_window_was_seen():
    driver = pinned(3)
    ticks(driver, 10, 590)
    assert wanted(driver) == 3
    ticks(driver, 600, 620)
    assert wanted(driver) == 2


def test_d16_what_a_stopped_replica_said_last_counts_for_nothing():
    driver = pinned(3, replicas_min=2)
    effects = ticks(driver, 10, 15 * MINUTE)
    assert wanted(driver) == 2
    (gone,) = of(StopReplica, effects)
    assert isinstance(gone, StopReplica)
    ghost = report(waiting=50, blocks_free=2, preemptions=9)
    for second in range(15 * MINUTE + 5, 16 * MINUTE + 5, 5):
        driver.at(second, ReplicaReported(gone.replica_id, ghost), Tick())
        assert wanted(driver) == 2


def test_d16_streams_that_ended_leave_nothing_behind_and_the_pool_comes_down():
    driver = pinned(2)
    names = [f"r{number}" for number in range(100)]
    effects = driver.arrive(2, *(request(name) for name in names))
    assert len(dispatched(effects)) == 100
    for name in names:
        driver.complete(20, name)
    assert driver.fleet.requests == 0
    ticks(driver, 30, 14 * MINUTE)
    assert states(driver).count("ready") == 1


def from_zero() -> Driver:
    return scaled(
        1,
        replicas_min=0,
        start_ns=seconds(20),
        idle_ns=seconds(5),
        hold_places=40,
        hold_ns=seconds(30),
    )


def test_d17_the_first_request_wakes_one_and_those_that_are_held_succeed():
    driver = from_zero()
    assert states(driver) == ["stopped"]
    names = [f"r{number}" for number in range(50)]
    effects = driver.arrive(0, *(request(name, ttft_due_ns=seconds(1)) for name in names))
    assert len(of(StartReplica, effects)) == 1
    refused = [one for one in effects if isinstance(one, Reject)]
    assert len(refused) == 10
    assert all(one.status == 503 and one.retry_after_s is not None for one in refused)
    assert all(15 <= (one.retry_after_s or 0) <= 30 for one in refused)
    waiting = ticks(driver, 1, 19, 1)
    assert not [one for one in waiting if not isinstance(one, Scaled)]
    served = driver.at(20, ReplicaReady("m-0", WIDE))
    assert len(dispatched(served)) == 40


def test_d17_the_last_replica_goes_when_nobody_asked_for_long():
    driver = from_zero()
    driver.arrive(0, request("one"))
    driver.at(20, ReplicaReady("m-0", WIDE))
    assert of(StopReplica, ticks(driver, 21, 29, 1)) == []
    effects = driver.complete(30, "one") + ticks(driver, 31, 60)
    assert of(StopReplica, effects) == [StopReplica("m-0")]
    assert of(StartReplica, driver.arrive(100, request("two"))) == [StartReplica("m-0")]


def with_stream(**limits: Any) -> tuple[Driver, str]:
    """Two replicas, one of which answers; then one of them is to go."""
    driver = pinned(2, **limits)
    ((_, busy),) = dispatched(driver.arrive(2, request("long")))
    return driver, busy


def test_d18_who_has_least_to_do_is_drained_and_gets_nothing_more():
    driver, busy = with_stream()
    (drained,) = of(DrainReplica, driver.at(3, ReplicasPinned("m", 1)))
    assert isinstance(drained, DrainReplica)
    assert drained.replica_id != busy
    effects = driver.arrive(4, *(request(f"r{number}") for number in range(5)))
    assert {replica for _, replica in dispatched(effects)} == {busy}


def test_d18_a_replica_that_drains_stops_when_its_last_stream_ended():
    driver, busy = with_stream()
    other = "m-1" if busy == "m-0" else "m-0"
    driver.arrive(3, *(request(f"r{number}") for number in range(3)))
    on_other = next(one for one in driver.pool.replicas if one.id == other).requests
    assert on_other == 2
    effects = driver.at(4, ReplicasPinned("m", 1))
    assert of(StopReplica, effects) == []
    (drained,) = of(DrainReplica, effects)
    assert isinstance(drained, DrainReplica)
    ids = ["long", "r0", "r1", "r2"]
    found = list[FleetEffect]()
    for second, name in enumerate(ids, 10):
        found += driver.complete(second, name)
    assert of(StopReplica, found) == [StopReplica(drained.replica_id)]
    assert of(Fail, found) == []


def test_d18_at_the_limit_a_stream_ends_once_with_the_reason_and_the_replica_stops():
    driver = pinned(2, leave_ns=seconds(5))
    driver.arrive(2, request("a"), request("b"))
    driver.at(3, ReplicasPinned("m", 1))
    effects = ticks(driver, 4, 12, 1)
    (failed,) = of(Fail, effects)
    assert isinstance(failed, Fail)
    assert failed.reason is EndReason.SHUTDOWN
    assert len(of(StopReplica, effects)) == 1
    usage, phases = Usage(10, 0, 5), PhaseTimes()
    late = driver.at(13, Ended(failed.request_id, EndReason.FAILED, usage, phases))
    assert of(Fail, late) == []


def test_a_drain_is_taken_back_before_anything_starts():
    driver, _ = with_stream()
    driver.arrive(3, request("two"))
    driver.at(4, ReplicasPinned("m", 1))
    assert sorted(states(driver)[:2]) == ["draining", "ready"]
    driver.at(5, ReplicasPinned("m", 2))
    assert states(driver) == ["ready", "ready", "stopped", "stopped"]


def test_a_start_that_is_not_wanted_any_more_is_stopped_first():
    driver = pinned(1)
    driver.at(2, ReplicasPinned("m", 2))
    assert of(StopReplica, driver.at(3, ReplicasPinned("m", 1))) == [StopReplica("m-1")]
    driver.at(4, ReplicaReady("m-1", WIDE))  # it comes too late
    assert states(driver)[:2] == ["ready", "stopped"]


def test_a_schedule_is_a_floor_from_so_early_that_it_is_met():
    peak = Peak(seconds(600), seconds(1200), seconds(86_400), 3)
    driver = pinned(1, peaks=(peak,))  # its start took a second
    ticks(driver, 10, 580)
    assert wanted(driver) == 1
    for at_s in range(590, 1200, 10):
        driver.at(at_s, Tick())
        if at_s == 590:
            driver.at(at_s, ReplicaReady("m-1", WIDE), ReplicaReady("m-2", WIDE))
        assert wanted(driver) == 3


def test_aibrix_2670_a_crash_loop_is_visible_and_another_replica_takes_its_place():
    driver = scaled(replicas_min=1)
    at_s = 0.0
    for _ in range(5):
        at_s += 1
        driver.at(at_s, ReplicaLost("m-0", "out of memory"))
        for _ in range(200):
            if states(driver)[0] != "backoff":
                break
            at_s += 1
            driver.at(at_s, Tick())
    assert states(driver)[0] == ReplicaState.CRASH_LOOP
    driver.at(at_s + 10, Tick())
    assert states(driver)[1] == "starting"
    assert states(driver)[2:] == ["stopped", "stopped"]


def test_dynamo_4420_a_number_that_somebody_else_set_holds_until_it_is_left_to_the_load_again():
    driver = pinned(1)
    driver.at(5, ReplicasPinned("m", 3))
    ticks(driver, 10, 20 * MINUTE)
    assert wanted(driver) == 3
    for index in (1, 2):
        driver.at(20 * MINUTE, ReplicaReady(f"m-{index}", WIDE))
    driver.at(20 * MINUTE + 1, ReplicasPinned("m", None))
    ticks(driver, 21 * MINUTE, 50 * MINUTE)
    assert wanted(driver) == 1


def test_missing_reports_hold_what_there_is_and_true_zero_comes_down():
    driver = pinned(3)
    driver.arrive(2, *(request(f"r{number}") for number in range(3)))
    ticks(driver, 10, 20 * MINUTE)  # none of the replicas tells of itself
    assert wanted(driver) == 3
    for number in range(3):
        driver.complete(20 * MINUTE, f"r{number}")
    ticks(driver, 20 * MINUTE + 10, 40 * MINUTE)
    assert wanted(driver) == 1


def test_the_greatest_number_is_never_passed_and_what_is_needed_is_told():
    driver = scaled(2, replicas_min=1, hold_places=1000, hold_ns=seconds(600))
    driver.at(1, ReplicaReady("m-0", LIMITS))
    for second in range(2, 60):
        driver.arrive(second, *(request(f"{second}-{n}") for n in range(3)))
        driver.at(second, Tick())
    scaling = driver.pool.scaling
    assert scaling is not None
    assert scaling.number == 2
    assert scaling.needed > 2
    assert scaling.short_of is not None


@pytest.mark.parametrize("step", [-100, -1])
def test_a_clock_that_jumps_back_changes_nothing(step):
    driver = pinned(2, replicas_min=2)
    ticks(driver, 100, 200)
    driver.at(200 + step, Tick())
    assert states(driver)[:2] == ["ready", "ready"]
    assert wanted(driver) == 2


@pytest.mark.parametrize("later_s", [1000, 9000], ids=["back", "forward"])
def test_after_a_clock_jump_decisions_go_on_and_nothing_is_taken_away_for_a_window(later_s):
    driver = pinned(3)
    ticks(driver, 5000, 5620)
    assert wanted(driver) == 2
    for at_s in range(later_s, later_s + 600, 10):
        driver.at(at_s, Tick())
        assert wanted(driver) == 2
    ticks(driver, later_s + 600, later_s + 620)
    assert wanted(driver) == 1


def test_a_report_that_contradicts_what_was_dispatched_starts_nothing():
    driver = pinned(1)
    busy = report(waiting=50, running=50, blocks_free=0, preemptions=9)
    for second in range(5, 300, 5):
        driver.at(second, ReplicaReported("m-0", busy), Tick())
        assert wanted(driver) == 1
    # A counter that begins anew, as of another process, is no preemption; one that rises is.
    driver.at(300, ReplicaReported("m-0", report()), Tick())
    ticks(driver, 310, 330)
    assert wanted(driver) == 1
    driver.at(331, ReplicaReported("m-0", report(preemptions=1)))
    ticks(driver, 340, 350)
    assert driver.pool.scaling is not None
    assert dict(driver.pool.scaling.terms)["least"] == 1
    assert wanted(driver) == 2


def test_duplicate_and_late_news_of_replicas_change_nothing():
    driver = pinned(2)
    driver.at(2, ReplicaReady("m-0", WIDE), ReplicaReady("m-0", WIDE))
    assert states(driver)[:2] == ["ready", "ready"]
    lost = ReplicaLost("m-1", "killed")
    driver.at(2, lost, ReplicaReady("m-1", WIDE))
    assert of(StartReplica, driver.at(3, lost, lost)) == []
    assert driver.pool.replicas[1].losses == 2
    driver.at(3.1, ReplicaReady("m-1", WIDE))  # of the process that is gone
    assert states(driver)[:2] == ["ready", "backoff"]
    assert of(StartReplica, ticks(driver, 3.2, 9, 0.1)) == [StartReplica("m-1")]
    assert wanted(driver) == 2


def test_a_start_that_the_cluster_refuses_is_told_and_tried_again_while_others_serve():
    driver = scaled(2, replicas_min=2)
    driver.at(1, ReplicaReady("m-0", WIDE))
    at_s, tries = 1.0, 0
    while at_s < 120:
        for effect in driver.at(at_s, Tick()):
            assert isinstance(effect, StartReplica)
            assert effect.replica_id == "m-1"
            tries += 1
            driver.at(at_s, ReplicaLost("m-1", "quota: 8 of 8 GPUs are in use"))
        if not tries:
            driver.at(at_s, ReplicaLost("m-1", "quota: 8 of 8 GPUs are in use"))
        at_s += 0.5
    assert 4 <= tries <= 8  # ever more rarely
    assert driver.pool.replicas[1].error == "quota: 8 of 8 GPUs are in use"
    ((_, replica),) = dispatched(driver.arrive(121, request("one")))
    assert replica == "m-0"


def test_bounds_that_change_while_replicas_load_hold_at_once():
    driver = pinned(1)
    driver.at(2, ReplicasPinned("m", 4))
    assert states(driver) == ["ready", "starting", "starting", "starting"]
    names = tuple(f"m-{number}" for number in range(4))
    fewer = PoolLimits("m", names, scale=ScaleLimits(replicas_max=2))
    effects = driver.at(3, Reconfigured((fewer,), ()))
    assert len(of(StopReplica, effects)) == 2
    assert wanted(driver) == 2
    assert states(driver)[0] == "ready"
    more = PoolLimits("m", names, scale=ScaleLimits(replicas_min=3, replicas_max=4))
    driver.at(4, ReplicasPinned("m", None), Reconfigured((more,), ()))
    assert wanted(driver) == 3


def test_vllm_19824_a_peak_is_met_by_starts_that_take_longer_than_was_told():
    peak = Peak(seconds(1200), seconds(1800), seconds(86_400), 3)
    driver = scaled(start_ns=seconds(60), peaks=(peak,))
    driver.at(215, ReplicaReady("m-0", WIDE))
    ticks(driver, 220, 1200 - 230)
    assert wanted(driver) == 1
    ticks(driver, 1200 - 225, 1200 - 215)
    assert states(driver).count("starting") == 2
