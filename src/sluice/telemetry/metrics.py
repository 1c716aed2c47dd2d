"""Counts and times of serving, kept in the gateway process and exposed to Prometheus.

The gateway tells what happens; ``exposition`` renders it together with the fleet's view at that
moment. What exists is listed in ``metric_table``. Values are kept in plain numbers, because one
call is made per token and a labelled observation of the client library costs several times as much.
For one thread: a scrape sees whole updates because it runs on that thread too.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import msgspec
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

import sluice
from sluice.core.admission import REASONS
from sluice.core.breaker import BreakerState
from sluice.core.events import Report
from sluice.core.fleet_replica import ReplicaView
from sluice.core.lifecycle import ReplicaState
from sluice.core.model_routes import RouteView
from sluice.core.pool_view import PoolView
from sluice.core.request import TIER_MAX, EndReason, Phase, PhaseTimes, Rung, Usage
from sluice.telemetry.metric_table import (
    NO_CLASS,
    VLLM_ALIASES,
    Metric,
    Outcome,
    Stage,
    with_buckets,
)

# Label value of everything that is not in a closed set, such as a model that is not served.
OTHER = "other"

REFUSAL_REASONS = frozenset({
    *REASONS, "too_many_prompts", "invalid_request", "invalid_api_key",
    "permission_denied", "model_not_found", "not_found", "method_not_allowed", "body_too_large",
    "body_too_slow", "headers_too_large", "engine_error", "replica_lost", "model_not_loaded",
    "internal_error", "retrieval_failed",
})  # fmt: skip

_NS = 1e-9
_DEGRADING = (Rung.SHORTEN, Rung.SMALLER, Rung.FALLBACK)


class StreamSeries:
    """The series of the streams of one model and class: one call for each chunk goes here.

    ``histogram`` finds those of this model and class by name. ``counts`` are the tokens by model,
    of which this one's have the key ``key``. They are added there by ``settle``, before anybody
    reads them: a look-up for each chunk costs as much as all else that is done for it.
    """

    __slots__ = (
        "_bounds", "_counts", "_itl", "_key", "_tokens", "_ttft",
        "decode", "e2e", "prefill", "queue", "tpot",
    )  # fmt: skip

    def __init__(
        self, histogram: Callable[[str], "Buckets"], counts: "Values", key: tuple[str, ...]
    ) -> None:
        self._counts, self._key = counts, key
        self._ttft = histogram("sluice_ttft_seconds")
        self._itl = itl = histogram("sluice_itl_seconds")
        self.e2e, self.queue = histogram("sluice_e2e_seconds"), histogram("sluice_queue_seconds")
        self.tpot = histogram("sluice_tpot_seconds")
        self.prefill = histogram("sluice_prefill_seconds")
        self.decode = histogram("sluice_decode_seconds")
        self._bounds = itl.bounds
        self._tokens = 0

    def first_token(self, ttft_s: float, tokens: int = 1) -> None:
        """The first chunk was sent, ``ttft_s`` after the request arrived, before tokenising."""
        self._ttft.observe(ttft_s)
        self._tokens += tokens

    def chunk(self, itl_s: float, tokens: int = 1) -> None:
        """A further chunk was sent, ``itl_s`` after the one before."""
        itl = self._itl  # as ``observe`` does, without another call for each token
        itl.counts[bisect_left(self._bounds, itl_s)] += 1
        itl.sum += itl_s
        self._tokens += tokens

    def settle(self) -> None:
        """Add the tokens of these chunks to those of the model."""
        self._counts[self._key] += self._tokens
        self._tokens = 0


class Buckets:
    """A histogram of one series. ``counts`` are per bucket, the last above every bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the bucket whose upper bound is the first that is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def plus(self, other: "Buckets") -> "Buckets":
        """Both as one, with the same bounds."""
        both = Buckets(self.bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.sum = self.sum + other.sum
        return both

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds as text with the number of values up to them, ``+Inf`` last."""
        total = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else repr(bound), total))
        return pairs


@dataclass(slots=True)
class _Seen:
    """The counters of a replica's latest report, which start at zero with each incarnation."""

    incarnation: int
    report: Report


class Finish(msgspec.Struct, frozen=True, gc=False):
    """How an accepted request ended, for its metrics.

    ``tokens_counted`` were told to its ``StreamSeries``; ``tpot_s`` is ``None`` for an
    answer of one chunk.
    """

    reason: EndReason
    usage: Usage
    phases: PhaseTimes
    tpot_s: float | None = None
    tokens_counted: int = 0


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """What a class promises: targets in seconds by ``ttft``, ``tpot`` and ``e2e``, and for which
    share of its requests, 0 to 1."""

    slo_class: str
    seconds: Mapping[str, float]
    objective: float


Values = dict[tuple[str, ...], float]
Histograms = dict[tuple[str, ...], Buckets]


class Metrics:
    """All metrics of one gateway.

    ``slo_classes`` are the names of the configured classes. ``buckets`` replaces bucket bounds by
    metric name and raises ``ConfigError`` where they cannot be used. ``journal_dropped`` is read at
    each scrape.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        slo_classes: Sequence[str] = (),
        buckets: Mapping[str, tuple[float, ...]] | None = None,
        vllm_aliases: bool = False,
        journal_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self._table = {metric.name: metric for metric in with_buckets(buckets or {})}
        self._vllm_aliases = vllm_aliases
        self._journal_dropped = journal_dropped
        self.count_spans: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._models = frozenset(models)
        self._targets: Sequence[ClassTargets] = ()
        self._streams: dict[tuple[str, str], StreamSeries] = {}
        self._times: dict[str, Histograms] = {}
        self._counts: dict[str, Values] = {}
        for metric in self._table.values():
            if metric.kind == "histogram":
                self._times[metric.name] = {}
            elif metric.kind == "counter":
                self._counts[metric.name] = {}
        self._classes: tuple[str, ...] = ()
        self._class_labels: dict[str, str] = {"": NO_CLASS}
        self.know_classes((NO_CLASS, *slo_classes))
        self._seen: dict[str, _Seen] = {}
        self._pools: Sequence[PoolView] = ()
        self._routes: Sequence[RouteView] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    # -------------------------------------------------------------------------------- what happens

    def arrived(self, model: str) -> None:
        """A request arrived. A model that is not served counts under ``other``."""
        self._add("sluice_requests_total", (self._known(model),), 1)

    def refused(self, model: str | None, reason: str) -> None:
        """A request was refused, by admission or before it (``None``: it named no known model).

        Models and reasons that are not known count under ``other``.
        """
        label = reason if reason in REFUSAL_REASONS else OTHER
        self._add("sluice_refusals_total", (self._known(model), label), 1)

    def degraded(self, model: str, rung: Rung) -> None:
        """A rung of the ladder of a request for this model was taken."""
        self._add("sluice_degradations_total", (model, rung), 1)

    def routed(self, route: str, way: str, why: str) -> None:
        """A request for a route goes to one of its models."""
        self._add("sluice_routed_total", (route, way, why), 1)

    def outcome_told(self, route: str) -> None:
        """A client told what became of a prompt."""
        self._add("sluice_route_outcomes_total", (route,), 1)

    def retrieved(self, pipeline: str, outcome: str, seconds: float, passages: int) -> None:
        """A pipeline retrieved for a request; ``outcome`` is of a closed set."""
        self._histogram("sluice_retrieval_seconds", (pipeline,)).observe(seconds)
        self._add("sluice_retrievals_total", (pipeline, outcome), 1)
        self._add("sluice_retrieval_passages_total", (pipeline,), passages)

    def know_classes(self, slo_classes: Sequence[str]) -> None:
        """Further names of classes. Those that are gone keep their counts."""
        self._classes = tuple(dict.fromkeys((*self._classes, *slo_classes)))
        self._class_labels |= {name: name for name in self._classes}
        for metric in self._table.values():
            for key in _known_keys(metric, sorted(self._models), self._classes):
                if metric.kind == "histogram":
                    self._histogram(metric.name, key)
                elif metric.kind == "counter":
                    self._counts[metric.name].setdefault(key, 0.0)

    def know_targets(self, targets: Sequence[ClassTargets]) -> None:
        """The classes and what they promise from now on."""
        self._targets = targets
        self.know_classes([one.slo_class for one in targets])

    def outcome(self, model: str, slo_class: str, outcome: Outcome) -> None:
        """What became of a request of a class, empty for none."""
        name = self._class_labels.get(slo_class, OTHER)
        self._add("sluice_class_requests_total", (model, name, outcome), 1)

    def _histogram(self, name: str, key: tuple[str, ...]) -> Buckets:
        series = self._times[name]
        found = series.get(key)
        if found is None:
            found = series[key] = Buckets(self._table[name].buckets)
        return found

    def waited(self, model: str, predicted_ns: int, actual_ns: int) -> None:
        """A request that had to wait in the fleet came to a replica."""
        self._times["sluice_wait_predicted_seconds"][model,].observe(predicted_ns * _NS)
        self._times["sluice_wait_actual_seconds"][model,].observe(actual_ns * _NS)

    def stream(self, model: str, slo_class: str) -> "StreamSeries":
        """What the chunks of a request are counted in. Look it up once for each request."""
        key = (model, self._class_labels.get(slo_class, OTHER))
        found = self._streams.get(key)
        if found is None:
            tokens = self._counts["sluice_generated_tokens_total"]
            histogram = partial(self._histogram, key=key)
            found = self._streams[key] = StreamSeries(histogram, tokens, (model,))
        return found

    def ended(self, model: str, finish: Finish, *, slo_class: str = "") -> None:
        """An accepted request ended."""
        key, counts, usage, phases = (model,), self._counts, finish.usage, finish.phases
        series = self.stream(model, slo_class)
        counts["sluice_requests_ended_total"][model, finish.reason] += 1
        counts["sluice_prompt_tokens_total"][key] += usage.prompt_tokens
        counts["sluice_cached_tokens_total"][key] += usage.cached_tokens
        uncounted = usage.completion_tokens - finish.tokens_counted
        if uncounted > 0:
            counts["sluice_generated_tokens_total"][key] += uncounted
        phase_seconds = counts["sluice_phase_seconds_total"]
        whole_ns = 0
        for phase, spent_ns in _spent_ns(phases):
            if spent_ns:
                whole_ns += spent_ns
                phase_seconds[model, phase] += spent_ns * _NS
        series.e2e.observe(whole_ns * _NS)
        series.queue.observe(phases.queue_ns * _NS)
        if finish.tpot_s is not None:
            series.tpot.observe(finish.tpot_s)
        # A request that never got so far has no time there, which is not the same as a short one.
        if phases.prefill_ns:
            series.prefill.observe(phases.prefill_ns * _NS)
        if phases.decode_ns:
            series.decode.observe(phases.decode_ns * _NS)

    def replica_report(self, replica_id: str, model: str, report: Report, incarnation: int) -> None:
        """A replica reported. Its counters add up over incarnations, so that no total falls."""
        seen = self._seen.get(replica_id)
        before = seen.report if seen is not None and seen.incarnation == incarnation else None
        for name in ("preemptions", "prefix_query_tokens", "prefix_hit_tokens"):
            value = getattr(report, name)
            known = 0 if before is None else getattr(before, name)
            # A count that fell is that of a process which is not known yet to be another one.
            grown = value - known if value >= known else value
            self._add(f"sluice_{name}_total", (model,), grown)
        if report.step_ns > 0:
            self._times["sluice_step_seconds"][model,].observe(report.step_ns * _NS)
        self._seen[replica_id] = _Seen(incarnation, report)

    def replica_lost(self, replica_id: str, model: str) -> None:
        """A replica was lost."""
        self._add("sluice_replica_losses_total", (model, replica_id), 1)

    def started(self, model: str, stage: Stage, duration_ns: int) -> None:
        """A stage of a replica's start is over."""
        if stage is Stage.WAKE:
            self._times["sluice_wake_seconds"][model,].observe(duration_ns * _NS)
        else:
            key = (model, stage)
            self._histogram("sluice_cold_start_seconds", key).observe(duration_ns * _NS)

    def scaled(self, model: str, change: int, reason: str) -> None:
        """The number of replicas that are to serve changed."""
        direction = "up" if change > 0 else "down"
        self._add("sluice_scaling_decisions_total", (model, direction, reason), 1)

    def engine_told(self, model: str, ttft_ns: int | None, *, estimated: bool) -> None:
        """What a remote engine told of its own, and whether it left the usage to be estimated."""
        if estimated:
            self._add("sluice_usage_estimated_total", (model,), 1)
        if ttft_ns is not None:
            self._times["sluice_engine_ttft_seconds"][model,].observe(ttft_ns * _NS)

    def attempt_failed(self, replica_id: str, model: str, outcome: str) -> None:
        """A remote replica gave no whole answer to a request."""
        self._add("sluice_attempts_failed_total", (model, replica_id, outcome), 1)

    def _known(self, model: str | None) -> str:
        return model if model is not None and model in self._models else OTHER

    def _add(self, name: str, key: tuple[str, ...], amount: float) -> None:
        series = self._counts[name]
        series[key] = series.get(key, 0.0) + amount

    # ------------------------------------------------------------------------------------ reading

    def counts(self, name: str) -> Mapping[tuple[str, ...], float]:
        """The values of a counter by its labels."""
        self._settle()
        return self._counts[name]

    def _settle(self) -> None:
        for stream in self._streams.values():
            stream.settle()

    def times(self, name: str) -> Mapping[tuple[str, ...], Buckets]:
        """The histograms of a metric by their labels."""
        return self._times[name]

    @property
    def targets(self) -> Sequence[ClassTargets]:
        """The classes and what they promise."""
        return self._targets

    def bounds(self, name: str) -> tuple[float, ...]:
        """The bucket bounds of a histogram."""
        return self._table[name].buckets

    # ----------------------------------------------------------------------------------- exposing

    def exposition(
        self, pools: Sequence[PoolView], routes: Sequence[RouteView] = ()
    ) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its content type."""
        self._pools, self._routes = pools, routes
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Family]:
        """Give every family of the table; called by the registry."""
        self._settle()
        values = {**self._counts, **self._gauges()}
        values["sluice_journal_dropped_total"] = {(): self._journal_dropped()}
        exported, dropped = self.count_spans()
        values["sluice_spans_exported_total"] = {(): exported}
        values["sluice_spans_dropped_total"] = {(): dropped}
        for metric in self._table.values():
            yield _family(metric, self._times.get(metric.name, {}), values.get(metric.name, {}))
        if self._vllm_aliases:
            for alias in VLLM_ALIASES:
                renamed = alias.renamed(self._table[alias.source])
                times = {alias.key(k): v for k, v in _by_model(self._times, alias.source).items()}
                plain = {alias.key(k): v for k, v in values.get(alias.source, {}).items()}
                yield _family(renamed, times, plain)

    def _gauges(self) -> dict[str, Values]:
        found: dict[str, Values] = {
            "sluice_build_info": {(sluice.__version__,): 1},
            "sluice_slo_target_seconds": {
                (one.slo_class, target): seconds
                for one in self._targets
                for target, seconds in one.seconds.items()
            },
            "sluice_slo_objective_ratio": {
                (one.slo_class,): one.objective for one in self._targets
            },
        }
        for pool in self._pools:
            for name, value in _pool_gauges(pool).items():
                found.setdefault(f"sluice_{name}", {})[pool.model,] = value
            waits = found.setdefault("sluice_tier_wait_seconds", {})
            waits |= {(pool.model, str(tier)): 0.0 for tier in range(TIER_MAX + 1)}
            waits |= {(pool.model, str(tier)): ns * _NS for tier, ns in pool.longest_wait_ns}
            for replica in pool.replicas:
                states = found.setdefault("sluice_replica_state", {})
                for state in ReplicaState:
                    states[pool.model, replica.id, state] = float(state is replica.state)
                for name, value in _replica_gauges(replica, pool).items():
                    found.setdefault(f"sluice_{name}", {})[pool.model, replica.id] = value
        for route in self._routes:
            for name, value in _route_gauges(route).items():
                found.setdefault(f"sluice_route_{name}", {})[route.route,] = value
        return found


def _known_keys(
    metric: Metric, models: Sequence[str], classes: Sequence[str]
) -> list[tuple[str, ...]]:
    """Label values that a counter or histogram has from the start at 0, so that its first increase
    is seen."""
    match metric.labels:
        case ("model",):
            return [(model,) for model in models]
        case ("model", "phase"):
            return [(model, phase) for model in models for phase in Phase]
        case ("model", "rung"):
            return [(model, rung) for model in models for rung in _DEGRADING]
        case ("model", "slo_class"):
            return list(product(models, classes))
        case ("model", "stage"):
            stages = [stage for stage in Stage if stage is not Stage.WAKE]
            return list(product(models, stages))
        case ("model", "slo_class", "outcome"):
            return list(product(models, classes, Outcome))
        case ("model", "reason") if metric.name == "sluice_requests_ended_total":
            return [(model, reason) for model in models for reason in EndReason]
        case _:
            return []


def _by_model(times: Mapping[str, Histograms], name: str) -> Histograms:
    """The histograms of a metric with those of all classes of a model as one."""
    merged: Histograms = {}
    for (model, *_), buckets in times.get(name, {}).items():
        merged[model,] = merged[model,].plus(buckets) if (model,) in merged else buckets
    return merged


def _family(metric: Metric, times: Histograms, values: Values) -> Family:
    """Values under the name and labels of a metric, as the client library wants them."""
    if metric.kind == "histogram":
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for key, buckets in times.items():
            family.add_metric(key, buckets.cumulative(), buckets.sum)
        return family
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    plain: CounterMetricFamily | GaugeMetricFamily = make(
        metric.name, metric.meaning, labels=metric.labels
    )
    for key, value in values.items():
        plain.add_metric(key, value)
    return plain


def _spent_ns(phases: PhaseTimes) -> tuple[tuple[str, int], ...]:
    return (
        ("retrieval", phases.retrieval_ns),
        ("admission", phases.admission_ns),
        ("queue", phases.queue_ns),
        ("prefill", phases.prefill_ns),
        ("decode", phases.decode_ns),
        ("preempted", phases.preempted_ns),
    )


def _pool_gauges(pool: PoolView) -> dict[str, float]:
    reports = [(r, r.report) for r in pool.replicas if r.report is not None]
    waiting_inside = sum(min(report.waiting, replica.places) for replica, report in reports)
    on_board = sum(replica.places for replica in pool.replicas)
    blocks = sum(report.blocks_total for _, report in reports)
    used = sum(report.blocks_total - report.blocks_free for _, report in reports)
    scaling = pool.scaling
    scaled = (
        {}
        if scaling is None
        else {
            "replicas_wanted": scaling.number,
            "replicas_needed": scaling.needed,
            "replicas_loaded_wanted": scaling.loaded,
            "replicas_max": scaling.most,
            "start_expected_seconds": scaling.start_ns * _NS,
            "wake_expected_seconds": scaling.wake_ns * _NS,
        }
    )
    return scaled | {
        "requests_in_flight": pool.waiting + sum(replica.requests for replica in pool.replicas),
        "requests_running": on_board - waiting_inside,
        "requests_waiting": pool.waiting_places + waiting_inside,
        "queue_places": pool.places,
        "queue_places_max": pool.places_max,
        "waiting_tokens": pool.waiting_tokens,
        "waiting_bytes": pool.waiting_bytes,
        "wait_newcomer_seconds": pool.wait_ns * _NS,
        "wait_margin_ratio": pool.margin,
        "bookings": pool.bookings,
        "bookings_kept_ratio": pool.returning,
        "kv_usage_ratio": used / blocks if blocks else 0.0,
    }


def _route_gauges(route: RouteView) -> dict[str, float]:
    return {
        "threshold": route.threshold,
        "share_ratio": route.share,
        "share_meant_ratio": route.share_meant,
        "drifted": route.drifted,
    }


def _replica_gauges(replica: ReplicaView, pool: PoolView) -> dict[str, float]:
    return {
        "replica_seats": replica.seats,
        "replica_breaker_open": replica.breaker is BreakerState.OPEN,
        **_report_gauges(replica, pool),
    }


def _report_gauges(replica: ReplicaView, pool: PoolView) -> dict[str, float]:
    report = replica.report
    if report is None:
        # Every series exists from the first scrape on; a ready replica's pool is known already.
        serves = replica.state is ReplicaState.READY and pool.limits is not None
        return {
            "kv_blocks_used": 0,
            "kv_blocks_cached": 0,
            "kv_blocks_max": pool.limits.blocks_total if serves and pool.limits else 0,
            "replica_report_age_seconds": 0,
        }
    return {
        "kv_blocks_used": report.blocks_total - report.blocks_free,
        "kv_blocks_cached": report.blocks_cached,
        "kv_blocks_max": report.blocks_total,
        "replica_report_age_seconds": (replica.report_age_ns or 0) * _NS,
    }
