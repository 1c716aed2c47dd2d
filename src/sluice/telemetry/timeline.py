"""The last minutes of the metrics, a few seconds at a time, as the dashboard and ``top`` draw them.

``Timeline`` takes the difference of the metrics between two looks at them: nothing is counted a
second time while requests run, and a percentile here is the one that Prometheus would compute for
the same interval. It keeps a bounded number of samples for each model and for all together.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sluice.core.fleet_replica import ReplicaView
from sluice.core.lifecycle import ReplicaState
from sluice.core.pool_view import PoolView
from sluice.telemetry.metric_table import Outcome
from sluice.telemetry.metrics import Metrics

# Every model together.
ALL = ""
SAMPLES_MAX = 450
INTERVAL_S = 2.0
QUANTILES = (0.5, 0.95, 0.99)

_TIMES = ("ttft", "tpot", "itl")
_Percentiles = tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Stages:
    """Requests of a model by what they do: wait in the fleet, are given to a replica and have no
    token yet, or get tokens."""

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened in the ``interval_s`` before ``t_s`` (Unix time), and how things stand then.

    Counts are of the interval. ``classes`` have met, missed and refused requests by class.
    ``ttft``, ``tpot`` and ``itl`` hold the percentiles of ``QUANTILES`` in seconds, ``None`` where
    nothing was measured. ``phases`` are seconds that requests which ended spent in each.
    ``replicas`` counts them by state, and ``wanted`` are to serve where that follows the load.
    """

    t_s: float
    interval_s: float
    arrived: int = 0
    met: int = 0
    missed: int = 0
    refused: int = 0
    left: int = 0
    classes: dict[str, tuple[int, int, int]] = {}
    ttft: _Percentiles = None
    tpot: _Percentiles = None
    itl: _Percentiles = None
    phases: dict[str, float] = {}
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    refusals: dict[str, int] = {}
    degradations: dict[str, int] = {}
    decoding: int = 0
    prefilling: int = 0
    waiting_inside: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_max: int = 0
    wait_newcomer_s: float = 0.0
    replicas: dict[str, int] = {}
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """The metrics at the latest look: counters, and the buckets of histograms."""

    at_ns: int
    counts: Mapping[str, Mapping[tuple[str, ...], float]]
    buckets: Mapping[str, Mapping[tuple[str, ...], tuple[int, ...]]]


_COUNTERS = (
    "sluice_requests_total",
    "sluice_class_requests_total",
    "sluice_phase_seconds_total",
    "sluice_prompt_tokens_total",
    "sluice_cached_tokens_total",
    "sluice_generated_tokens_total",
    "sluice_preemptions_total",
    "sluice_refusals_total",
    "sluice_degradations_total",
)


class Timeline:
    """Samples of ``metrics``, the first one against ``now_ns``. For one thread."""

    def __init__(self, metrics: Metrics, now_ns: int) -> None:
        self._metrics = metrics
        self._seen = self._look(now_ns)
        self._samples: dict[str, deque[Sample]] = {}

    def sample(
        self,
        now_ns: int,
        wall_s: float,
        pools: Sequence[PoolView],
        stages: Mapping[str, Stages],
    ) -> None:
        """Take the difference since the last look."""
        before, self._seen = self._seen, self._look(now_ns)
        change = _Change(before, self._seen)
        for model in (ALL, *(pool.model for pool in pools)):
            of_model = [pool for pool in pools if model in {ALL, pool.model}]
            running = [stages.get(pool.model, Stages()) for pool in of_model]
            taken = _sample(change, model, wall_s, of_model, running, self._metrics)
            self._samples.setdefault(model, deque(maxlen=SAMPLES_MAX)).append(taken)

    def since(self, model: str, since_s: float) -> list[Sample]:
        """Samples of a model, or of ``ALL``, taken after a time, oldest first."""
        return [one for one in self._samples.get(model, ()) if one.t_s > since_s]

    def _look(self, now_ns: int) -> _Seen:
        metrics = self._metrics
        return _Seen(
            now_ns,
            {name: dict(metrics.counts(name)) for name in _COUNTERS},
            {
                name: {
                    key: tuple(one.counts)
                    for key, one in metrics.times(f"sluice_{name}_seconds").items()
                }
                for name in _TIMES
            },
        )


