"""A fleet whose replicas are engines elsewhere: attempts, breakers, quotas and windows."""

from collections import Counter
from dataclasses import replace

import pytest

from sluice.core.admission import NS_PER_S
from sluice.core.breaker import BreakerState
from sluice.core.events import (
    AttemptFailed,
    Cancelled,
    Dispatch,
    Fail,
    FleetEffect,
    Outcome,
    Progress,
    QuotaTold,
    Reject,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    Retarget,
    StartReplica,
    Tick,
    WakeAt,
)
from sluice.core.limits import PoolLimits, RemoteLimits, RetryLimits
from sluice.core.quota import Left, QuotaLeft
from sluice.core.request import EndReason, Rung
from sluice.core.window import FIRST
from tests.core.fleet_rig import LIMITS, Driver, dispatched, rejects, report, request, seconds

WIDE = replace(LIMITS, sequences_max=64, blocks_total=100_000)
MANY = RemoteLimits(retries=RetryLimits(per_request=2))


def remote(*names: str, limits: RemoteLimits = MANY) -> Driver:
    driver = Driver(PoolLimits("m", names, remote=limits))
    driver.at(0, *(ReplicaReady(name, WIDE) for name in names))
    driver.at(0, *(ReplicaReported(name, report(blocks_free=10**5)) for name in names))
    return driver


def failed(
    name: str, outcome: Outcome = Outcome.FAULT, rest_s: float | None = None
) -> AttemptFailed:
    rest_ns = None if rest_s is None else seconds(rest_s)
    return AttemptFailed(name, outcome, "broken", rest_ns)


def woken(driver: Driver, until_s: float) -> list[tuple[float, FleetEffect]]:
    """Tick whenever the fleet asks for it; what it does, and when."""
    done: list[tuple[float, FleetEffect]] = []
    wake_ns = driver.now_ns
    while wake_ns <= seconds(until_s):
        effects = driver.fleet.handle(Tick(), wake_ns)
        driver.now_ns = wake_ns
        done += [(wake_ns / NS_PER_S, one) for one in effects if not isinstance(one, WakeAt)]
        wakes = [one.at_ns for one in effects if isinstance(one, WakeAt)]
        if not wakes:
            break
        assert wakes[-1] > wake_ns, "it asks to be woken at once, for ever"
        wake_ns = wakes[-1]
    return done


def spoil(driver: Driver, time_s: float, name: str = "x") -> None:
    """Let requests fail until the breakers of all replicas are open."""
    for number in range(40):
        (effect, *_) = driver.arrive(time_s, request(f"{name}{number}"))
        if isinstance(effect, Reject):
            return
        while (found := driver.at(time_s, failed(f"{name}{number}"))) and dispatched(found):
            pass
    raise AssertionError("no breaker opened")


# ------------------------------------------------------------------------------------- attempts


def test_a_failed_attempt_goes_to_another_replica_at_once():
    driver = remote("a", "b")
    assert dispatched(driver.arrive(0, request("r"))) == [("r", "a")]
    assert dispatched(driver.at(1, failed("r"))) == [("r", "b")]


def test_the_one_that_failed_is_last_even_when_the_other_is_busier():
    driver = remote("a", "b")
    driver.arrive(0, *(request(f"x{n}") for n in range(5)))
    for number in (1, 3):  # those on b
        driver.complete(0, f"x{number}")
    assert dispatched(driver.arrive(0, request("r"))) == [("r", "b")]
    assert dispatched(driver.at(1, failed("r"))) == [("r", "a")]


def test_with_no_other_replica_it_is_asked_again_after_a_wait():
    driver = remote("a")
    driver.arrive(0, request("r"))
    assert driver.at(1, failed("r")) == []
    ((at_s, effect),) = woken(driver, 3)
    assert isinstance(effect, Dispatch)
    assert (effect.request_id, effect.attempt) == ("r", 2)
    assert 1.025 <= at_s <= 1.05


def test_once_output_was_sent_there_is_no_second_attempt():
    driver = remote("a", "b")
    driver.arrive(0, request("r"))
    driver.at(1, Progress("r", 1))
    assert driver.at(2, failed("r")) == [Fail("r", EndReason.FAILED, "broken")]


