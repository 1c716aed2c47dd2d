"""What a search keeps of a trial: rates, shares by batch, drift. Requests are read here once.

A sample is small and can be written down, so that a search goes on from those of an earlier run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt

import numpy as np

from sluice.loadtest.series import (
    CRITICAL_95,
    CRITICAL_99,
    Series,
    Slope,
    level,
    mean_with_error,
    memory_steps,
    settled_from,
    slope_of,
)
from sluice.loadtest.trial import (
    ClosedLoop,
    Ending,
    Objective,
    OpenLoop,
    RequestOutcome,
    TrialOutcome,
    Void,
)

# Points of a trial at which what is under way is looked at.
POINTS = 400
# A batch is at least so many times as long as the server remembers its load.
MEMORIES_PER_BATCH = 10.0
BATCHES_MIN, BATCHES_MAX = 5, 20
# Backlog that grows by less than this part of the offered rate is not seen in any trial.
DRIFT_TOLERANCE = 0.01
# A backlog that neither grows nor shrinks, at capacity, wanders: after n Poisson arrivals and as
# many irregular ends by sqrt(2 n) requests, and the slope fitted to such a walk scatters by
# sqrt(6/5) of that over the length. One-sided 99 % of it, as a part of the rate, times sqrt(n).
WANDERS = 2.3263 * sqrt(2.0 * 6.0 / 5.0)


class Trend(StrEnum):
    """What a trial says of whether the server keeps up."""

    STABLE = "stable"
    UNSTABLE = "unstable"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Count:
    """Requests of a batch for which an objective is defined, and those that missed it."""

    requests: int
    missed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A trial. ``rate_rps`` is the rate of its plan, 0 in a closed loop of ``concurrency`` clients.

    ``completed_rps`` and ``latency_s`` are of whole answers behind the transient, the former with
    its standard error; ``in_flight`` is the mean there. ``memory_s`` is how long the server
    remembers its load: requests further apart are nearly independent. ``counts`` has for each
    objective its batches in order of time. ``drift`` is the growth of the backlog as a part of the
    offered rate.
    """

    rate_rps: float
    concurrency: int | None
    counted_s: float
    took_s: float
    void: Void | None
    stopped: bool
    requests: int
    failed: int
    completed_rps: float
    completed_error_rps: float
    latency_s: float
    in_flight: float
    memory_s: float
    counts: Mapping[str, tuple[Count, ...]]
    drift: Slope

    @property
    def valid(self) -> bool:
        """Whether it says something about the server."""
        return self.void is None

    @property
    def trend(self) -> Trend:
        """Whether the server is shown to keep up, or shown not to."""
        if self.stopped:
            return Trend.UNSTABLE
        return trend_of(self.drift, DRIFT_TOLERANCE, Count(self.requests, self.failed))

    @property
    def backs_up(self) -> bool:
        """Whether the backlog is shown to grow."""
        answered = Count(self.requests, 0)
        return self.stopped or trend_of(self.drift, DRIFT_TOLERANCE, answered) is Trend.UNSTABLE

    def count(self, objective: str) -> Count:
        """All batches together."""
        batches = self.counts.get(objective, ())
        return Count(sum(one.requests for one in batches), sum(one.missed for one in batches))


def trend_of(drift: Slope, tolerance: float, failed: Count) -> Trend:
    """Whether a server keeps up, by the growth of its backlog and by the requests that it refused
    or failed: one that turns away what is too much has no backlog. A search looks at many trials,
    most of them stable: that one is not takes 99 %, by its error and beyond what a backlog wanders
    that does not grow; that it is takes 95 %."""
    requests = max(1, failed.requests)
    lost = failed.missed / requests
    surely_lost = lost - CRITICAL_99 * sqrt(lost * (1.0 - lost) / requests)
    wanders = WANDERS / sqrt(requests)
    grows = drift.estimate > max(tolerance, CRITICAL_99 * drift.error, wanders)
    if grows or surely_lost > tolerance:
        return Trend.UNSTABLE
    high = drift.estimate + CRITICAL_95 * drift.error
    return Trend.STABLE if max(high, lost) <= tolerance else Trend.UNDECIDED


