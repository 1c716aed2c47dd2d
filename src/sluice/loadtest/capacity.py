"""Capacity: the ladder of closed-loop trials that finds about where it is, and the bracket of
open-loop rates that are shown to be stable and shown not to be.

Pure functions of samples, called by ``search.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt

from sluice.loadtest.sample import Count, Sample, Trend, trend_of
from sluice.loadtest.series import Slope

# A doubling of the clients that brings less than this brings nothing.
GAIN_LEAST = 0.03
CONCURRENCY_MAX = 4096
# Throughput follows the clients where more of them bring this part of what they would alone.
FOLLOWS = 0.6
# By Little's law a closed loop holds its clients: throughput x latency.
LITTLE_TOLERANCE = 0.03
# Drifts of trials whose rates are this near are taken together.
TOGETHER = 0.05


@dataclass(frozen=True, slots=True)
class Throughput:
    """The most answers per second of any closed loop, with its 90 % interval, and the clients that
    it took."""

    estimate_rps: float
    low_rps: float
    high_rps: float
    concurrency: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """Rates between which capacity is: the highest shown stable, the lowest shown not to be.

    ``metastable``: after overload the server did not come back at a rate that it had sustained.
    """

    low_rps: float | None = None
    high_rps: float | None = None
    metastable: bool = False


def rungs(samples: Sequence[Sample]) -> list[Sample]:
    """The closed-loop trials that had answers, in order of concurrency; the longest of each."""
    found: dict[int, Sample] = {}
    for one in samples:
        if one.concurrency is not None and one.valid and one.completed_rps > 0.0:
            before = found.get(one.concurrency)
            if before is None or one.took_s > before.took_s:
                found[one.concurrency] = one
    return sorted(found.values(), key=concurrency)


def concurrency(sample: Sample) -> int:
    """The clients of a closed loop."""
    return sample.concurrency or 0


def next_rung(samples: Sequence[Sample]) -> int | None:
    """The concurrency to try next: four times as many while throughput follows, else twice, until
    that brings nothing more, twice in a row or by the upper bound of the gain."""
    ladder = rungs(samples)
    if not ladder:
        return 1
    last = ladder[-1]
    if concurrency(last) >= CONCURRENCY_MAX:
        return None
    gains = [_gain(before, after) for before, after in pairwise(ladder)]
    if gains and gains[-1][1] < GAIN_LEAST:
        return None
    if len(gains) >= 2 and max(gains[-1][0], gains[-2][0]) < GAIN_LEAST:
        return None
    return (4 if follows(ladder) else 2) * concurrency(last)


def follows(ladder: Sequence[Sample]) -> bool:
    """Whether throughput still grows nearly with the clients."""
    if len(ladder) < 2:
        return True
    before, last = ladder[-2:]
    clients = concurrency(last) / concurrency(before)
    return last.completed_rps / before.completed_rps - 1.0 > FOLLOWS * (clients - 1.0)


def _gain(before: Sample, after: Sample) -> tuple[float, float]:
    """What more clients bring, as a part, and its 95 % upper bound."""
    gain = after.completed_rps / before.completed_rps - 1.0
    error = sqrt(
        (after.completed_error_rps / before.completed_rps) ** 2
        + (before.completed_error_rps * after.completed_rps / before.completed_rps**2) ** 2
    )
    return gain, gain + 1.645 * error


def throughput(samples: Sequence[Sample]) -> Throughput | None:
    """What the ladder found; rungs within one standard error of the best are averaged with it, so
    that the luckiest of several equal ones is not taken for the truth."""
    ladder = rungs(samples)
    if not ladder:
        return None
    best = max(ladder, key=lambda one: one.completed_rps)
    alike = [
        one
        for one in ladder
        if best.completed_rps - one.completed_rps
        <= sqrt(_square(best.completed_error_rps) + _square(one.completed_error_rps))
        and 2 * concurrency(one) >= concurrency(best)
    ]
    weights = [1.0 / max(_square(one.completed_error_rps), 1e-12) for one in alike]
    mean = sum(w * one.completed_rps for w, one in zip(weights, alike, strict=True)) / sum(weights)
    half = 1.645 * min(sqrt(1.0 / sum(weights)), mean)
    return Throughput(mean, mean - half, mean + half, concurrency(best), best.latency_s)


def _square(error: float) -> float:
    return 1e12 if error == inf else error * error


def little_holds(sample: Sample) -> bool:
    """Whether a closed loop kept its clients busy."""
    clients = concurrency(sample)
    expected = sample.completed_rps * sample.latency_s
    return clients == 0 or abs(clients - expected) / clients <= LITTLE_TOLERANCE


def capacity_of(
    samples: Sequence[Sample], *, revisited: Sample | None = None, tolerance: float
) -> Capacity:
    """The bracket by all open-loop trials.

    More load never makes a backlog grow less, so that trials at a rate and a little above it
    together say that it is stable, and those at it and a little below that it is not; one that
    seems not to be is taken for chance where a trial above it, no shorter, was calm. Where
    ``revisited``, a stable rate after overload, has become unstable and stays so, no rate from
    there on counts as stable.
    """
    trials = [one for one in samples if one.rate_rps > 0.0 and one.valid]
    metastable = revisited is not None and _stays_unstable(trials, revisited, tolerance)
    below = inf if not metastable or revisited is None else revisited.rate_rps
    rates = sorted({one.rate_rps for one in trials})
    stable = [rate for rate in rates if rate < below and _shown_stable(trials, rate, tolerance)]
    low = max(stable, default=None)
    unstable = [
        rate
        for rate in rates
        if (low is None or rate > low) and _shown_unstable(trials, rate, tolerance)
    ]
    high = min([*unstable, below])
    return Capacity(low, None if high == inf else high, metastable)


def _stays_unstable(trials: Sequence[Sample], revisited: Sample, tolerance: float) -> bool:
    """Whether it was, and no trial after it says otherwise: those before came before overload."""
    after = next((at for at, one in enumerate(trials) if one is revisited), len(trials))
    return revisited.trend is Trend.UNSTABLE and not _calm_above(
        trials[after + 1 :], [revisited], tolerance
    )


def _shown_unstable(trials: Sequence[Sample], rate: float, tolerance: float) -> bool:
    near = [one for one in trials if rate / (1.0 + TOGETHER) <= one.rate_rps <= rate]
    stopped = any(one.stopped for one in near if one.rate_rps == rate)
    if not stopped and _trend_of(near, tolerance) is not Trend.UNSTABLE:
        return False
    return not _calm_above(trials, near, tolerance)


def _calm_above(trials: Sequence[Sample], shown: Sequence[Sample], tolerance: float) -> bool:
    """Whether the backlog did not grow at a higher rate, over a time no shorter than it was seen to
    grow in. Broken off trials are short, for what they show does not take long."""
    rate = max(one.rate_rps for one in shown)
    grew = [one for one in shown if one.trend is Trend.UNSTABLE] or shown
    longest_s = max(one.counted_s for one in grew)
    return any(
        one.rate_rps > rate
        and one.counted_s >= longest_s
        and not one.stopped
        and _trend_of([one], tolerance) is not Trend.UNSTABLE
        for one in trials
    )


def _shown_stable(trials: Sequence[Sample], rate: float, tolerance: float) -> bool:
    near = [one for one in trials if rate <= one.rate_rps <= rate * (1.0 + TOGETHER)]
    if any(one.trend is Trend.UNSTABLE for one in near if one.rate_rps == rate):
        return False
    calm = [one for one in near if one.trend is not Trend.UNSTABLE]
    return _trend_of(calm, tolerance) is Trend.STABLE


def _trend_of(trials: Sequence[Sample], tolerance: float) -> Trend:
    """What trials at about one rate show together."""
    failed = Count(sum(one.requests for one in trials), sum(one.failed for one in trials))
    return trend_of(_together(trials), tolerance, failed)


def _together(trials: Sequence[Sample]) -> Slope:
    """The drift of several trials, each by what it can tell."""
    weight = total = 0.0
    for drift in (one.drift for one in trials):
        if 0.0 < drift.error < inf:
            weight += drift.error**-2
            total += drift.estimate * drift.error**-2
    return Slope(total / weight, weight**-0.5) if weight > 0.0 else Slope(0.0, inf)
