"""What a fleet promises at the door, whom it drops for it, and what a refused client is told."""

from dataclasses import replace

import pytest

from sluice.core.admission import NS_PER_S
from sluice.core.events import (
    Cancelled,
    Dispatch,
    Ended,
    FleetEffect,
    Progress,
    Reject,
    ReplicaReady,
    ReplicaReported,
    Retarget,
    Shorten,
    Tick,
)
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.pools import EXPECTED_NS
from sluice.core.request import EndReason, PhaseTimes, Rung, Usage
from tests.core.fleet_rig import LIMITS, Driver, dispatched, rejects, report, request, seconds

# A prompt of 10 tokens takes 10 ms, a token 0.1 s: an answer of 20 tokens about 2 s.
STEADY = report(step_ns=seconds(0.1), running=1)


def slots(count: int = 1, **limits: object) -> Driver:
    driver = Driver(PoolLimits("m", ("m-0",), **limits))  # type: ignore[arg-type]
    driver.at(
        0,
        ReplicaReady("m-0", replace(LIMITS, sequences_max=count)),
        ReplicaReported("m-0", STEADY),
    )
    return driver


def reasons(effects: list[FleetEffect]) -> list[tuple[str, str]]:
    return [(refused.request_id, refused.reason) for refused in rejects(effects)]


def due(after_s: float) -> dict[str, int]:
    return {"ttft_due_ns": seconds(after_s)}


# ------------------------------------------------------------------------------------ at the door


def test_who_would_be_late_is_refused_at_once_with_both_numbers() -> None:
    driver = slots()
    driver.arrive(0, request("runs"))
    (refused,) = rejects(driver.arrive(0, request("late", **due(1))))
    assert (refused.status, refused.reason, refused.threshold) == (429, "predicted_late", 1.0)
    # About 2.1 s, a margin of 1.2 and a utilisation of 0.75.
    assert 3.2 <= refused.measured <= 3.6
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= refused.measured - refused.threshold


def test_who_will_be_on_time_waits_and_its_wait_was_predicted() -> None:
    driver = slots()
    driver.arrive(0, request("runs"))
    assert driver.arrive(0, request("waits", **due(5))) == []
    assert driver.pool.waiting == 1
    (started,) = [e for e in driver.complete(2, "runs") if isinstance(e, Dispatch)]
    assert started.request_id == "waits"
    assert started.predicted_wait_ns == pytest.approx(seconds(2), rel=0.1)


def test_utilisation_decides_how_late_a_wait_may_be() -> None:
    waiting = []
    for utilisation in (0.5, 1.0):
        driver = slots(utilisation=utilisation)
        driver.arrive(0, request("runs"), *(request(f"r{n}", **due(10)) for n in range(8)))
        waiting.append(driver.pool.waiting)
    assert waiting[0] < waiting[1]


def test_within_a_class_it_is_the_newcomer_that_is_refused() -> None:
    """Its earlier due time puts it ahead of one that would then be late."""
    driver = slots()
    driver.arrive(0, request("runs"), request("promised", **due(3.7)))
    effects = driver.arrive(0, request("newcomer", **due(3.6)))
    assert reasons(effects) == [("newcomer", "gives_way")]
    assert driver.pool.waiting == 1


def test_a_stricter_newcomer_takes_the_place_of_a_lower_tier() -> None:
    driver = slots()
    driver.arrive(0, request("runs"), request("low", tier=3, **due(3.7)))
    effects = driver.arrive(0, request("high", tier=0, **due(3.7)))
    assert reasons(effects) == [("low", "predicted_late")]
    assert dispatched(driver.complete(2, "runs")) == [("high", "m-0")]


def test_of_a_lower_tier_the_one_with_the_most_work_goes() -> None:
    driver = slots(count=2)
    driver.arrive(0, request("r0"), request("r1"))
    driver.arrive(0, request("long", 900, tier=3, **due(5)), request("short", tier=3, **due(4.5)))
    effects = driver.arrive(0, request("high", tier=0, **due(4)))
    assert reasons(effects) == [("long", "predicted_late")]


def test_requests_without_targets_are_never_late() -> None:
    driver = slots()
    effects = driver.arrive(0, *(request(f"r{n}") for n in range(40)))
    assert rejects(effects) == []


def test_a_target_that_nothing_could_meet_is_served_where_a_place_is_free() -> None:
    driver = slots()
    assert dispatched(driver.arrive(0, request("r", **due(1e-9)))) == [("r", "m-0")]
    assert reasons(driver.arrive(0, request("x", **due(1e-9)))) == [("x", "predicted_late")]


