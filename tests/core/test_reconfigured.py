"""What the operator changes while requests run: limits, and replicas that get nothing more."""

from dataclasses import replace

import pytest

from sluice.core.events import (
    Cancelled,
    Dispatch,
    FleetDraining,
    Reconfigured,
    Reject,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    Retarget,
    StartReplica,
    StopReplica,
    Tick,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits, RemoteLimits, TenantLimits
from sluice.core.request import Rung, Usage
from sluice.core.tenants import MINUTE_NS, TenantLedger
from tests.core.fleet_rig import LIMITS, Driver, dispatched, one_slot, request, two_replicas

POOL = PoolLimits("m", ("m-0",), queue_places_max=2)


def refusals(effects) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Reject)]


def configured(driver: Driver, *pools: PoolLimits, tenants: tuple[TenantLimits, ...] = ()):
    return driver.at(driver.now_ns / 1e9, Reconfigured(pools, tenants))


# ------------------------------------------------------------------------------------- the queue


def test_a_shorter_queue_refuses_newcomers_and_keeps_who_waits():
    driver = one_slot(queue=2)
    driver.arrive(1, request("runs"), request("waits"), request("waits too"))
    assert configured(driver, replace(POOL, queue_places_max=1)) == []
    assert refusals(driver.arrive(1, request("late"))) == ["queue_full"]
    assert dispatched(driver.complete(2, "runs")) == [("waits", "m-0")]
    assert dispatched(driver.complete(3, "waits")) == [("waits too", "m-0")]


def test_a_longer_queue_takes_more_at_once():
    driver = one_slot(queue=0)
    driver.arrive(1, request("runs"))
    assert refusals(driver.arrive(1, request("early")))
    configured(driver, replace(POOL, queue_places_max=1))
    assert driver.arrive(1, request("later")) == []
    assert driver.pool.waiting == 1


def test_a_model_gets_another_smaller_one():
    small = PoolLimits("s", ("s-0",))
    driver = Driver(replace(POOL, queue_places_max=0), small)
    driver.at(0, ReplicaReady("m-0", LIMITS), ReplicaReady("s-0", LIMITS))
    ladder = (Rung.SMALLER, Rung.REFUSE)
    driver.arrive(1, request("runs", overload=ladder))
    assert refusals(driver.arrive(1, request("alone", overload=ladder)))
    configured(driver, replace(POOL, queue_places_max=0, smaller="s"), small)
    (effect,) = driver.arrive(1, request("goes over", overload=ladder))
    assert isinstance(effect, Retarget)
    assert (effect.request_id, effect.model) == ("goes over", "s")


def test_models_cannot_come_or_go_and_nothing_changes_then():
    driver = one_slot(queue=0)
    with pytest.raises(ValueError, match="models"):
        configured(driver, replace(POOL, queue_places_max=9), PoolLimits("new", ("new-0",)))
    driver.arrive(1, request("runs"))
    assert refusals(driver.arrive(1, request("late"))) == ["queue_full"]


# --------------------------------------------------------------------------------------- tenants


def left(books: Fleet | TenantLedger, what: str) -> int:
    """What the tenant may still use in this minute."""
    return int(getattr(books.allowance("t", 0), what).remaining)


def of_tenant(name: str, **fields):
    return request(name, tenant="t", **fields)


def test_what_a_tenant_has_used_counts_under_the_new_limit():
    driver = Driver(POOL, tenants=(TenantLimits("t", requests_per_minute=10),))
    driver.at(0, ReplicaReady("m-0", LIMITS))
    for number in range(3):
        driver.arrive(0, of_tenant(str(number)))
        driver.complete(0, str(number))
    configured(driver, POOL, tenants=(TenantLimits("t", requests_per_minute=4),))
    assert left(driver.fleet, "requests") == 1
    assert dispatched(driver.arrive(0, of_tenant("last")))
    assert refusals(driver.arrive(0, of_tenant("over"))) == ["requests_per_minute"]