def test_d13_attempts_of_one_request_are_bounded():
    driver = remote("a", "b")
    driver.arrive(0, request("r"))
    effects, sent = driver.at(1, failed("r")), 1
    while not any(isinstance(one, Fail) for one in effects):
        sent += len(dispatched(effects) or woken(driver, sent + 0.9))
        effects = driver.at(sent, failed("r"))
    assert sent == 3


def test_d13_retries_stop_when_the_budget_is_spent():
    driver = remote("a", "b", limits=RemoteLimits())
    sent = 0
    for number in range(400):
        driver.at(number, ReplicaReported("a", report()), ReplicaReported("b", report()))
        effects = driver.arrive(number, request(f"r{number}"))
        for _ in range(2):
            sent += len(dispatched(effects))
            effects = driver.at(number, failed(f"r{number}", Outcome.FULL, 0.0))
    assert 400 <= sent <= 400 * 1.1 + 10


def test_a_rest_longer_than_any_wait_for_a_retry_is_told_instead():
    driver = remote("a")
    driver.arrive(0, request("r"))
    (fail,) = driver.at(1, failed("r", Outcome.FULL, 20))
    assert isinstance(fail, Fail)


def test_a_retry_whose_replicas_are_gone_by_then_is_ended():
    driver = remote("a")
    driver.arrive(0, request("r"))
    assert driver.at(1, failed("r")) == []
    driver.at(1.01, ReplicaLost("a", "gone", keeps_board=True))
    ends = [one for _, one in woken(driver, 3) if not isinstance(one, StartReplica)]
    assert [type(one) for one in ends] == [Fail]
    assert driver.fleet.requests == 0


def test_a_client_that_leaves_between_attempts_leaves_nothing():
    driver = remote("a")
    driver.arrive(0, request("r"))
    driver.at(1, failed("r"))
    assert driver.pool.waiting == 1
    assert driver.at(1.01, Cancelled("r")) == []
    assert (driver.fleet.requests, driver.pool.waiting) == (0, 0)
    assert woken(driver, 3) == []


def test_nothing_is_charged_for_attempts_that_came_to_nothing():
    driver = remote("a", limits=RemoteLimits(retries=RetryLimits(per_request=0)))
    driver.arrive(0, request("r", prompt=100))
    assert isinstance(driver.at(1, failed("r"))[0], Fail)
    assert driver.pool.places == 0


# ------------------------------------------------------------------------------------- the breakers


def test_with_all_breakers_open_it_is_told_when_to_come_back():
    driver = remote("a", "b")
    spoil(driver, 1)
    (refused,) = rejects(driver.arrive(1.5, request("late")))
    assert (refused.status, refused.reason) == (503, "not_ready")
    assert refused.retry_after_s is not None
    assert 0.4 <= refused.retry_after_s <= 0.7
    assert {replica.breaker for replica in driver.pool.replicas} == {BreakerState.OPEN}


def test_after_the_wait_one_request_is_the_trial_and_others_wait_for_its_outcome():
    driver = remote("a")
    spoil(driver, 1)
    assert dispatched(driver.arrive(3, request("trial"))) == [("trial", "a")]
    assert driver.arrive(3, request("next"), request("third")) == []
    assert dispatched(driver.at(4, Progress("trial", 1))) == [("next", "a"), ("third", "a")]


def test_when_the_trial_fails_the_waiting_go_on_with_the_next_one():
    driver = remote("a", limits=RemoteLimits(retries=RetryLimits(per_request=0)))
    spoil(driver, 1)
    driver.arrive(3, request("trial"), request("next"))
    (fail,) = driver.at(4, failed("trial"))
    assert isinstance(fail, Fail)
    (at_s, effect), *_ = woken(driver, 10)
    assert isinstance(effect, Dispatch)
    assert effect.request_id == "next"
    assert at_s == pytest.approx(6.0)


def test_one_of_two_with_an_open_breaker_gets_nothing():
    driver = remote("a", "b")
    for number in range(20):
        (first,) = dispatched(driver.arrive(1, request(f"r{number}")))
        if first[1] == "a":
            driver.at(1, failed(f"r{number}"))
        driver.complete(1, f"r{number}")
    picked = [at for _, at in dispatched(driver.arrive(1.5, *(request(f"y{n}") for n in range(4))))]
    assert picked == ["b"] * 4