def test_prompts_that_are_being_computed_count_at_the_start() -> None:
    driver = slots(count=4)
    driver.arrive(0, request("long", 1500))
    refused = rejects(driver.arrive(0, request("late", **due(1))))
    assert [(r.reason, r.threshold) for r in refused] == [("predicted_late", 1.0)]
    driver.at(1.5, Progress("long", 1))
    assert dispatched(driver.arrive(1.5, request("next", **due(2.5)))) == [("next", "m-0")]


def test_whoever_has_no_target_is_never_dropped_for_its_own_class() -> None:
    driver = slots()
    driver.arrive(0, request("runs"), request("patient", 900), request("a", **due(20)))
    assert driver.pool.waiting == 2
    slow = ReplicaReported("m-0", report(step_ns=seconds(1), running=1))
    assert reasons(driver.at(0.3, slow, Tick())) == [("a", "predicted_late")]
    assert driver.pool.waiting == 1


# ---------------------------------------------------------------------------------- room to wait in


def test_a_stricter_newcomer_takes_the_room_of_a_lower_tier_that_has_the_most_work() -> None:
    driver = slots(queue_places_max=2)
    driver.arrive(0, request("runs"), request("short", tier=9), request("long", 900, tier=9))
    (told,) = rejects(driver.arrive(0, request("strict", tier=0)))
    assert (told.request_id, told.status, told.reason) == ("long", 429, "gives_way")
    assert told.measured > 0.0
    assert told.threshold == 0.0
    assert told.retry_after_s is not None
    assert driver.pool.waiting == 2
    assert dispatched(driver.complete(2, "runs")) == [("strict", "m-0")]


def test_nobody_gives_room_to_its_own_class_or_to_a_lower_one() -> None:
    driver = slots(queue_places_max=2)
    driver.arrive(0, request("runs"), request("a", tier=3), request("b", tier=3))
    assert reasons(driver.arrive(0, request("same", tier=3))) == [("same", "queue_full")]
    assert reasons(driver.arrive(0, request("low", tier=9))) == [("low", "queue_full")]


def test_a_stricter_newcomer_takes_the_room_of_as_many_as_it_needs_or_of_none() -> None:
    driver = slots(queue_places_max=3, count=4)
    driver.arrive(0, *(request(f"r{n}", tier=1) for n in range(4)))
    driver.arrive(0, *(request(f"low{n}", tier=9) for n in range(3)))
    effects = driver.arrive(0, request("two", tier=0, choices=2))
    assert reasons(effects) == [("low2", "gives_way"), ("low1", "gives_way")]
    assert reasons(driver.arrive(0, request("four", tier=0, choices=4))) == [("four", "queue_full")]
    assert driver.pool.waiting == 2


@pytest.mark.parametrize("bound", [{"queue_tokens_max": 100}, {"queue_bytes_max": 100}])
def test_a_stricter_newcomer_takes_tokens_and_bytes_of_a_lower_tier(bound: dict[str, int]) -> None:
    driver = slots(**bound)
    driver.arrive(0, request("runs"), request("low", 80, tier=9, body_bytes=80))
    effects = driver.arrive(0, request("strict", 70, tier=0, body_bytes=70))
    assert reasons(effects) == [("low", "gives_way")]


def test_before_its_prompt_is_known_nobody_is_refused_for_whom_others_would_give_way() -> None:
    driver = slots(queue_places_max=1)
    driver.arrive(0, request("runs"), request("low", tier=9))
    strict, low = request("s", 1, tier=0, likeness=1), request("l", 1, tier=9, likeness=2)
    assert driver.fleet.refusal_before("m", strict, 0) is None
    assert driver.fleet.refusal_before("m", low, 0) is not None


# ---------------------------------------------------------------------------------------- deadlines


def test_a_deadline_in_the_past_is_refused_at_once() -> None:
    driver = slots()
    (refused,) = rejects(driver.arrive(3, request("r", deadline_ns=seconds(1))))
    assert (refused.status, refused.reason) == (429, "deadline_past")
    assert (refused.measured, refused.threshold, refused.retry_after_s) == (2.0, 0.0, None)


def test_an_answer_that_takes_longer_than_its_deadline_is_not_told_to_come_back() -> None:
    driver = slots()
    (refused,) = rejects(driver.arrive(0, request("r", deadline_ns=seconds(1))))
    assert (refused.reason, refused.threshold) == ("deadline_infeasible", 1.0)
    assert 1.9 <= refused.measured <= 2.2
    assert refused.retry_after_s is None


