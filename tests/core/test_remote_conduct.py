"""What becomes of requests whose engines elsewhere break, hang, fill up or go away."""

from dataclasses import replace

import pytest

from sluice.core.breaker import BreakerState
from sluice.core.events import (
    AttemptFailed,
    Dispatch,
    Ended,
    Fail,
    FleetEffect,
    Outcome,
    Progress,
    ReplicaLost,
    ReplicaReady,
    Retarget,
    StartReplica,
    Tick,
)
from sluice.core.limits import PoolLimits, RemoteLimits, RetryLimits, TenantLimits
from sluice.core.pools import LOAD_NS_UNKNOWN
from sluice.core.request import EndReason, PhaseTimes, Rung, Usage
from sluice.core.window import FIRST
from tests.core.fleet_rig import Driver, dispatched, rejects, request
from tests.core.test_remote_fleet import MANY, WIDE, failed, gone, remote, with_fallback, woken

ONCE = RemoteLimits(retries=RetryLimits(per_request=0))


def opened(on_board: int) -> Driver:
    """A fleet of one replica whose breaker opened at 1 s, with so many requests still there."""
    driver = remote("a", limits=ONCE)
    driver.arrive(0, *(request(f"long{n}") for n in range(on_board)))
    for number in range(ONCE.breaker.in_a_row):
        driver.arrive(1, request(f"bad{number}"))
        driver.at(1, failed(f"bad{number}"))
    assert driver.pool.replicas[0].breaker is BreakerState.OPEN
    return driver


def left(effects: list[FleetEffect]) -> list[FleetEffect]:
    return [one for one in effects if not isinstance(one, StartReplica)]


# ----------------------------------------------------------------------------------- the breaker


@pytest.mark.parametrize("choices", [1, 3])
def test_a_trial_is_made_while_others_are_on_board_and_only_one(choices):
    driver = opened(on_board=3)
    assert driver.arrive(1.5, request("early"))[0].reason == "not_ready"  # type: ignore[union-attr]
    trial = request("trial", choices=choices)
    assert dispatched(driver.arrive(2.5, trial)) == [("trial", "a")]
    assert driver.arrive(2.5, request("next")) == []
    assert dispatched(driver.at(3, Progress("trial", 1))) == [("next", "a")]


def test_a_trial_that_fails_opens_it_again_whatever_else_is_on_board():
    driver = opened(on_board=3)
    driver.arrive(2.5, request("trial"))
    assert isinstance(driver.at(3, failed("trial"))[0], Fail)
    (refused,) = rejects(driver.arrive(3.5, request("next")))
    assert refused.retry_after_s == pytest.approx(1.5, rel=0.3)


# -------------------------------------------------------------------------------------- attempts


def one_full() -> Driver:
    """``b`` is full, ``a`` has the request ``x0`` alone."""
    driver = remote("a", "b")
    for name, at in dispatched(driver.arrive(0, *(request(f"x{n}") for n in range(2 * FIRST)))):
        if at == "a" and name != "x0":
            driver.complete(0, name)
    assert [replica.requests for replica in driver.pool.replicas] == [1, FIRST]
    return driver


def test_a_retry_waits_for_a_full_replica_before_it_goes_to_the_one_that_failed():
    driver = one_full()
    assert driver.at(1, failed("x0")) == []
    ((at_s, effect),) = woken(driver, 4)
    assert isinstance(effect, Dispatch)
    assert (effect.request_id, effect.replica_id) == ("x0", "a")
    assert at_s == pytest.approx(1 + MANY.retries.wait_ns_max / 1e9, abs=0.1)


def test_others_go_to_the_replica_that_failed_one_while_that_waits():
    driver = one_full()
    driver.at(1, failed("x0"))
    assert dispatched(driver.arrive(1.1, request("y"))) == [("y", "a")]


@pytest.mark.parametrize("free_s", [1.01, 2.0])
def test_a_retry_that_waits_goes_to_the_other_replica_when_that_has_a_place(free_s):
    driver = one_full()
    driver.at(1, failed("x0"))
    assert woken(driver, free_s) == []
    driver.complete(free_s, "x1")
    ((at_s, effect),) = woken(driver, 4)
    assert isinstance(effect, Dispatch)
    assert effect.replica_id == "b"
    assert at_s <= free_s + 0.06


# ----------------------------------------------------------------------------------- all are gone


def test_those_that_wait_for_engines_that_are_gone_are_told():
    driver = remote("a")
    driver.arrive(0, *(request(f"r{n}") for n in range(FIRST + 2)))
    assert driver.pool.waiting == 2
    effects = driver.at(1, ReplicaLost("a", "gone", keeps_board=True))
    assert [(one.request_id, one.reason) for one in rejects(effects)] == [
        (f"r{FIRST}", "not_ready"),
        (f"r{FIRST + 1}", "not_ready"),
    ]
    assert (driver.pool.waiting, driver.pool.replicas[0].requests) == (0, FIRST)


