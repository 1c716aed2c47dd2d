"""All metrics in one table, and their names in vLLM's words.

``metrics`` keeps and exposes what is listed here and nothing else. Label values come from closed
sets: configured models and replicas, endings, phases, states, reasons. Never from what a client
sends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Literal

from sluice.core.errors import ConfigError

# Time from milliseconds to minutes. Neighbouring bounds differ by little more than a factor of two,
# so that a percentile read from the buckets is at most that far off. Targets are set at bounds.
LATENCY_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0,
)  # fmt: skip
# Time per token and per step: finer where targets of streams are set, 5 to 100 ms.
TOKEN_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05,
    0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

BUCKETS_MAX = 200

Kind = Literal["counter", "gauge", "histogram"]

# The value of ``slo_class`` of requests that are served in no class.
NO_CLASS = "default"


class Outcome(StrEnum):
    """What became of a request against the targets of its class."""

    MET = "met"  # a whole answer within all targets: goodput
    MISSED = "missed"  # late, cut off by its deadline, or failed
    REFUSED = "refused"  # by admission, for want of capacity
    LEFT = "left"  # its client left


class Stage(StrEnum):
    """A part of the time from asking for a replica to its first token, or all of a wake."""

    PLACE = "place"  # until its process runs and begins to load
    LOAD = "load"
    COMPILE = "compile"  # with trying what was compiled
    FIRST_TOKEN = "first_token"  # of the first request that it is given
    WAKE = "wake"  # of one that was loaded and waited


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name as exposed (counters with ``_total``), labels and what it means."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Alias:
    """A second name for the values of ``source``, in vLLM's words for labels and label values.

    vLLM labels every series with the number of its engine; there is one here.
    """

    name: str
    source: str
    labels: tuple[str, ...] = ("model_name",)
    values: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, source: Metric) -> Metric:
        """The metric under its second name."""
        labels = (*self.labels, "engine")
        return Metric(self.name, source.kind, labels, f"{source.meaning} A name of vLLM.")

    def key(self, key: tuple[str, ...]) -> tuple[str, ...]:
        """Label values of a series under the second name."""
        model, *rest = key
        return (model, *(self.values.get(value, value) for value in rest), "0")


def _histogram(name: str, meaning: str, buckets: tuple[float, ...] = LATENCY_S) -> Metric:
    return Metric(name, "histogram", ("model",), meaning, buckets)


def _by_class(name: str, meaning: str, buckets: tuple[float, ...] = LATENCY_S) -> Metric:
    return Metric(name, "histogram", ("model", "slo_class"), meaning, buckets)


def _counter(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(name, "counter", labels, meaning)


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(name, "gauge", labels, meaning)


_MODEL = ("model",)
_CLASS = ("model", "slo_class", "outcome")
_TIER = ("model", "tier")
_REPLICA = ("model", "replica")
_ROUTE = ("route",)

METRICS: tuple[Metric, ...] = (
    _by_class("sluice_ttft_seconds", "Time from arrival to the first token sent."),
    _by_class(
        "sluice_tpot_seconds",
        "Mean time per output token of a request after its first chunk.",
        TOKEN_S,
    ),
    _by_class("sluice_itl_seconds", "Time between two chunks of a stream.", TOKEN_S),
    _by_class("sluice_e2e_seconds", "Time from arrival to the ending of a request."),
    _histogram(
        "sluice_engine_ttft_seconds",
        "Time to first token as remote engines tell it: without any wait here.",
    ),
    Metric(
        "sluice_retrieval_seconds",
        "histogram",
        ("pipeline",),
        "Time that pipelines took to retrieve for a request.",
        LATENCY_S,
    ),
    _by_class("sluice_queue_seconds", "Time a request waited before its prefill began."),
    _histogram(
        "sluice_wait_predicted_seconds",
        "Wait for a replica that was predicted for requests which had to wait.",
    ),
    _histogram("sluice_wait_actual_seconds", "Wait of the same requests as it turned out."),
    _by_class("sluice_prefill_seconds", "Time a request spent in prefill."),
    _by_class("sluice_decode_seconds", "Time a request spent in decode."),
    _histogram("sluice_step_seconds", "Wall time of a step, sampled by load reports.", TOKEN_S),
    _counter(
        "sluice_requests_total",
        _MODEL,
        "Requests that arrived for a model; one that is handed to a smaller model, for both.",
    ),
    _counter("sluice_requests_ended_total", ("model", "reason"), "Endings of accepted requests."),
    _counter("sluice_refusals_total", ("model", "reason"), "Requests refused, by reason."),
    _counter(
        "sluice_degradations_total",
        ("model", "rung"),
        "Requests degraded, by model asked for and rung; smaller once the other one starts it.",
    ),
    _counter(
        "sluice_retrievals_total",
        ("pipeline", "outcome"),
        "Requests that were retrieved for: whole, empty where nothing was found, or the last rung.",
    ),
    _counter("sluice_retrieval_passages_total", ("pipeline",), "Passages put into prompts."),
    _counter(
        "sluice_class_requests_total",
        _CLASS,
        "Requests by SLO class and what became of them; those that met their targets are goodput.",
    ),
    _counter(
        "sluice_phase_seconds_total",
        ("model", "phase"),
        "Time that ended requests spent in each phase.",
    ),
    _counter("sluice_prompt_tokens_total", _MODEL, "Prompt tokens of ended requests."),
    _counter(
        "sluice_usage_estimated_total",
        _MODEL,
        "Answers of remote engines that told no usage, so that their tokens are estimated.",
    ),
    _counter("sluice_cached_tokens_total", _MODEL, "Prompt tokens that came from the cache."),
    _counter("sluice_generated_tokens_total", _MODEL, "Tokens generated."),
    _counter("sluice_preemptions_total", _MODEL, "Sequences that lost their KV blocks."),
    _counter("sluice_prefix_query_tokens_total", _MODEL, "Tokens looked up in prefix caches."),
    _counter("sluice_prefix_hit_tokens_total", _MODEL, "Tokens found in prefix caches."),
    _counter(
        "sluice_attempts_failed_total",
        (*_REPLICA, "outcome"),
        "Requests that a remote replica gave no whole answer to, some of which went elsewhere.",
    ),
    Metric(
        "sluice_cold_start_seconds",
        "histogram",
        ("model", "stage"),
        "Time that a replica which was not loaded took for each stage of its start.",
        LATENCY_S,
    ),
    _histogram("sluice_wake_seconds", "Time that a warm replica took until it served."),
    _counter("sluice_replica_losses_total", _REPLICA, "Times a replica was lost."),
    _counter("sluice_spans_exported_total", (), "Spans that the collector took."),
    _counter(
        "sluice_spans_dropped_total",
        (),
        "Spans that found no room or that the collector did not take, and requests of which no "
        "span could be made.",
    ),
    _counter(
        "sluice_scaling_decisions_total",
        ("model", "direction", "reason"),
        "Times the number of replicas that are to serve changed, by the term that decided.",
    ),
    _counter("sluice_journal_dropped_total", (), "Journal records that could not be written."),
    _counter(
        "sluice_routed_total",
        ("route", "way", "reason"),
        "Requests for a route by the model that they went to, simple or complex, and why.",
    ),
    _counter("sluice_route_outcomes_total", _ROUTE, "Outcomes that clients told of a route."),
    _gauge("sluice_route_threshold", _ROUTE, "Score from which on a request is complex."),
    _gauge("sluice_route_share_ratio", _ROUTE, "Share of the latest scores at or above it."),
    _gauge("sluice_route_share_meant_ratio", _ROUTE, "Share that is meant to be."),
    _gauge("sluice_route_drifted", _ROUTE, "1 while the two are far apart."),
    _gauge("sluice_requests_in_flight", _MODEL, "Accepted requests that have not ended."),
    _gauge("sluice_requests_running", _MODEL, "Sequences that replicas compute."),
    _gauge("sluice_requests_waiting", _MODEL, "Sequences that wait, in the fleet or a replica."),
    _gauge("sluice_replicas_wanted", _MODEL, "Replicas that are to serve, by the load."),
    _gauge("sluice_replicas_needed", _MODEL, "The same without the bounds of the model."),
    _gauge("sluice_replicas_loaded_wanted", _MODEL, "The same with the warm ones."),
    _gauge("sluice_replicas_max", _MODEL, "Most replicas that may serve."),
    _gauge("sluice_start_expected_seconds", _MODEL, "Time to ready of a cold replica, as planned."),
    _gauge("sluice_wake_expected_seconds", _MODEL, "The same of a warm one."),
    _gauge("sluice_queue_places", _MODEL, "Places in use, running and waiting."),
    _gauge("sluice_queue_places_max", _MODEL, "Places beyond which requests are refused."),
    _gauge("sluice_waiting_tokens", _MODEL, "Prompt tokens of requests that wait in the fleet."),
    _gauge("sluice_waiting_bytes", _MODEL, "Bodies of requests that wait in the fleet."),
    _gauge("sluice_wait_newcomer_seconds", _MODEL, "Wait predicted for a request that comes now."),
    _gauge(
        "sluice_wait_margin_ratio",
        _MODEL,
        "Factor by which predicted waits are stretched, from how wrong they were of late.",
    ),
    _gauge("sluice_tier_wait_seconds", _TIER, "Longest wait so far of a request in each tier."),
    _gauge("sluice_bookings", _MODEL, "Refused clients that were told when to come back."),
    _gauge("sluice_bookings_kept_ratio", _MODEL, "Share of them that do come back as told."),
    _gauge("sluice_kv_usage_ratio", _MODEL, "Share of the KV blocks in use, 0 to 1."),
    _gauge("sluice_kv_blocks_used", _REPLICA, "KV blocks held by sequences."),
    _gauge("sluice_kv_blocks_cached", _REPLICA, "KV blocks in the prefix cache."),
    _gauge("sluice_kv_blocks_max", _REPLICA, "KV blocks of the pool."),
    _gauge("sluice_replica_state", (*_REPLICA, "state"), "1 for the state a replica is in."),
    _gauge("sluice_replica_seats", _REPLICA, "Sequences that a replica is given at a time."),
    _gauge("sluice_replica_breaker_open", _REPLICA, "1 while a remote replica gets nothing."),
    _gauge("sluice_replica_report_age_seconds", _REPLICA, "Age of the latest load report."),
    _gauge(
        "sluice_slo_target_seconds",
        ("slo_class", "target"),
        "Target of a class for `ttft`, `tpot` or `e2e`, where it has one.",
    ),
    _gauge(
        "sluice_slo_objective_ratio",
        ("slo_class",),
        "Share of the requests of a class that are to meet its targets.",
    ),
    _gauge("sluice_build_info", ("version",), "Always 1; the label says which version runs."),
)  # fmt: skip

# Names of vLLM 0.33, and older ones that dashboards still use.
VLLM_ALIASES: tuple[Alias, ...] = (
    Alias("vllm:time_to_first_token_seconds", "sluice_ttft_seconds"),
    Alias("vllm:inter_token_latency_seconds", "sluice_itl_seconds"),
    Alias("vllm:time_per_output_token_seconds", "sluice_itl_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "sluice_tpot_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "sluice_e2e_seconds"),
    Alias("vllm:request_queue_time_seconds", "sluice_queue_seconds"),
    Alias("vllm:request_prefill_time_seconds", "sluice_prefill_seconds"),
    Alias("vllm:request_decode_time_seconds", "sluice_decode_seconds"),
    Alias(
        "vllm:request_success_total",
        "sluice_requests_ended_total",
        ("model_name", "finished_reason"),
        {"cancelled": "abort", "failed": "error"},
    ),
    Alias("vllm:admission_rejections_total", "sluice_refusals_total", ("model_name", "reason")),
    Alias("vllm:prompt_tokens_total", "sluice_prompt_tokens_total"),
    Alias("vllm:prompt_tokens_cached_total", "sluice_cached_tokens_total"),
    Alias("vllm:generation_tokens_total", "sluice_generated_tokens_total"),
    Alias("vllm:num_preemptions_total", "sluice_preemptions_total"),
    Alias("vllm:prefix_cache_queries_total", "sluice_prefix_query_tokens_total"),
    Alias("vllm:prefix_cache_hits_total", "sluice_prefix_hit_tokens_total"),
    Alias("vllm:num_requests_running", "sluice_requests_running"),
    Alias("vllm:num_requests_waiting", "sluice_requests_waiting"),
    Alias("vllm:kv_cache_usage_perc", "sluice_kv_usage_ratio"),
    Alias("vllm:gpu_cache_usage_perc", "sluice_kv_usage_ratio"),
)


def bounds_with_targets(
    overrides: Mapping[str, tuple[float, ...]], targets: Mapping[str, Sequence[float]]
) -> dict[str, tuple[float, ...]]:
    """Bucket bounds that have one at each target, so that the share of requests inside is exact.

    ``targets`` are in seconds by metric name. What ``overrides`` says of a metric stays as it is.
    """
    usual = {metric.name: metric.buckets for metric in METRICS}
    added = {
        name: tuple(sorted({*usual[name], *seconds}))
        for name, seconds in targets.items()
        if name not in overrides
    }
    return {**overrides, **added}


def with_buckets(overrides: Mapping[str, tuple[float, ...]]) -> tuple[Metric, ...]:
    """The table with other bucket bounds for some histograms.

    Raises ``ConfigError`` with all that is wrong with ``overrides``.
    """
    problems = [problem for item in overrides.items() for problem in bucket_problems(*item)]
    if problems:
        raise ConfigError(tuple(problems))
    return tuple(
        replace(metric, buckets=tuple(map(float, overrides.get(metric.name, metric.buckets))))
        for metric in METRICS
    )


def bucket_problems(name: str, bounds: tuple[float, ...]) -> list[str]:
    """What is wrong with bucket bounds for a metric, in words; empty where nothing is."""
    histograms = [metric.name for metric in METRICS if metric.kind == "histogram"]
    where = f"metrics.buckets.{name}"
    if name not in histograms:
        return [f"{where}: there is no such histogram; there are {', '.join(histograms)}"]
    if not 1 <= len(bounds) <= BUCKETS_MAX:
        return [f"{where}: {len(bounds)} bounds; 1 to {BUCKETS_MAX} are accepted"]
    problems = [
        f"{where}: {bound} is not a positive, finite number"
        for bound in bounds
        if not (math.isfinite(bound) and bound > 0)
    ]
    problems += [
        f"{where}: {after} comes after {before}; bounds must ascend"
        for before, after in pairwise(bounds)
        if after <= before
    ]
    return problems
