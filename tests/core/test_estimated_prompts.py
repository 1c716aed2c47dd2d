"""Requests whose prompt is tokenised elsewhere, and replicas that run elsewhere."""

from dataclasses import replace

import pytest

from sluice.core.events import (
    Ended,
    Fail,
    FleetDraining,
    Progress,
    ReplicaLost,
    ReplicaReady,
    StartReplica,
    Tick,
)
from sluice.core.fleet_replica import FleetReplica
from sluice.core.lifecycle import ReplicaState
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.core.routing import NO_DOUBT, SCORES_TOLD, Doubt, rank
from tests.core.fleet_rig import LIMITS, Driver, dispatched, rejects, two_replicas

TENANT = TenantLimits("acme", tokens_per_minute=1000)


def unread(name: str, estimate: int = 100, **more: object) -> Request:
    """A request whose prompt nobody here has tokenised."""
    made = Request(name, 0, (), 20, prompt_estimate=estimate)
    return replace(made, **more)  # type: ignore[arg-type]


def tokens_left(driver: Driver) -> int:
    allowance = driver.fleet.allowance("acme", 0)
    assert allowance is not None
    assert allowance.tokens is not None
    return allowance.tokens.remaining


def test_an_estimate_counts_like_tokens():
    assert unread("a").prompt_tokens == 100
    assert Request("b", 0, (1, 2, 3), 20, prompt_estimate=100).prompt_tokens == 3


def test_an_estimate_waits_and_is_reserved_like_tokens():
    driver = Driver(PoolLimits("m", ("m-0",)), tenants=(TENANT,))
    driver.at(0, ReplicaReady("m-0", LIMITS))
    driver.arrive(0, unread("a", tenant="acme"), unread("b", 50, tenant="acme"))
    assert driver.pool.waiting_tokens == 50
    assert tokens_left(driver) == 1000 - 120 - 70
    real = Usage(prompt_tokens=400, cached_tokens=0, completion_tokens=5)
    driver.at(0, Ended("a", EndReason.STOP, real, PhaseTimes()))
    assert tokens_left(driver) == 1000 - 405 - 70


def test_a_whole_answer_counts_for_the_share_of_its_tenant_like_a_stream():
    driver = two_replicas()
    driver.arrive(0, unread("a", tenant="acme"), unread("b", tenant="other"))
    driver.at(1, Ended("a", EndReason.STOP, Usage(100, 0, 5000), PhaseTimes()))
    driver.arrive(1, unread("c", tenant="acme"))
    shares = driver.fleet._pools["m"]._shares
    assert shares.ahead("acme")
    assert not shares.ahead("other")


def test_numbers_that_stand_for_text_lead_to_the_replica_that_has_it():
    driver = two_replicas()
    first = unread("a", 200, prefixes=(11, 12, 13))
    assert dispatched(driver.arrive(0, first)) == [("a", "a")]
    other = unread("b", 200, prefixes=(21, 22))
    assert dispatched(driver.arrive(0, other)) == [("b", "b")]
    again = unread("c", 200, prefixes=(21, 22, 24))
    assert dispatched(driver.arrive(0, again)) == [("c", "b")]


@pytest.mark.parametrize(("weight", "chosen"), [(1.0, "a"), (3.0, "b")])
def test_a_heavier_replica_is_given_more(weight, chosen):
    replicas = [
        FleetReplica("a", "m", places=2, prefill_tokens=100),
        FleetReplica("b", "m", places=3, prefill_tokens=150, weight=weight),
    ]
    scores = rank(50, {}, replicas, lambda _: NO_DOUBT, asks_all=False)
    assert scores[0].replica_id == chosen


def test_a_replica_of_which_there_is_doubt_comes_last_and_one_that_cannot_take_it_not_at_all():
    replicas = [FleetReplica(name, "m", places=place) for place, name in enumerate("abcde")]
    doubts = {"a": Doubt(0, kv_short=True), "b": Doubt(2, kv_short=False), "c": None}
    scores = rank(50, {}, replicas, lambda one: doubts.get(one.id, NO_DOUBT), asks_all=False)
    told = [(one.replica_id, one.kv_fits) for one in scores]
    assert told == [("d", True), ("e", True), ("a", False), ("b", True)]


@pytest.mark.parametrize(("asks_all", "count"), [(False, SCORES_TOLD), (True, 7)])
def test_no_more_replicas_are_asked_than_are_told_unless_all_are_to_be(asks_all, count):
    replicas = [FleetReplica(name, "m", places=place) for place, name in enumerate("abcdefg")]
    asked: list[str] = []

    def doubt_of(replica: FleetReplica) -> Doubt:
        asked.append(replica.id)
        return NO_DOUBT

    scores = rank(50, {"c": 50}, replicas, doubt_of, asks_all=asks_all)
    assert [one.replica_id for one in scores] == ["c", "a", "b", "d"]
    assert asked == [*"cabdefg"][:count]


def test_weights_come_with_the_limits_of_the_pool():
    driver = Driver(PoolLimits("m", ("a", "b"), weights=(1.0, 4.0)))
    limits = replace(LIMITS, sequences_max=32)
    driver.at(0, ReplicaReady("a", limits), ReplicaReady("b", limits))
    many = [unread(f"r{n}") for n in range(20)]
    chosen = [replica for _, replica in dispatched(driver.arrive(0, *many))]
    assert chosen.count("b") >= 2 * chosen.count("a") > 0


def test_a_remote_replica_that_is_gone_gets_nothing_and_keeps_what_it_has():
    driver = two_replicas()
    driver.arrive(0, unread("a"))
    lost = driver.at(1, Progress("a", 1), ReplicaLost("a", "no answer", keeps_board=True))
    assert lost == []
    assert [one.state for one in driver.pool.replicas] == [ReplicaState.BACKOFF, ReplicaState.READY]
    assert dispatched(driver.arrive(1, unread("b"))) == [("b", "b")]
    assert driver.at(1, Tick()) == [StartReplica("a")]
    driver.at(2, ReplicaReady("a", replace(LIMITS, sequences_max=8)))
    assert driver.pool.replicas[0].requests == 1
    driver.at(3, Ended("a", EndReason.STOP, Usage(100, 0, 5), PhaseTimes()))
    assert driver.pool.replicas[0].places == 0


def test_with_all_remote_replicas_gone_newcomers_hear_when_to_come_back():
    driver = two_replicas()
    gone = [ReplicaLost(name, "no answer", keeps_board=True) for name in ("a", "b")]
    driver.at(1, *gone)
    (refused,) = rejects(driver.arrive(1, unread("x")))
    assert (refused.status, refused.reason) == (503, "not_ready")
    assert refused.retry_after_s is not None


def test_a_remote_replica_never_counts_as_being_in_a_crash_loop():
    driver = two_replicas(losses_max=2)
    for second in range(1, 10):
        driver.at(second, ReplicaLost("a", "no answer", keeps_board=True))
        assert driver.at(second, Tick()) == [StartReplica("a")]
        driver.at(second + 0.5, ReplicaReady("a", LIMITS))
    assert driver.pool.replicas[0].state is ReplicaState.READY


def test_a_drain_ends_what_a_gone_replica_has_on_board():
    driver = two_replicas()
    driver.arrive(0, unread("a"))
    gone = ReplicaLost("a", "no answer", keeps_board=True)
    driver.at(1, FleetDraining(2_000_000_000), gone)
    ended = [effect for effect in driver.at(2, Tick()) if isinstance(effect, Fail)]
    assert [effect.request_id for effect in ended] == ["a"]
