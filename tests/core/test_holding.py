"""Requests that find no replica: who is held, who is refused, and what they wake."""

from typing import Any

from sluice.core.admission import Absence
from sluice.core.events import (
    Fail,
    FleetEffect,
    Reject,
    ReplicaLost,
    ReplicaReady,
    Retarget,
    Scaled,
    StartReplica,
    Tick,
)
from sluice.core.lifecycle import ReplicaState
from sluice.core.limits import PoolLimits, ScaleLimits
from sluice.core.request import Rung
from tests.core.fleet_rig import LIMITS, Driver, dispatched, rejects, request, seconds


def resting(name: str = "m", replicas: int = 1, **limits: Any) -> PoolLimits:
    """A model that may be without replicas."""
    scale = ScaleLimits(replicas_min=0, replicas_max=replicas, start_ns=seconds(20), **limits)
    return PoolLimits(name, tuple(f"{name}-{number}" for number in range(replicas)), scale=scale)


def started(effects: list[FleetEffect]) -> list[str]:
    return [one.replica_id for one in effects if isinstance(one, StartReplica)]


def test_a_warm_replica_wakes_at_once_where_nobody_serves():
    driver = Driver(resting(warm=1))
    driver.at(1, ReplicaReady("m-0", LIMITS))
    effects = driver.arrive(2.5, request("one"))
    assert started(effects) == ["m-0"]
    assert dispatched(driver.at(2.6, ReplicaReady("m-0", LIMITS))) == [("one", "m-0")]


def test_a_warm_replica_is_expected_at_once_whatever_a_cold_start_takes():
    driver = Driver(resting(warm=1, hold_ns=seconds(5)))
    driver.at(15, ReplicaReady("m-0", LIMITS))
    assert driver.pool.absence == Absence(seconds(1), held=True, resting=True)


def test_who_would_wait_longer_than_may_be_is_refused_with_both_times_and_wakes_one_at_once():
    driver = Driver(resting(hold_ns=seconds(10)))
    assert driver.pool.absence == Absence(seconds(20), held=False, resting=True)
    effects = driver.arrive(3, request("one"))
    (refused,) = rejects(effects)
    assert (refused.status, refused.reason) == (503, "not_held")
    assert (refused.measured, refused.threshold) == (20, 10)
    assert 20 <= (refused.retry_after_s or 0) <= 25
    assert started(effects) == ["m-0"]
    again = driver.arrive(14, request("two"))
    assert started(again) == []
    assert rejects(again) == [], "the start is over in 9 s"
    assert dispatched(driver.at(20, ReplicaReady("m-0", LIMITS))) == [("two", "m-0")]


def test_who_finds_all_places_held_is_refused_with_their_number():
    driver = Driver(resting(hold_places=1))
    driver.arrive(3, request("one"))
    (refused,) = rejects(driver.arrive(4, request("two")))
    assert (refused.status, refused.reason) == (503, "held_full")
    assert (refused.measured, refused.threshold) == (2, 1)
    assert driver.pool.absence == Absence(seconds(19), held=False, resting=True)


def test_what_is_refused_before_its_prompt_is_read_asks_for_a_replica_as_well():
    driver = Driver(resting(hold_ns=seconds(10)))
    refused = driver.fleet.refusal_before("m", request("one"), seconds(3))
    assert refused is not None
    assert refused.reason == "not_held"
    assert started(driver.at(3, Tick())) == ["m-0"]


def test_a_model_that_is_served_is_not_absent():
    driver = Driver(resting())
    driver.arrive(1, request("one"))
    driver.at(2, ReplicaReady("m-0", LIMITS))
    assert driver.pool.absence is None


def overloaded(**limits: Any) -> Driver:
    """A large model with one place and no queue, and a smaller one at rest."""
    large = PoolLimits("m", ("m-0",), queue_places_max=0, smaller="s", **limits)
    driver = Driver(large, resting("s"))
    driver.at(0, ReplicaReady("m-0", LIMITS))
    return driver


LADDER = (Rung.SMALLER, Rung.REFUSE)


def test_a_smaller_model_at_rest_is_woken_by_who_would_have_gone_there():
    driver = overloaded()
    driver.arrive(1, request("first", overload=LADDER))
    effects = driver.arrive(2, request("second", overload=LADDER))
    assert [one.request_id for one in rejects(effects)] == ["second"]
    assert started(effects) == ["s-0"]
    driver.at(3, ReplicaReady("s-0", LIMITS))
    (sent,) = [
        one
        for one in driver.arrive(4, request("third", overload=LADDER))
        if isinstance(one, Retarget)
    ]
    assert (sent.request_id, sent.model) == ("third", "s")


def test_a_smaller_model_at_rest_stays_so_while_the_larger_one_has_room():
    driver = overloaded()
    effects = driver.arrive(1, request("first", overload=LADDER))
    assert started(effects) == []


def test_a_model_at_rest_that_stands_in_is_woken_when_the_first_one_is_gone():
    driver = Driver(PoolLimits("m", ("m-0",), fallback=("f",)), resting("f"))
    driver.at(0, ReplicaReady("m-0", LIMITS))
    driver.at(1, ReplicaLost("m-0", "gone", permanent=True))
    effects = driver.arrive(2, request("one", may_fall_back=True))
    assert len(rejects(effects)) == 1
    assert started(effects) == ["f-0"]
    driver.at(3, ReplicaReady("f-0", LIMITS))
    effects = driver.arrive(4, request("two", may_fall_back=True))
    assert [one.model for one in effects if isinstance(one, Retarget)] == ["f"]


def test_who_is_held_for_a_replica_in_a_crash_loop_gets_another_one():
    driver = Driver(resting(replicas=2))
    driver.arrive(1, request("one"))
    at_s = 1.0
    effects: list[FleetEffect] = []
    for _ in range(5):
        for _ in range(40):
            if driver.pool.replicas[0].state is ReplicaState.STARTING:
                break
            at_s += 0.5
            effects += driver.at(at_s, Tick())
        effects += driver.at(at_s, ReplicaLost("m-0", "bad memory"))
    assert driver.pool.replicas[0].state is ReplicaState.CRASH_LOOP
    assert driver.pool.replicas[1].state is ReplicaState.STARTING
    assert not [one for one in effects if isinstance(one, Reject | Fail)]
    assert dispatched(driver.at(at_s + 1, ReplicaReady("m-1", LIMITS))) == [("one", "m-1")]


def test_that_more_is_needed_than_may_be_is_told_once():
    driver = Driver(
        PoolLimits("m", ("m-0",), scale=ScaleLimits(warm=0, hold_places=999, drain_ns=seconds(5)))
    )
    driver.at(1, ReplicaReady("m-0", LIMITS))
    told: list[Scaled] = []
    for second in range(2, 100):
        effects = driver.arrive(second, request(f"{second}"), request(f"{second} too"))
        told += [one for one in effects + driver.at(second, Tick()) if isinstance(one, Scaled)]
    (short,) = [one for one in told if one.short_of is not None]
    assert (short.before, short.number) == (1, 1)
    assert (short.short_of or 0) > 1
