"""Metrics are exact, bounded in number, never fall, and carry vLLM's names where asked."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import sluice
from sluice.core import errors
from sluice.core.admission import NS_PER_S
from sluice.core.errors import ConfigError
from sluice.core.events import (
    Arrived,
    Cancelled,
    Dispatch,
    Ended,
    ReplicaLimits,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    Report,
    Tick,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.pool_view import PoolView
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.telemetry.metric_table import (
    METRICS,
    VLLM_ALIASES,
    Outcome,
    bounds_with_targets,
    bucket_problems,
)
from sluice.telemetry.metrics import REFUSAL_REASONS, ClassTargets, Finish, Metrics

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]
REPORT = Report(0, 0, 100, 100, 0, 0, 0, 0, 100.0, 0)


def scrape(metrics: Metrics, pools: tuple[PoolView, ...] = ()) -> Samples:
    body, content_type = metrics.exposition(pools)
    assert content_type.startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            series = samples.setdefault(sample.name, {})
            assert key not in series, "one series twice"
            series[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name][tuple(sorted(labels.items()))]


def buckets(samples: Samples, name: str, model: str = "m") -> dict[float, float]:
    """Cumulative counts by upper bound."""
    found = {}
    for key, count in samples[f"{name}_bucket"].items():
        labels = dict(key)
        if labels["model"] == model:
            found[float(labels["le"])] = count
    return dict(sorted(found.items()))


def quantile(cumulative: Mapping[float, float], q: float) -> float:
    """What Prometheus' ``histogram_quantile`` gives: linear within the bucket."""
    rank = q * list(cumulative.values())[-1]
    lower, below = 0.0, 0.0
    for bound, count in cumulative.items():
        if count >= rank:
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("no bucket holds the rank")


def end(metrics: Metrics, seconds: float, **fields: object) -> None:
    phases = PhaseTimes(decode_ns=round(seconds * NS_PER_S))
    metrics.ended("m", Finish(EndReason.STOP, Usage(10, 0, 5), phases, None, 0))


def fleet(*pools: PoolLimits) -> Fleet:
    made = Fleet(pools, chance=random.Random(0))
    made.handle(Tick(), 0)
    return made


# ------------------------------------------------------------------------------------- buckets


def test_d21_short_requests_are_resolved() -> None:
    metrics = Metrics(["m"])
    for _ in range(1000):
        end(metrics, 0.040)
    samples = scrape(metrics)
    assert 0.040 <= quantile(buckets(samples, "sluice_e2e_seconds"), 0.99) <= 0.060
    assert value(samples, "sluice_e2e_seconds_count", model="m", slo_class="default") == 1000
    assert value(
        samples, "sluice_e2e_seconds_sum", model="m", slo_class="default"
    ) == pytest.approx(40.0)


def test_d21_long_requests_stay_below_infinity() -> None:
    metrics = Metrics(["m"])
    for _ in range(100):
        end(metrics, 400.0)
    cumulative = buckets(scrape(metrics), "sluice_e2e_seconds")
    assert 300 <= quantile(cumulative, 0.99) <= 600
    finite = [count for bound, count in cumulative.items() if bound != float("inf")]
    assert finite[-1] == 100


def test_d21_first_tokens_and_gaps_fall_into_the_right_buckets() -> None:
    metrics = Metrics(["m"])
    for _ in range(100):
        metrics.stream("m", "").first_token(0.7)
        metrics.stream("m", "").chunk(0.008)
    samples = scrape(metrics)
    ttft = buckets(samples, "sluice_ttft_seconds")
    assert 0.5 <= quantile(ttft, 0.99) <= 1.0
    assert ttft[0.5] == 0
    assert 0.005 <= quantile(buckets(samples, "sluice_itl_seconds"), 0.99) <= 0.012
    assert value(
        samples, "sluice_ttft_seconds_sum", model="m", slo_class="default"
    ) == pytest.approx(70.0)
    assert value(
        samples, "sluice_itl_seconds_sum", model="m", slo_class="default"
    ) == pytest.approx(0.8)


