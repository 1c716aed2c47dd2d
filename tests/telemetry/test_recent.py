"""The slowest requests of each stretch of time are remembered, and not all others."""

from sluice.telemetry.recent import Over, Recent
from sluice.telemetry.records import (
    FirstToken,
    RequestArrived,
    RequestDegraded,
    RequestDispatched,
    RequestEnded,
    RequestRefused,
    RequestRejected,
)

S = 1_000_000_000


def lives(recent: Recent, name: str, began_ns: int, duration_ns: int, ttft_ns: int, model="m"):
    recent.add(RequestArrived(began_ns, name, model, began_ns, 10, 20))
    recent.add(RequestDispatched(began_ns, name, "m-0", 1))
    recent.add(FirstToken(began_ns + ttft_ns, name, ttft_ns))
    recent.add(
        RequestEnded(
            began_ns + duration_ns, name, model, "stop", began_ns, "m-0", 1, 10, 0, 5,
            decode_ns=duration_ns, ttft_ns=ttft_ns,
        )
    )  # fmt: skip


def names(found: list[Over]) -> list[str]:
    return [one.arrived.id for one in found]


def test_the_slowest_stay_in_both_orders():
    recent = Recent()
    for number in range(100):
        lives(recent, f"r{number}", number, number * S // 1000, (100 - number) * S // 1000)
    assert names(recent.slowest(0, "e2e", 3)) == ["r99", "r98", "r97"]
    assert names(recent.slowest(0, "ttft", 3)) == ["r0", "r1", "r2"]
    assert recent.find("r99") is not None
    assert recent.find("r50") is None


def test_what_ended_before_the_window_is_left_out():
    recent = Recent()
    lives(recent, "old", 0, S, S)
    lives(recent, "new", 60 * S, S // 2, S)
    assert names(recent.slowest(30 * S, "e2e", 9)) == ["new"]
    assert names(recent.slowest(0, "e2e", 9)) == ["old", "new"]


def test_models_are_told_apart():
    recent = Recent()
    lives(recent, "a", 0, S, S, "m")
    lives(recent, "b", 0, S, S, "other")
    assert names(recent.slowest(0, "e2e", 9, "other")) == ["b"]


def test_memory_is_bounded_whatever_comes():
    recent = Recent()
    for number in range(5000):
        lives(recent, f"r{number}", number * S // 10, S, S)
        recent.add(RequestRefused(number, f"x{number}", 400, "invalid_request"))
    assert recent._live == {}
    assert len(recent.refused) == 50
    kept = {id(one) for one in recent._all()}
    assert len(kept) <= 90 * 16


def test_refused_and_degraded_requests_are_remembered_with_their_decisions():
    recent = Recent()
    recent.add(RequestArrived(5, "r", "m", 0, 10, 20, slo_class="gold"))
    recent.add(RequestRejected(9, "r", "m", 429, "queue_full", 8, 7, 1.5))
    recent.add(RequestArrived(10, "d", "m", 10, 10, 20))
    recent.add(RequestDegraded(11, "d", "shorten", 5))
    recent.add(RequestEnded(20, "d", "m", "length", 10))
    (refused,) = recent.refused
    assert isinstance(refused, Over)
    life = refused.life(1000)
    assert (life.arrived_wall_ns, life.decisions[0].reason) == (1000, "queue_full")
    assert names(list(recent.degraded)) == ["d"]


def test_a_request_that_is_tried_for_ever_takes_no_more_room():
    recent = Recent()
    recent.add(RequestArrived(0, "r", "m", 0, 1, 1))
    for attempt in range(1000):
        recent.add(RequestDispatched(attempt, "r", "m-0", attempt))
    assert len(recent._live["r"]) <= 40