def test_a_deadline_that_the_wait_would_break_is_worth_another_try() -> None:
    driver = slots()
    driver.arrive(0, request("runs"))
    (refused,) = rejects(driver.arrive(0, request("r", deadline_ns=seconds(3))))
    assert refused.reason == "deadline_infeasible"
    assert refused.retry_after_s is not None


def test_a_deadline_that_was_used_up_by_waiting_is_worth_another_try() -> None:
    driver = slots()
    driver.arrive(0, request("runs"), request("r", deadline_ns=seconds(6)))
    assert driver.pool.waiting == 1
    (refused,) = rejects(driver.complete(4.5, "runs"))
    assert (refused.request_id, refused.reason) == ("r", "deadline_infeasible")
    assert refused.retry_after_s is not None


def test_a_deadline_that_a_shorter_answer_meets_is_a_reason_to_shorten() -> None:
    driver = slots()
    ladder = (Rung.SHORTEN, Rung.REFUSE)
    asked = request("r", deadline_ns=seconds(1), overload=ladder, shorten_tokens=5)
    effects = driver.arrive(0, asked)
    assert effects[0] == Shorten("r", 5)
    assert dispatched(effects) == [("r", "m-0")]


# ------------------------------------------------------------------------------------------- ladder


def test_a_shortened_request_that_is_refused_all_the_same_was_not_shortened() -> None:
    driver = slots()
    driver.arrive(0, request("runs"))
    asked = request("r", overload=(Rung.SHORTEN, Rung.REFUSE), shorten_tokens=5)
    assert [type(effect) for effect in driver.arrive(0, asked)] == [Reject]


def two_models() -> Driver:
    large = PoolLimits("m", ("m-0",), smaller="small")
    driver = Driver(large, PoolLimits("small", ("s-0",), queue_places_max=1))
    for name in ("m-0", "s-0"):
        driver.at(0, ReplicaReady(name, LIMITS), ReplicaReported(name, STEADY))
    return driver


def test_the_smaller_model_takes_over_where_it_can_and_never_twice() -> None:
    driver = two_models()
    driver.arrive(0, request("runs"))
    asked = request("r", overload=(Rung.SMALLER, Rung.REFUSE))
    assert driver.arrive(0, asked) == [Retarget("r", "small", 2, 1)]
    assert driver.fleet.requests == 1
    degraded = replace(asked, degraded=(Rung.SMALLER,))
    assert reasons(driver.arrive(0, degraded)) == [("r", "no_free_place")]
    assert dispatched(driver.arrive(0, degraded, model="small")) == [("r", "s-0")]


def test_a_smaller_model_that_is_full_or_too_small_takes_nothing() -> None:
    driver = two_models()
    driver.arrive(0, request("runs"))
    driver.arrive(0, request("s0"), request("s1"), model="small")
    asked = request("r", overload=(Rung.SMALLER, Rung.REFUSE))
    assert reasons(driver.arrive(0, asked)) == [("r", "no_free_place")]


# ------------------------------------------------------------------------------------ while waiting


def test_promises_that_the_pool_cannot_keep_any_more_are_taken_back_one_by_one() -> None:
    driver = slots()
    driver.arrive(0, request("runs"), request("a", **due(5)), request("b", **due(8)))
    assert driver.pool.waiting == 2
    slow = ReplicaReported("m-0", report(step_ns=seconds(0.35), running=1))
    assert reasons(driver.at(0.3, slow, Tick())) == [("a", "predicted_late")]
    assert driver.pool.waiting == 1


def test_a_promise_is_not_taken_back_for_a_margin() -> None:
    driver = slots()
    driver.arrive(0, request("runs"), request("a", **due(3.7)))
    driver.at(0.2, ReplicaReported("m-0", report(step_ns=seconds(0.15), running=1)))
    assert rejects(driver.at(0.3, Tick())) == []


def test_who_is_late_when_its_turn_comes_is_refused_and_the_next_one_starts() -> None:
    driver = slots()
    driver.arrive(0, request("runs"), request("a", **due(4)), request("b", **due(30)))
    effects = driver.complete(3.99, "runs")
    assert ("a", "predicted_late") in reasons(effects)
    assert dispatched(effects) == [("b", "m-0")]


# ------------------------------------------------------------------------------------- late binding


def test_a_replica_is_given_no_more_than_it_says_it_can_run() -> None:
    driver = slots(count=8)
    driver.at(0, ReplicaReported("m-0", replace(STEADY, seats=2)))
    effects = driver.arrive(0, *(request(f"r{n}") for n in range(4)))
    assert len(dispatched(effects)) == 2
    effects = driver.at(1, ReplicaReported("m-0", replace(STEADY, seats=3)))
    assert len(dispatched(effects)) == 1