# ------------------------------------------------------------------------------ quota and rests


def test_a_vendors_quota_is_kept_and_not_run_into():
    driver = remote("a")
    driver.arrive(0, request("first"))
    left = QuotaLeft(requests=Left(60, 2, 58 * NS_PER_S))
    driver.at(0, QuotaTold("a", "first", left))
    sent = dispatched(driver.arrive(0, *(request(f"r{n}") for n in range(4))))
    assert [name for name, _ in sent] == ["r0", "r1"]
    later = [(at_s, one.request_id) for at_s, one in woken(driver, 5) if isinstance(one, Dispatch)]
    assert [name for _, name in later] == ["r2", "r3"]
    assert [at_s for at_s, _ in later] == pytest.approx([1.0, 2.0], abs=0.01)


def test_requests_wait_out_a_rest_that_the_engine_asked_for():
    driver = remote("a")
    driver.arrive(0, request("r"))
    driver.at(1, failed("r", Outcome.FULL, 20))
    assert driver.arrive(2, request("next")) == []
    ((at_s, effect),) = woken(driver, 40)
    assert isinstance(effect, Dispatch)
    assert at_s == pytest.approx(21.0)


def test_a_rest_longer_than_the_longest_wait_is_told_to_newcomers():
    driver = remote("a")
    driver.arrive(0, request("r"))
    driver.at(1, failed("r", Outcome.FULL, 120))
    (refused,) = rejects(driver.arrive(2, request("next")))
    assert (refused.status, refused.reason) == (429, "upstream_busy")
    assert refused.retry_after_s is not None
    assert 119 <= refused.retry_after_s <= 119 * 1.26


# --------------------------------------------------------------------------------------- window


def test_a_replica_is_given_few_until_more_is_known_of_it():
    driver = remote("a")
    sent = dispatched(driver.arrive(0, *(request(f"r{n}") for n in range(20))))
    assert len(sent) == FIRST
    more = dispatched(driver.at(0.1, Progress("r0", 1)))
    assert len(more) == 1


def test_what_waits_in_the_engine_makes_its_window_smaller():
    driver = remote("a")
    driver.arrive(0, *(request(f"r{n}") for n in range(20)))
    for second in range(1, 10):
        driver.at(second, ReplicaReported("a", report(waiting=7, running=1)))
    assert driver.pool.replicas[0].seats == 3  # one that runs, and two to follow it
    driver.at(10, ReplicaReported("a", report(waiting=0, running=1)))
    assert driver.complete(10, "r0") == []


def test_an_engine_without_gauges_is_not_taken_for_one_with_an_empty_queue():
    driver = Driver(PoolLimits("m", ("a",), remote=MANY))
    driver.at(0, ReplicaReady("a", WIDE))
    driver.arrive(0, *(request(f"r{n}") for n in range(20)))
    for second in range(1, 10):
        driver.at(second, ReplicaReported("a", report(gauged=False)))
    assert driver.pool.replicas[0].seats == FIRST


def test_d20_a_remote_replica_with_an_old_report_gets_few_requests_while_others_report():
    driver, picked = remote("r1", "r2", "r3"), Counter[str]()
    for number in range(100):
        now_s = 60 + number / 10
        reports = [ReplicaReported(name, report(waiting=1, running=6)) for name in ("r2", "r3")]
        driver.at(now_s, *reports)
        ((name, at),) = dispatched(driver.arrive(now_s, request(f"x{number}")))
        picked[at] += 1
        driver.at(now_s, Progress(name, 1))
        driver.complete(now_s + 0.05, name)
    assert picked["r1"] <= 5


def test_a_remote_replica_without_gauges_gets_its_share_beside_others_that_have_them():
    driver, picked = remote("r1", "r2"), Counter[str]()
    for number in range(40):
        now_s = 60 + number / 10
        for name, gauged in (("r1", False), ("r2", True)):
            driver.at(now_s, ReplicaReported(name, report(gauged=gauged)))
        ((name, at),) = dispatched(driver.arrive(now_s, request(f"x{number}")))
        picked[at] += 1
        driver.at(now_s, Progress(name, 1))
        if number >= 2:
            driver.complete(now_s + 0.05, f"x{number - 2}")
    assert min(picked["r1"], picked["r2"]) > 10