def test_d21_bounds_can_be_set_for_one_metric() -> None:
    metrics = Metrics(["m"], buckets={"sluice_ttft_seconds": (0.25, 1)})
    for seconds in (0.25, 0.26, 1.0, 1.1):
        metrics.stream("m", "").first_token(seconds)
    samples = scrape(metrics)
    assert buckets(samples, "sluice_ttft_seconds") == {0.25: 1, 1.0: 3, float("inf"): 4}
    assert len(buckets(samples, "sluice_itl_seconds")) > 10


@pytest.mark.parametrize(
    ("name", "bounds", "words"),
    [
        ("sluice_ttft_seconds", (1.0, 0.5), "0.5 comes after 1.0"),
        ("sluice_ttft_seconds", (0.5, 0.5), "0.5 comes after 0.5"),
        ("sluice_ttft_seconds", (0.0, 0.5), "0.0 is not a positive"),
        ("sluice_ttft_seconds", (-1.0,), "-1.0 is not a positive"),
        ("sluice_ttft_seconds", (1.0, float("inf")), "inf is not a positive"),
        ("sluice_ttft_seconds", (), "0 bounds"),
        ("sluice_requests_total", (1.0,), "no such histogram"),
    ],
)
def test_d21_wrong_bounds_are_refused(name: str, bounds: tuple[float, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.buckets") as caught:
        Metrics(["m"], buckets={name: bounds})
    assert words in str(caught.value)


def test_the_default_bounds_pass_their_own_check() -> None:
    for metric in METRICS:
        if metric.kind == "histogram":
            assert bucket_problems(metric.name, metric.buckets) == []


# -------------------------------------------------------------------------------- cardinality


def test_d22_made_up_models_and_reasons_share_one_label_value() -> None:
    metrics = Metrics(["m"])
    before = scrape(metrics)
    for i in range(5000):
        metrics.arrived(f"made-up-{i}")
        metrics.refused(f"made-up-{i}", "model_not_found")
        metrics.refused(None, "not_found")
        metrics.refused("m", f"made-up-{i}")
    after = scrape(metrics)
    for name, series in after.items():
        assert len(series) - len(before.get(name, {})) <= 5, name
    assert value(after, "sluice_requests_total", model="other") == 5000
    assert value(after, "sluice_refusals_total", model="other", reason="model_not_found") == 5000
    assert value(after, "sluice_refusals_total", model="m", reason="other") == 5000
    assert len(metrics.exposition(())[0]) < 1_000_000


def test_d22_there_are_no_process_path_or_key_labels() -> None:
    allowed = {"model", "replica", "reason", "phase", "state", "version"}
    allowed |= {"slo_class", "outcome", "rung", "tier", "target", "route", "way", "pipeline"}
    allowed |= {"direction", "stage"}
    assert {label for metric in METRICS for label in metric.labels} == allowed


def test_d22_counters_do_not_fall_when_a_replica_restarts() -> None:
    metrics = Metrics(["m"])
    names = ("preemptions", "prefix_query_tokens", "prefix_hit_tokens")
    totals = []
    counts = [(1, 5), (1, 9), (2, 0), (2, 3), (3, 7), (3, 2)]
    for incarnation, count in counts:
        report = replace(
            REPORT, preemptions=count, prefix_query_tokens=count, prefix_hit_tokens=count
        )
        metrics.replica_report("m-0", "m", report, incarnation)
        samples = scrape(metrics)
        totals.append([value(samples, f"sluice_{name}_total", model="m") for name in names])
    assert totals == [[n] * 3 for n in (5, 9, 9, 12, 19, 21)]


def test_d22_gauges_are_the_fleets_own_numbers() -> None:
    made = fleet(PoolLimits("m", ("m-0", "m-1")))
    limits = ReplicaLimits(2048, 32, 100, 2)
    for name in ("m-0", "m-1"):
        made.handle(ReplicaReady(name, limits), 0)
    for i in range(6):
        made.handle(Arrived("m", Request(f"r{i}", 0, (1,), 9)), 0)
    full = replace(REPORT, waiting=1, running=1, blocks_free=40, blocks_cached=7)
    made.handle(ReplicaReported("m-0", full), NS_PER_S)
    samples = scrape(Metrics(["m"]), made.pools(3 * NS_PER_S))
    assert value(samples, "sluice_requests_in_flight", model="m") == 6
    assert value(samples, "sluice_requests_running", model="m") == 3
    assert value(samples, "sluice_requests_waiting", model="m") == 3
    assert value(samples, "sluice_queue_places", model="m") == 6
    assert value(samples, "sluice_queue_places_max", model="m") == 132
    assert value(samples, "sluice_kv_usage_ratio", model="m") == pytest.approx(0.6)
    of_replica = {"model": "m", "replica": "m-0"}
    assert value(samples, "sluice_kv_blocks_used", **of_replica) == 60
    assert value(samples, "sluice_kv_blocks_cached", **of_replica) == 7
    assert value(samples, "sluice_kv_blocks_max", **of_replica) == 100
    assert value(samples, "sluice_replica_report_age_seconds", **of_replica) == 2
    assert value(samples, "sluice_replica_state", **of_replica, state="ready") == 1
    assert value(samples, "sluice_replica_state", **of_replica, state="crash_loop") == 0
    made.handle(Cancelled("r5"), 4 * NS_PER_S)
    made.handle(ReplicaLost("m-1", "killed"), 4 * NS_PER_S)
    samples = scrape(Metrics(["m"]), made.pools(4 * NS_PER_S))
    assert value(samples, "sluice_requests_running", model="m") == 1
    assert value(samples, "sluice_requests_waiting", model="m") == 4
    assert value(samples, "sluice_replica_state", model="m", replica="m-1", state="backoff") == 1


def test_kv_series_exist_before_a_replica_reports() -> None:
    made = fleet(PoolLimits("m", ("m-0",)))
    of_replica = {"model": "m", "replica": "m-0"}
    samples = scrape(Metrics(["m"]), made.pools(0))
    for name in ("kv_blocks_used", "kv_blocks_cached", "kv_blocks_max"):
        assert value(samples, f"sluice_{name}", **of_replica) == 0
    made.handle(ReplicaReady("m-0", ReplicaLimits(2048, 32, 100, 2)), 0)
    samples = scrape(Metrics(["m"]), made.pools(0))
    assert value(samples, "sluice_kv_blocks_used", **of_replica) == 0
    assert value(samples, "sluice_kv_blocks_max", **of_replica) == 100
    assert value(samples, "sluice_kv_usage_ratio", model="m") == 0


# --------------------------------------------------------------------------------- definitions


def test_d23_ttft_starts_at_arrival_and_holds_the_queue() -> None:
    """Ten requests at once on one slot: 0.2 s of prefill and 1.8 s of decode each."""
    made, metrics = fleet(PoolLimits("m", ("m-0",))), Metrics(["m"])
    made.handle(ReplicaReady("m-0", ReplicaLimits(2048, 32, 100, 1)), 0)
    effects = []
    for i in range(10):
        effects += made.handle(Arrived("m", Request(f"r{i}", 0, (1, 2), 9)), 0)
    now_ns = 0
    for _ in range(10):
        (dispatch,) = [effect for effect in effects if isinstance(effect, Dispatch)]
        queue_ns, prefill_ns, decode_ns = now_ns, NS_PER_S // 5, NS_PER_S * 9 // 5
        metrics.stream("m", "").first_token((now_ns + prefill_ns) / NS_PER_S)
        now_ns += prefill_ns + decode_ns
        phases = PhaseTimes(queue_ns=queue_ns, prefill_ns=prefill_ns, decode_ns=decode_ns)
        usage = Usage(2, 0, 9)
        metrics.ended("m", Finish(EndReason.STOP, usage, phases, 0.2, 1))
        effects = made.handle(Ended(dispatch.request_id, EndReason.STOP, usage, phases), now_ns)
    samples = scrape(metrics)

    def mean(name: str) -> float:
        total = value(samples, f"sluice_{name}_seconds_sum", model="m", slo_class="default")
        return total / value(
            samples, f"sluice_{name}_seconds_count", model="m", slo_class="default"
        )

    assert mean("ttft") == pytest.approx(9.2)
    assert mean("queue") == pytest.approx(9.0)
    assert mean("prefill") == pytest.approx(0.2)
    assert mean("e2e") == pytest.approx(11.0)


def test_tokens_that_were_streamed_are_not_counted_again_at_the_end() -> None:
    metrics = Metrics(["m"])
    metrics.stream("m", "").first_token(0.1, 1)
    metrics.stream("m", "").chunk(0.01, 3)
    assert value(scrape(metrics), "sluice_generated_tokens_total", model="m") == 4
    metrics.ended("m", Finish(EndReason.LENGTH, Usage(20, 16, 6), PhaseTimes(), 0.01, 4))
    samples = scrape(metrics)
    assert value(samples, "sluice_generated_tokens_total", model="m") == 6
    assert value(samples, "sluice_prompt_tokens_total", model="m") == 20
    assert value(samples, "sluice_cached_tokens_total", model="m") == 16
    assert value(samples, "sluice_requests_ended_total", model="m", reason="length") == 1
    assert value(samples, "sluice_requests_ended_total", model="m", reason="stop") == 0


def test_a_request_cancelled_in_the_queue_has_no_prefill_or_decode_time() -> None:
    metrics = Metrics(["m"])
    metrics.ended(
        "m", Finish(EndReason.CANCELLED, Usage(5, 0, 0), PhaseTimes(queue_ns=NS_PER_S), None, 0)
    )
    samples = scrape(metrics)
    assert value(samples, "sluice_queue_seconds_count", model="m", slo_class="default") == 1
    for name in ("prefill", "decode", "tpot", "ttft"):
        assert value(samples, f"sluice_{name}_seconds_count", model="m", slo_class="default") == 0
    assert value(samples, "sluice_phase_seconds_total", model="m", phase="queue") == 1


def test_dropped_journal_records_losses_and_the_version_are_shown() -> None:
    dropped = [0]
    metrics = Metrics(["m"], journal_dropped=lambda: dropped[0])
    dropped[0] = 7
    metrics.replica_lost("m-0", "m")
    samples = scrape(metrics)
    assert value(samples, "sluice_journal_dropped_total") == 7
    assert value(samples, "sluice_replica_losses_total", model="m", replica="m-0") == 1
    assert value(samples, "sluice_build_info", version=sluice.__version__) == 1


def test_every_code_of_a_refusal_has_its_own_label_value() -> None:
    reasons = {"queue_full", "queue_deadline", "not_ready", "draining", "too_many_prompts"}
    codes = {
        kind.code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.RequestError)
    }
    assert reasons | codes <= REFUSAL_REASONS


def test_times_are_kept_by_class_and_each_target_is_a_bound() -> None:
    targets = {"sluice_ttft_seconds": [0.42, 0.5], "sluice_tpot_seconds": [0.033]}
    bounds = bounds_with_targets({"sluice_tpot_seconds": (1.0,)}, targets)
    metrics = Metrics(["m"], slo_classes=["gold"], buckets=bounds)
    metrics.know_targets([ClassTargets("gold", {"ttft": 0.42}, 0.95)])
    metrics.stream("m", "gold").first_token(0.41)
    metrics.stream("m", "made up").first_token(0.43)
    samples = scrape(metrics)
    gold = {"model": "m", "slo_class": "gold"}
    assert value(samples, "sluice_ttft_seconds_bucket", le="0.42", **gold) == 1
    assert value(samples, "sluice_ttft_seconds_count", **gold) == 1
    assert value(samples, "sluice_ttft_seconds_count", model="m", slo_class="other") == 1
    assert value(samples, "sluice_tpot_seconds_bucket", le="1.0", **gold) == 0
    assert ("le", "0.033") not in {
        pair for key in samples["sluice_tpot_seconds_bucket"] for pair in key
    }
    assert value(samples, "sluice_slo_target_seconds", slo_class="gold", target="ttft") == 0.42
    assert value(samples, "sluice_slo_objective_ratio", slo_class="gold") == 0.95


# ------------------------------------------------------------------------------- vLLM's names


def test_aliases_show_the_same_values_under_vllms_names() -> None:
    made = fleet(PoolLimits("m", ("m-0",)))
    made.handle(ReplicaReady("m-0", ReplicaLimits(2048, 32, 100, 1)), 0)
    made.handle(ReplicaReported("m-0", replace(REPORT, blocks_free=25)), 0)
    for name in ("a", "b", "c"):
        made.handle(Arrived("m", Request(name, 0, (1,), 9)), 0)
    metrics = Metrics(["m"], vllm_aliases=True)
    metrics.know_classes(["gold"])
    metrics.stream("m", "").first_token(0.7)
    metrics.stream("m", "gold").first_token(0.7)
    metrics.stream("m", "").chunk(0.01)
    metrics.ended("m", Finish(EndReason.CANCELLED, Usage(5, 2, 2), PhaseTimes(), None, 2))
    metrics.refused("m", "queue_full")
    samples = scrape(metrics, made.pools(0))
    labels = {"model_name": "m", "engine": "0"}
    for name, expected in {
        "vllm:time_to_first_token_seconds_sum": 1.4,
        "vllm:inter_token_latency_seconds_count": 1,
        "vllm:time_per_output_token_seconds_count": 1,
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:prompt_tokens_total": 5,
        "vllm:prompt_tokens_cached_total": 2,
        "vllm:generation_tokens_total": 3,
    }.items():
        assert value(samples, name, **labels) == pytest.approx(expected), name
    success = "vllm:request_success_total"
    assert value(samples, success, **labels, finished_reason="abort") == 1
    rejections = "vllm:admission_rejections_total"
    assert value(samples, rejections, **labels, reason="queue_full") == 1


def test_aliases_are_off_unless_asked_for_and_all_have_a_source() -> None:
    assert not [name for name in scrape(Metrics(["m"])) if name.startswith("vllm")]
    assert {alias.source for alias in VLLM_ALIASES} <= {metric.name for metric in METRICS}


def test_names_follow_prometheus_rules() -> None:
    for metric in METRICS:
        assert metric.name.startswith("sluice_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith("_seconds") or metric.kind != "histogram"
    assert len({metric.name for metric in METRICS}) == len(METRICS)


# ----------------------------------------------------------------------------------- overload


def test_what_is_known_of_the_queue_is_exposed() -> None:
    pool = replace(
        fleet(PoolLimits("m", ("m-0",))).pools(0)[0],
        waiting_tokens=900, waiting_bytes=4000, wait_ns=1_500_000_000, margin=1.25,
        longest_wait_ns=((0, 250_000_000), (9, 4_000_000_000)), bookings=3, returning=0.5,
    )  # fmt: skip
    samples = scrape(Metrics(["m"]), (pool,))
    assert value(samples, "sluice_waiting_tokens", model="m") == 900
    assert value(samples, "sluice_waiting_bytes", model="m") == 4000
    assert value(samples, "sluice_wait_newcomer_seconds", model="m") == 1.5
    assert value(samples, "sluice_wait_margin_ratio", model="m") == 1.25
    assert value(samples, "sluice_bookings", model="m") == 3
    assert value(samples, "sluice_bookings_kept_ratio", model="m") == 0.5
    waits = {"0": 0.25, "1": 0.0, "5": 0.0, "9": 4.0}
    for tier, seconds in waits.items():
        assert value(samples, "sluice_tier_wait_seconds", model="m", tier=tier) == seconds


def test_d22_classes_that_are_not_configured_share_one_label_value() -> None:
    metrics = Metrics(["m"], slo_classes=["gold"])
    for name in ("gold", "", "made-up", "made-up-2"):
        metrics.outcome("m", name, Outcome.MET)
    samples = scrape(metrics)
    met = {"model": "m", "outcome": "met"}
    assert value(samples, "sluice_class_requests_total", slo_class="gold", **met) == 1
    assert value(samples, "sluice_class_requests_total", slo_class="default", **met) == 1
    assert value(samples, "sluice_class_requests_total", slo_class="other", **met) == 2


def test_every_rung_and_class_is_there_from_the_start() -> None:
    samples = scrape(Metrics(["m"], slo_classes=["gold"]))
    for rung in ("shorten", "smaller"):
        assert value(samples, "sluice_degradations_total", model="m", rung=rung) == 0
    for outcome in Outcome:
        labels = {"model": "m", "slo_class": "gold", "outcome": outcome}
        assert value(samples, "sluice_class_requests_total", **labels) == 0