def test_a_replica_in_which_one_waits_is_given_no_more() -> None:
    driver = slots(count=8)
    driver.arrive(0, request("r0"))
    driver.at(0, ReplicaReported("m-0", replace(STEADY, blocked=1, waiting=1)))
    assert dispatched(driver.arrive(0, request("r1"))) == []
    effects = driver.at(1, ReplicaReported("m-0", replace(STEADY, running=2)))
    assert dispatched(effects) == [("r1", "m-0")]


def test_where_the_kv_pool_is_short_one_request_is_ready_inside_and_the_rest_waits_here() -> None:
    driver = slots(count=8)
    driver.at(0, ReplicaReported("m-0", replace(STEADY, blocks_free=16)))
    effects = driver.arrive(0, *(request(f"r{n}", 300) for n in range(4)))
    assert len(dispatched(effects)) == 1
    driver.at(1, ReplicaReported("m-0", replace(STEADY, blocks_free=5)))
    assert driver.pool.waiting <= 3


def test_a_replica_that_does_not_know_its_seats_is_tried_with_one_more_at_a_time() -> None:
    driver = slots(count=8)
    driver.arrive(0, *(request(f"r{n}") for n in range(3)))
    driver.at(0, ReplicaReported("m-0", replace(STEADY, running=2, blocked=1, waiting=1)))
    assert dispatched(driver.arrive(0, request("r3"))) == []
    assert dispatched(driver.complete(0.5, "r0")) == []
    calm = ReplicaReported("m-0", replace(STEADY, running=2))
    assert dispatched(driver.at(0.9, calm)) == []
    assert dispatched(driver.at(1.1, calm)) == [("r3", "m-0")]


# -------------------------------------------------------------------------------------- kept places


def test_places_are_kept_for_tier_0_while_it_is_in_use_and_not_otherwise() -> None:
    driver = slots(count=10, headroom=0.2)
    assert len(dispatched(driver.arrive(0, *(request(f"a{n}") for n in range(9))))) == 9
    assert len(dispatched(driver.arrive(1, request("strict", tier=0)))) == 1
    driver.complete(2, "a0")
    driver.complete(2, "a1")
    assert dispatched(driver.arrive(2, request("b"))) == []
    assert len(dispatched(driver.arrive(2, request("strict2", tier=0)))) == 1
    assert dispatched(driver.at(20, Tick())) == [("b", "m-0")]


def test_places_are_kept_for_the_other_tenant_from_one_that_is_ahead() -> None:
    driver = slots(count=10, headroom=0.2)
    driver.arrive(0, request("l0", tenant="light"))
    driver.at(0, Progress("l0", 1))
    for n in range(7):
        prompt = tuple(range(1000 * n, 1000 * n + 900))
        driver.arrive(0, replace(request(f"h{n}", tenant="heavy"), prompt=prompt))
        driver.at(0, Progress(f"h{n}", 1))
    # Eight of ten are on board: two are kept.
    assert dispatched(driver.arrive(0, request("h8", tenant="heavy"))) == []
    assert len(dispatched(driver.arrive(0, request("l1", tenant="light")))) == 1


def crowd(driver: Driver, at_s: float, count: int = 10) -> int:
    """How many of so many requests of one tenant start at once."""
    requests = (request(f"{at_s}-{n}", tenant="crowd") for n in range(count))
    return len(dispatched(driver.arrive(at_s, *requests)))


def quiet_tenant(count: int = 10) -> Driver:
    """A tenant has asked once, and has had its answer for longer than it counts as active."""
    driver = slots(count, headroom=0.2, queue_places_max=0)
    driver.arrive(0, request("q0", tenant="quiet"))
    driver.complete(1, "q0")
    return driver


def test_a_place_is_left_for_a_tenant_that_asked_not_long_ago() -> None:
    driver = quiet_tenant()
    assert crowd(driver, 20) == 9
    assert len(dispatched(driver.arrive(21, request("q1", tenant="quiet")))) == 1


def test_no_place_is_left_for_one_that_has_not_asked_for_long_or_of_few() -> None:
    assert crowd(quiet_tenant(), EXPECTED_NS / NS_PER_S + 1) == 10
    assert crowd(quiet_tenant(count=4), 20, count=4) == 4


def test_the_place_left_for_another_tenant_costs_no_tokenising() -> None:
    driver = quiet_tenant()
    crowd(driver, 20)
    newcomer = request("more", tenant="crowd", likeness=7)
    assert driver.fleet.refusal_before("m", newcomer, driver.now_ns) is not None
    other = replace(newcomer, tenant="quiet")
    assert driver.fleet.refusal_before("m", other, driver.now_ns) is None