def test_those_that_wait_for_the_rest_of_the_engines_go_on_waiting():
    driver = remote("a", "b")
    driver.arrive(0, *(request(f"r{n}") for n in range(2 * FIRST + 2)))
    assert left(driver.at(1, ReplicaLost("a", "gone", keeps_board=True))) == []
    assert driver.pool.waiting == 2


def test_those_that_wait_for_engines_that_are_gone_go_to_another_model():
    driver = with_fallback()
    driver.arrive(1, *(request(f"r{n}") for n in range(FIRST + 1)))
    effects = left(driver.at(1, ReplicaLost("a", "gone", keeps_board=True)))
    assert [type(one) for one in effects] == [Retarget]
    (effect,) = effects
    assert isinstance(effect, Retarget)
    assert (effect.request_id, effect.model, effect.rung) == (f"r{FIRST}", "n", Rung.FALLBACK)
    assert driver.fleet.requests == FIRST


def test_who_was_to_be_tried_again_by_engines_that_are_gone_goes_to_another_model():
    driver = with_fallback()
    driver.arrive(1, request("r"))
    driver.at(1, failed("r"))
    gone(driver, "a")
    effects = left([effect for _, effect in woken(driver, 2)])
    assert [type(one) for one in effects] == [Retarget]
    assert driver.fleet.requests == 0


def test_the_time_that_an_engine_was_away_is_not_told_as_a_time_to_load():
    driver = remote("a")
    driver.at(10, ReplicaLost("a", "gone", keeps_board=True))
    driver.at(11, Tick())
    driver.at(3600, ReplicaReady("a", WIDE))
    driver.at(3601, ReplicaLost("a", "gone", keeps_board=True))
    (refused,) = rejects(driver.arrive(3601, request("r")))
    assert refused.retry_after_s is not None
    assert refused.retry_after_s <= 1.3 * LOAD_NS_UNKNOWN / 1e9


# ----------------------------------------------------------------------------------------- hangs


def expired(name: str, *, silent: bool = True) -> Ended:
    return Ended(name, EndReason.EXPIRED, Usage(100, 0, 0), PhaseTimes(), silent=silent)


@pytest.mark.parametrize(
    ("waits_s", "silent", "is_fault"),
    [(20, True, True), (0.5, True, False), (20, False, False)],
    ids=["hangs", "hardly waited", "not streamed"],
)
def test_an_engine_that_hangs_until_the_clients_deadline_is_at_fault(waits_s, silent, is_fault):
    driver = remote("a", limits=ONCE)
    for number in range(ONCE.breaker.in_a_row):
        driver.arrive(number * 30, request(f"r{number}"))
        driver.at(number * 30 + waits_s, expired(f"r{number}", silent=silent))
    breaker = driver.pool.replicas[0].breaker
    assert (breaker is BreakerState.OPEN) == is_fault


def test_what_is_usual_for_an_engine_says_when_it_hangs():
    driver = remote("a", limits=ONCE)
    for number in range(60):  # first tokens come after 3 s, long as that may be
        driver.arrive(number * 10, request(f"x{number}"))
        driver.at(number * 10 + 3, Progress(f"x{number}", 1))
        usage, phases = Usage(10, 0, 20), PhaseTimes(prefill_ns=3 * 10**9, decode_ns=10**9)
        driver.at(number * 10 + 4, Ended(f"x{number}", EndReason.STOP, usage, phases))
    for number in range(ONCE.breaker.in_a_row):
        driver.arrive(1000 + number * 30, request(f"r{number}"))
        driver.at(1020 + number * 30, expired(f"r{number}"))
    assert driver.pool.replicas[0].breaker is BreakerState.CLOSED


@pytest.mark.parametrize(("waits_s", "charged"), [(20, 0), (0.5, 99)], ids=["hangs", "in time"])
def test_a_prompt_that_an_engine_hung_at_is_not_charged(waits_s, charged):
    pool = PoolLimits("m", ("a",), remote=ONCE)
    driver = Driver(pool, tenants=(TenantLimits("t", tokens_per_minute=150),))
    driver.at(0, ReplicaReady("a", WIDE))
    driver.arrive(0, replace(request("r", prompt=100), tenant="t"))
    driver.at(waits_s, expired("r"))
    allowance = driver.fleet.allowance("t", driver.now_ns)
    assert allowance is not None
    assert allowance.tokens is not None
    assert allowance.tokens.limit - allowance.tokens.remaining == charged


def test_an_outcome_is_told_once():
    driver = remote("a")
    driver.arrive(0, request("r"))
    driver.at(20, expired("r"))
    assert driver.at(20, AttemptFailed("r", Outcome.FAULT, "late")) == []
    assert driver.fleet.requests == 0