def test_a_limit_below_what_was_used_leaves_nothing_and_no_less():
    driver = Driver(POOL, tenants=(TenantLimits("t", requests_per_minute=10),))
    driver.at(0, ReplicaReady("m-0", LIMITS))
    for number in range(3):
        driver.arrive(0, of_tenant(str(number)))
        driver.complete(0, str(number))
    configured(driver, POOL, tenants=(TenantLimits("t", requests_per_minute=1),))
    assert left(driver.fleet, "requests") == 0
    assert refusals(driver.arrive(0, of_tenant("over"))) == ["requests_per_minute"]


def test_running_requests_count_for_a_tenant_that_had_no_limits():
    driver = Driver(POOL)
    driver.at(0, ReplicaReady("m-0", LIMITS))
    driver.arrive(0, of_tenant("runs"))
    limits = TenantLimits("t", tokens_per_minute=50, concurrency=1)
    configured(driver, POOL, tenants=(limits,))
    assert left(driver.fleet, "tokens") == 20
    assert refusals(driver.arrive(0, of_tenant("second"))) == ["concurrency"]
    driver.at(0, Cancelled("runs", withdrawn=True))
    assert left(driver.fleet, "tokens") == 50


def test_a_request_that_runs_through_two_changes_is_settled_once():
    books = TenantLedger([TenantLimits("t", tokens_per_minute=100, concurrency=1)])
    running = of_tenant("a", prompt=10, output=40)
    books.reserve(running, 0)
    books.replace([TenantLimits("t", concurrency=1)], [running], 0)
    books.replace([TenantLimits("t", tokens_per_minute=80, concurrency=1)], [running], 0)
    assert left(books, "tokens") == 30
    books.settle("a", Usage(10, 0, 10), 0)
    assert left(books, "tokens") == 60
    assert books.refusal(of_tenant("b", prompt=1, output=1), 0) is None


def test_a_tenant_that_is_gone_has_no_limits_and_its_requests_end_as_before():
    books = TenantLedger([TenantLimits("t", requests_per_minute=1)])
    running = of_tenant("a")
    books.reserve(running, 0)
    books.replace([], [running], 0)
    assert books.refusal(of_tenant("b"), 0) is None
    books.settle("a", Usage(1, 0, 1), MINUTE_NS)
    assert not books._reserved


# -------------------------------------------------------------------------------------- draining


def test_a_draining_replica_gets_nothing_more_and_finishes_what_it_has():
    driver = two_replicas()
    first = driver.arrive(1, request("one"))[0]
    assert isinstance(first, Dispatch)
    assert driver.at(1, ReplicaDraining(first.replica_id, on=True)) == []
    other = ({"a", "b"} - {first.replica_id}).pop()
    for number in range(8):
        assert dispatched(driver.arrive(1, request(f"{number}"))) == [(f"{number}", other)]
    assert driver.arrive(1, request("waits")) == []
    view = next(one for one in driver.pool.replicas if one.id == first.replica_id)
    assert (view.draining, view.requests) == (True, 1)
    driver.complete(2, "one")
    again = driver.at(2, ReplicaDraining(first.replica_id, on=False))
    assert dispatched(again) == [("waits", first.replica_id)]


def test_a_model_whose_replicas_all_drain_is_not_ready():
    driver = one_slot()
    driver.arrive(1, request("runs"))
    driver.at(1, ReplicaDraining("m-0", on=True))
    (refused,) = driver.arrive(1, request("late"))
    assert isinstance(refused, Reject)
    assert (refused.status, refused.reason) == (503, "not_ready")
    driver.at(1, ReplicaDraining("m-0", on=False))
    assert driver.arrive(1, request("later")) == []
    assert dispatched(driver.complete(2, "runs")) == [("later", "m-0")]


def test_a_loss_does_not_end_the_wish_to_drain():
    driver = two_replicas()
    driver.at(1, ReplicaDraining("a", on=True), ReplicaLost("a", "crashed"))
    driver.at(5, Tick(), ReplicaReady("a", LIMITS))
    assert dispatched(driver.arrive(5, request("one"))) == [("one", "b")]