# -------------------------------------------------------------------------------------- coming back


def full() -> Driver:
    driver = slots(queue_places_max=1)
    driver.arrive(0, request("r0"), request("r1"))
    return driver


def test_a_client_that_comes_back_as_told_is_taken_and_a_newcomer_is_not() -> None:
    driver = full()
    (told,) = rejects(driver.arrive(0, request("back")))
    assert told.retry_after_s is not None
    driver.at(told.retry_after_s - 0.02, Tick())
    driver.complete(told.retry_after_s - 0.01, "r0")
    assert reasons(driver.arrive(told.retry_after_s, request("new", 11))) == [("new", "queue_full")]
    assert rejects(driver.arrive(told.retry_after_s, request("back2"))) == []


def test_a_place_that_is_free_is_not_kept_for_a_booking() -> None:
    driver = slots(queue_places_max=0)
    driver.arrive(0, request("r0"))
    (told,) = rejects(driver.arrive(0, request("back")))
    assert told.retry_after_s is not None
    driver.complete(told.retry_after_s - 0.01, "r0")
    assert len(dispatched(driver.arrive(told.retry_after_s, request("new", 11)))) == 1


def test_what_is_too_far_away_is_not_worth_waiting_for() -> None:
    driver = full()
    effects = driver.arrive(0, *(request(f"x{n}", 20 + n) for n in range(200)))
    far = [refused for refused in rejects(effects) if not refused.should_retry]
    near = [refused for refused in rejects(effects) if refused.should_retry]
    assert {refused.retry_after_s for refused in far} == {120.0}
    told = [refused.retry_after_s or 0 for refused in near]
    assert max(told) <= 120
    assert len(near) > 30
    assert driver.pool.bookings == len(near)


# ------------------------------------------------------------------------------------------ tenants


def limited(**limits: object) -> Driver:
    driver = Driver(
        PoolLimits("m", ("m-0",), queue_places_max=1),
        tenants=(TenantLimits("t", **limits),),  # type: ignore[arg-type]
    )
    driver.at(0, ReplicaReady("m-0", LIMITS), ReplicaReported("m-0", STEADY))
    return driver


def left(driver: Driver) -> int:
    allowance = driver.fleet.allowance("t", driver.now_ns)
    assert allowance is not None
    assert allowance.requests is not None
    return allowance.requests.remaining


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"requests_per_minute": 1}, "requests_per_minute"),
        ({"tokens_per_minute": 40}, "tokens_per_minute"),
        ({"concurrency": 1}, "concurrency"),
    ],
)
def test_a_tenant_over_its_limit_is_refused_and_others_are_not(
    limits: dict[str, int], reason: str
) -> None:
    driver = limited(**limits)
    driver.arrive(0, request("r0", tenant="t"))
    (refused,) = rejects(driver.arrive(0, request("r1", tenant="t")))
    assert (refused.status, refused.reason) == (429, reason)
    assert refused.measured > refused.threshold
    assert rejects(driver.arrive(0, request("r2", tenant="named nowhere"))) == []


def test_a_refused_request_uses_up_nothing_of_its_tenant() -> None:
    driver = limited(requests_per_minute=10)
    driver.arrive(0, *(request(f"r{n}", tenant="t") for n in range(5)))
    assert left(driver) == 8
    driver.at(60, Tick())
    assert driver.pool.waiting == 0
    assert left(driver) == 10


@pytest.mark.parametrize("how", ["ended", "cancelled", "cancelled while waiting"])
def test_whatever_ends_a_request_frees_its_tenant(how: str) -> None:
    driver = limited(concurrency=2)
    driver.arrive(0, request("a", tenant="t"), request("b", tenant="t"))
    if how == "ended":
        failed = Ended("a", EndReason.FAILED, Usage(0, 0, 0), PhaseTimes())
        driver.at(1, failed)
    else:
        driver.at(1, Cancelled("a" if how == "cancelled" else "b"))
    assert rejects(driver.arrive(1, request("c", tenant="t"))) == []


# --------------------------------------------------------------------------------------------- view


def test_the_view_says_what_waits_and_how_long_a_newcomer_would() -> None:
    driver = slots(queue_tokens_max=1000)
    driver.arrive(0, request("r0"), request("r1", 30, body_bytes=500))
    driver.at(1, Tick())
    view = driver.pool
    assert (view.waiting_tokens, view.waiting_bytes, view.waiting_tokens_max) == (30, 500, 1000)
    assert view.longest_wait_ns == ((1, seconds(1)),)
    assert view.wait_ns > seconds(2)
    assert (view.bookings, view.returning, view.margin) == (0, 1.0, 1.2)