def sample_of(outcome: TrialOutcome, objectives: Mapping[str, Objective]) -> Sample:
    """What a trial says to a search."""
    plan, span, counted = outcome.plan, outcome.plan.span, outcome.counted
    rate_rps = plan.load.rate_rps if isinstance(plan.load, OpenLoop) else 0.0
    to_s = span.from_s + outcome.counted_s
    flow = _flow(outcome.requests, span.from_s, to_s)
    return Sample(
        rate_rps=rate_rps,
        concurrency=plan.load.concurrency if isinstance(plan.load, ClosedLoop) else None,
        counted_s=span.counted_s,
        took_s=outcome.took_s,
        void=outcome.void,
        stopped=rate_rps > 0.0 and outcome.stopped_s is not None,
        requests=len(counted),
        failed=sum(not one.done for one in counted),
        completed_rps=flow.completed_rps,
        completed_error_rps=flow.completed_error_rps,
        latency_s=flow.latency_s,
        in_flight=flow.in_flight,
        memory_s=flow.memory_s,
        counts={
            name: _counts(counted, objective, (span.from_s, to_s), flow.memory_s)
            for name, objective in objectives.items()
        },
        drift=_drift(outcome.requests, span.from_s, to_s, rate_rps),
    )


@dataclass(frozen=True, slots=True)
class _Flow:
    """See ``Sample``."""

    completed_rps: float = 0.0
    completed_error_rps: float = inf
    latency_s: float = 0.0
    in_flight: float = 0.0
    memory_s: float = 0.0


def _flow(requests: Sequence[RequestOutcome], from_s: float, to_s: float) -> _Flow:
    if to_s <= from_s or not requests:
        return _Flow()
    times, step_s = _times(from_s, to_s)
    starts, ends = _lives(requests)
    under_way = level(starts, ends, times)
    settled = settled_from(under_way)
    steady = under_way[settled:]
    memory_s = memory_steps(steady) * step_s
    from_s += settled * step_s
    done = [(one.end_s, one.e2e_s) for one in requests if one.done and from_s <= one.end_s < to_s]
    batches = _batches(to_s - from_s, memory_s)
    each_s = (to_s - from_s) / batches
    counts, _ = np.histogram([end for end, _ in done], bins=batches, range=(from_s, to_s))
    _, error = mean_with_error((counts / each_s).tolist())
    return _Flow(
        completed_rps=len(done) / (to_s - from_s),
        completed_error_rps=error,
        latency_s=sum(e2e for _, e2e in done) / len(done) if done else 0.0,
        in_flight=float(steady.mean()),
        memory_s=memory_s,
    )


def _times(from_s: float, to_s: float) -> tuple[Series, float]:
    step_s = (to_s - from_s) / POINTS
    return np.linspace(from_s + 0.5 * step_s, to_s - 0.5 * step_s, POINTS), step_s


def _lives(requests: Sequence[RequestOutcome]) -> tuple[Series, Series]:
    """When each began and ended; one that was left behind is under way to the end."""
    starts = np.array([one.at_s for one in requests])
    ends = np.array([inf if one.ending is Ending.LEFT else one.end_s for one in requests])
    return starts, ends


def _batches(length_s: float, memory_s: float) -> int:
    """How many batches a trial has, of at least ten times the memory where that leaves enough."""
    fit = int(length_s / (MEMORIES_PER_BATCH * memory_s)) if memory_s > 0.0 else BATCHES_MAX
    return min(BATCHES_MAX, max(BATCHES_MIN, fit))


def _counts(
    counted: Sequence[RequestOutcome],
    objective: Objective,
    reach_s: tuple[float, float],
    memory_s: float,
) -> tuple[Count, ...]:
    from_s, to_s = reach_s
    if to_s <= from_s:
        return ()
    batches = _batches(to_s - from_s, memory_s)
    requests, missed = [0] * batches, [0] * batches
    for one in counted:
        found = objective.missed(one)
        if found is not None:
            batch = min(batches - 1, int((one.at_s - from_s) / (to_s - from_s) * batches))
            requests[batch] += 1
            missed[batch] += found
    return tuple(Count(*pair) for pair in zip(requests, missed, strict=True))


def _drift(
    requests: Sequence[RequestOutcome], from_s: float, to_s: float, rate_rps: float
) -> Slope:
    """The growth of requests under way, or of the tokens in them, as a part of the offered rate:
    of the two, the one that is less sure."""
    if to_s <= from_s or not requests or rate_rps <= 0.0:
        return Slope(0.0, inf)
    times, step_s = _times(from_s, to_s)
    starts, ends = _lives(requests)
    tokens = np.array([(one.prompt_tokens or 0) + (one.output_tokens or 0) for one in requests])
    known = tokens > 0
    work = np.where(known, tokens / tokens[known].mean(), 1.0) if known.any() else None
    slopes = [slope_of(level(starts, ends, times, weights), step_s) for weights in (None, work)]
    least = max(slopes, key=lambda slope: slope.error)
    return Slope(least.estimate / rate_rps, least.error / rate_rps)