def test_the_prompts_that_are_remembered_of_a_remote_replica_have_a_bound():
    driver = Driver(PoolLimits("m", ("a",), remote=MANY))
    driver.at(0, ReplicaReady("a", replace(WIDE, blocks_total=10**6)))
    replica = driver.fleet._replicas["a"]
    for start in range(0, 40_000, 64):
        replica.prefixes.add(tuple(range(start, start + 64)))
    assert len(replica.prefixes.known) == 16_384


def test_d20_with_all_reports_old_remote_replicas_share_the_requests_and_none_is_refused():
    driver, picked = remote("r1", "r2", "r3"), Counter[str]()
    for number in range(33):
        now_s = 60 + number / 10
        names = [f"x{number}-{n}" for n in range(3)]
        for name, at in dispatched(driver.arrive(now_s, *(request(name) for name in names))):
            picked[at] += 1
            driver.at(now_s, Progress(name, 1))
        for name in names:
            driver.complete(now_s + 0.05, name)
    assert sum(picked.values()) == 99
    assert all(28 <= count <= 38 for count in picked.values())


# -------------------------------------------------------------------------------------- fallback


def with_fallback() -> Driver:
    pools = [
        PoolLimits("m", ("a",), remote=RemoteLimits(), fallback=("n", "o")),
        PoolLimits("n", ("b",), remote=RemoteLimits()),
        PoolLimits("o", ("c",)),
    ]
    driver = Driver(*pools)
    driver.at(0, *(ReplicaReady(name, WIDE) for name in ("a", "b", "c")))
    return driver


def gone(driver: Driver, *names: str) -> None:
    driver.at(1, *(ReplicaLost(name, "gone", keeps_board=True) for name in names))


def test_a_model_of_which_nothing_serves_is_answered_by_the_first_other_that_does():
    driver = with_fallback()
    gone(driver, "a")
    (effect,) = driver.arrive(2, request("r"))
    assert isinstance(effect, Retarget)
    assert (effect.model, effect.rung) == ("n", Rung.FALLBACK)
    gone(driver, "b")
    (effect,) = driver.arrive(2, request("s"))
    assert isinstance(effect, Retarget)
    assert effect.model == "o"
    assert driver.fleet.refusal_before("m", request("t"), driver.now_ns) is None


def test_who_forbids_it_or_has_fallen_back_before_is_refused():
    driver = with_fallback()
    gone(driver, "a")
    for asked in (request("r", may_fall_back=False), request("s", degraded=(Rung.FALLBACK,))):
        (refused,) = rejects(driver.arrive(2, asked))
        assert (refused.status, refused.reason) == (503, "not_ready")


def test_a_request_whose_attempts_all_failed_goes_to_another_remote_model_once():
    driver = with_fallback()
    driver.arrive(1, request("r"))
    driver.at(1, failed("r"))
    ((_, again),) = woken(driver, 2)
    assert isinstance(again, Dispatch)
    (effect,) = driver.at(2, failed("r"))
    assert isinstance(effect, Retarget)
    assert (effect.model, driver.fleet.requests, driver.pool.places) == ("n", 0, 0)
    fallen = request("r", degraded=(Rung.FALLBACK,))
    assert dispatched(driver.arrive(2, fallen, model="n")) == [("r", "b")]
    driver.at(3, failed("r"))
    woken(driver, 4)
    assert isinstance(driver.at(4, failed("r"))[0], Fail)


def test_a_request_that_was_begun_to_be_relayed_does_not_go_to_a_model_that_batches_here():
    driver = with_fallback()
    gone(driver, "b")
    driver.arrive(1, request("r"))
    driver.at(1, failed("r"))
    woken(driver, 2)
    assert isinstance(driver.at(2, failed("r"))[0], Fail)


def test_a_busy_model_is_no_reason_to_fall_back():
    driver = with_fallback()
    assert len(driver.arrive(1, *(request(f"r{n}") for n in range(20)))) == FIRST
