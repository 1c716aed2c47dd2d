"""Samples hold what happened between two looks, and percentiles of that alone."""

from dataclasses import replace

import pytest

from sluice.core.events import Report
from sluice.core.fleet_replica import ReplicaView
from sluice.core.lifecycle import ReplicaState
from sluice.core.pool_view import PoolView
from sluice.core.request import EndReason, PhaseTimes, Rung, Usage
from sluice.core.scaling import Decision
from sluice.telemetry.metric_table import Outcome
from sluice.telemetry.metrics import Finish, Metrics
from sluice.telemetry.timeline import SAMPLES_MAX, Stages, Timeline, quantile

S = 1_000_000_000


def pool(model: str, waiting: int = 0, inside: int = 0) -> PoolView:
    report = Report(inside, 3, 40, 100, 0, 0, 0, 0, 0.0, 0)
    replica = ReplicaView(f"{model}-0", model, ReplicaState.READY, "", 0, 0, 0, None, report, 0)
    return PoolView(model, waiting, waiting, 0, 10, None, (replica,), wait_ns=S)


def test_a_sample_holds_the_difference_and_nothing_from_before():
    metrics = Metrics(["a", "b"], slo_classes=["gold"])
    metrics.arrived("a")
    metrics.stream("a", "").first_token(9.0)
    line = Timeline(metrics, 0)
    metrics.arrived("a")
    metrics.arrived("b")
    metrics.stream("a", "gold").first_token(0.12)
    metrics.outcome("a", "gold", Outcome.MET)
    metrics.outcome("b", "", Outcome.REFUSED)
    metrics.refused("b", "queue_full")
    metrics.degraded("a", Rung.SHORTEN)
    phases = PhaseTimes(queue_ns=S, decode_ns=2 * S)
    metrics.ended("a", Finish(EndReason.STOP, Usage(100, 60, 7), phases, 0.02))
    line.sample(2 * S, 1000.0, [pool("a"), pool("b")], {})
    (one,) = line.since("a", 0)
    assert (one.arrived, one.met, one.refused, one.interval_s) == (1, 1, 0, 2.0)
    assert one.classes == {"gold": (1, 0, 0)}
    assert one.ttft is not None
    assert 0.1 <= one.ttft[0] <= 0.15
    assert one.itl is None
    assert one.phases == {"queue": 1.0, "decode": 2.0}
    assert (one.prompt_tokens, one.cached_tokens, one.generated_tokens) == (100, 60, 8)
    assert one.degradations == {"shorten": 1}
    (whole,) = line.since("", 0)
    assert (whole.arrived, whole.met, whole.refused) == (2, 1, 1)
    assert whole.refusals == {"queue_full": 1}
    line.sample(4 * S, 1002.0, [pool("a")], {})
    (_, quiet) = line.since("a", 0)
    assert (quiet.arrived, quiet.ttft, quiet.phases) == (0, None, {})


def test_requests_are_told_by_what_they_do():
    line = Timeline(Metrics(["a", "b"]), 0)
    stages = {"a": Stages(4, 3, 5), "b": Stages(0, 1, 1)}
    line.sample(S, 1.0, [pool("a", waiting=4, inside=2), pool("b")], stages)
    (one,) = line.since("a", 0)
    assert (one.decoding, one.prefilling, one.waiting_inside, one.waiting) == (5, 1, 2, 4)
    (whole,) = line.since("", 0)
    assert (whole.decoding, whole.kv_used, whole.kv_max) == (6, 120, 200)
    assert whole.wait_newcomer_s == 1.0


def test_replicas_are_counted_by_state_beside_how_many_are_wanted():
    line = Timeline(Metrics(["a", "b"]), 0)
    (ready,) = pool("a").replicas
    states = (replace(ready, draining=True), replace(ready, state=ReplicaState.WARM))
    scaled = replace(pool("a"), replicas=(ready, *states), scaling=Decision(2, 3, "forecast"))
    line.sample(S, 1.0, [scaled, pool("b")], {})
    (one,) = line.since("a", 0)
    assert one.replicas == {"ready": 1, "draining": 1, "warm": 1}
    assert one.wanted == 2
    (whole,) = line.since("", 0)
    assert (whole.replicas["ready"], whole.wanted) == (2, 2)


def test_only_what_the_caller_lacks_is_given_and_no_more_than_is_kept():
    line = Timeline(Metrics(["a"]), 0)
    for number in range(1, SAMPLES_MAX + 50):
        line.sample(number * S, float(number), [pool("a")], {})
    assert len(line.since("a", 0)) == SAMPLES_MAX
    assert [one.t_s for one in line.since("a", SAMPLES_MAX + 47)] == [
        SAMPLES_MAX + 48,
        SAMPLES_MAX + 49,
    ]
    assert line.since("unknown", 0) == []


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ((4, 0, 0), 0.5, 0.5),
        ((0, 4, 0), 0.5, 1.5),
        ((1, 1, 2), 0.99, 2.0),
        ((0, 0, 3), 0.5, 2.0),
        ((2, 2, 0), 0.5, 1.0),
    ],
)
def test_quantiles_are_those_of_prometheus(counts, q, expected):
    assert quantile((1.0, 2.0), counts, q) == expected