class _Change:
    """The difference between two looks."""

    def __init__(self, before: _Seen, after: _Seen) -> None:
        self._before, self._after = before, after
        self.interval_s = max(1e-9, (after.at_ns - before.at_ns) / 1e9)

    def counts(self, name: str, model: str) -> dict[tuple[str, ...], float]:
        """What a counter gained, by its labels after the model; only what is above zero."""
        before, found = self._before.counts[name], dict[tuple[str, ...], float]()
        for (of, *rest), value in self._after.counts[name].items():
            gained = value - before.get((of, *rest), 0.0)
            if gained > 0 and model in {ALL, of}:
                found[tuple(rest)] = found.get(tuple(rest), 0.0) + gained
        return found

    def total(self, name: str, model: str) -> int:
        """What a counter gained."""
        return round(sum(self.counts(name, model).values()))

    def percentiles(self, name: str, model: str, bounds: Sequence[float]) -> _Percentiles:
        """Percentiles of what a histogram gained, classes together."""
        before, gained = self._before.buckets[name], [0] * (len(bounds) + 1)
        for key, counts in self._after.buckets[name].items():
            if model in {ALL, key[0]}:
                known = before.get(key, (0,) * len(counts))
                gained = [g + c - k for g, c, k in zip(gained, counts, known, strict=True)]
        if not any(gained):
            return None
        return tuple(round(quantile(bounds, gained, q), 6) for q in QUANTILES)


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float:
    """A quantile of a histogram with these counts per bucket, linear within the bucket.

    What lies above the last bound counts as that bound, as Prometheus has it.
    """
    rank, below = q * sum(counts), 0
    for number, count in enumerate(counts):
        if count and below + count >= rank:
            if number == len(bounds):
                return bounds[-1]
            lower = bounds[number - 1] if number else 0.0
            return lower + (bounds[number] - lower) * (rank - below) / count
        below += count
    return bounds[-1]


def _sample(
    change: _Change,
    model: str,
    wall_s: float,
    pools: Sequence[PoolView],
    stages: Sequence[Stages],
    metrics: Metrics,
) -> Sample:
    outcomes = change.counts("sluice_class_requests_total", model)
    by_outcome = {
        outcome: round(sum(n for key, n in outcomes.items() if key[1] == outcome))
        for outcome in Outcome
    }
    prefilling = sum(one.prefilling for one in stages)
    reports = [one.report for pool in pools for one in pool.replicas if one.report is not None]
    inside = min(prefilling, sum(one.waiting for one in reports if one.gauged))
    percentiles = {
        name: change.percentiles(name, model, metrics.bounds(f"sluice_{name}_seconds"))
        for name in _TIMES
    }
    phases = change.counts("sluice_phase_seconds_total", model)
    return Sample(
        round(wall_s, 3),
        round(change.interval_s, 3),
        arrived=change.total("sluice_requests_total", model),
        met=by_outcome[Outcome.MET],
        missed=by_outcome[Outcome.MISSED],
        refused=by_outcome[Outcome.REFUSED],
        left=by_outcome[Outcome.LEFT],
        classes=_by_class(outcomes),
        phases={key[0]: round(seconds, 4) for key, seconds in phases.items()},
        prompt_tokens=change.total("sluice_prompt_tokens_total", model),
        cached_tokens=change.total("sluice_cached_tokens_total", model),
        generated_tokens=change.total("sluice_generated_tokens_total", model),
        preemptions=change.total("sluice_preemptions_total", model),
        refusals=_by_first(change.counts("sluice_refusals_total", model)),
        degradations=_by_first(change.counts("sluice_degradations_total", model)),
        decoding=sum(one.decoding for one in stages),
        prefilling=prefilling - inside,
        waiting_inside=inside,
        waiting=sum(pool.waiting for pool in pools),
        kv_used=sum(one.blocks_total - one.blocks_free for one in reports),
        kv_max=sum(one.blocks_total for one in reports),
        wait_newcomer_s=max((round(pool.wait_ns / 1e9, 3) for pool in pools), default=0.0),
        replicas=dict(Counter(shown_state(one) for pool in pools for one in pool.replicas)),
        wanted=sum(pool.scaling.number for pool in pools if pool.scaling is not None),
        **percentiles,
    )


def shown_state(replica: ReplicaView) -> str:
    """The state of a replica; one that is told to get nothing more drains, though it is ready."""
    is_told = replica.draining and replica.state is ReplicaState.READY
    return (ReplicaState.DRAINING if is_told else replica.state).value


def _by_class(outcomes: Mapping[tuple[str, ...], float]) -> dict[str, tuple[int, int, int]]:
    """Met, missed and refused by class."""
    shown = (Outcome.MET, Outcome.MISSED, Outcome.REFUSED)
    return {
        name: (
            round(outcomes.get((name, shown[0]), 0)),
            round(outcomes.get((name, shown[1]), 0)),
            round(outcomes.get((name, shown[2]), 0)),
        )
        for name in sorted({key[0] for key in outcomes})
    }


def _by_first(counts: Mapping[tuple[str, ...], float]) -> dict[str, int]:
    return {key[0]: round(count) for key, count in sorted(counts.items())}