def test_requests_of_a_lost_draining_replica_are_tried_on_another():
    driver = two_replicas()
    (first,) = driver.arrive(1, request("one"))
    assert isinstance(first, Dispatch)
    driver.at(1, ReplicaDraining(first.replica_id, on=True))
    again = driver.at(1, ReplicaLost(first.replica_id, "crashed"))
    other = ({"a", "b"} - {first.replica_id}).pop()
    assert dispatched(again) == [("one", other)]


# ------------------------------------------------------------------------------ other replicas


def remote(*ids: str, weights: tuple[float, ...] = ()) -> PoolLimits:
    return PoolLimits("m", ids, weights=weights, remote=RemoteLimits())


def fleet_of(*ids: str) -> Driver:
    driver = Driver(remote(*ids))
    driver.at(0, *(ReplicaReady(one, LIMITS) for one in ids))
    return driver


def ids(driver: Driver) -> list[str]:
    return [replica.id for replica in driver.pool.replicas]


def test_a_new_replica_is_started_and_used_once_it_is_ready():
    driver = fleet_of("a")
    driver.arrive(1, request("one"))
    assert configured(driver, remote("a", "b")) == [StartReplica("b")]
    assert driver.arrive(1, request("two")) == []
    assert dispatched(driver.at(2, ReplicaReady("b", LIMITS))) == [("two", "b")]


def test_a_replica_that_leaves_finishes_what_it_has_and_is_stopped_then():
    driver = fleet_of("a", "b")
    effects = driver.arrive(1, request("one"), request("two"))
    (left,) = [request_id for request_id, replica_id in dispatched(effects) if replica_id == "a"]
    assert configured(driver, remote("b")) == []
    assert driver.arrive(1, request("three")) == []
    assert driver.complete(2, left) == [StopReplica("a")]
    assert ids(driver) == ["b"]
    with pytest.raises(KeyError):
        driver.at(3, ReplicaReady("a", LIMITS))
    (other,) = {"one", "two"} - {left}
    assert dispatched(driver.complete(3, other)) == [("three", "b")]


def test_an_idle_replica_that_leaves_is_stopped_at_once():
    assert configured(fleet_of("a", "b"), remote("b")) == [StopReplica("a")]


def test_replicas_that_are_all_exchanged_serve_until_the_new_ones_do():
    driver = fleet_of("a", "b")
    new = remote("c", "d")
    assert configured(driver, new) == [StartReplica("c"), StartReplica("d")]
    assert dispatched(driver.arrive(1, request("one")))
    assert len(ids(driver)) == 4
    busy = next(one.id for one in driver.pool.replicas if one.requests)
    idle = ({"a", "b"} - {busy}).pop()
    assert driver.at(2, ReplicaReady("d", LIMITS)) == [StopReplica(idle)]
    assert dispatched(driver.arrive(2, request("two"))) == [("two", "d")]
    assert driver.complete(3, "one") == [StopReplica(busy)]
    assert ids(driver) == ["c", "d"]


def test_a_replica_that_leaves_and_is_lost_is_not_started_again():
    driver = fleet_of("a", "b")
    (first,) = driver.arrive(1, request("one"))
    assert isinstance(first, Dispatch)
    (other,) = {"a", "b"} - {first.replica_id}
    configured(driver, remote(other))
    effects = driver.at(1, ReplicaLost(first.replica_id, "gone"))
    assert StopReplica(first.replica_id) in effects
    assert dispatched(effects) == [("one", other)]
    assert not any(isinstance(effect, StartReplica) for effect in driver.at(100, Tick()))


def test_a_replica_that_leaves_before_it_was_ready_is_stopped():
    driver = fleet_of("a")
    configured(driver, remote("a", "b"))
    assert configured(driver, remote("a")) == [StopReplica("b")]


def test_weights_change_in_place():
    driver = fleet_of("a", "b")
    configured(driver, remote("a", "b", weights=(1.0, 3.0)))
    assert [one.weight for one in driver.fleet._replicas.values()] == [1.0, 3.0]


def test_a_fleet_that_drains_starts_nothing_new():
    driver = fleet_of("a")
    driver.at(1, FleetDraining(driver.now_ns + 10**9))
    assert configured(driver, remote("a", "b")) == []
