"""Two results of ``sluice bench`` beside each other: what became better or worse, and by how much
for sure.

Called by ``sluice bench compare`` with the documents of results. Trials of the same load are paired
part by part in time, which with one seed are the same arrivals; rates of searches by their
intervals. Nothing is read or printed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any

from sluice.loadtest.soaks import student

Json = Mapping[str, Any]
# The probability that anything at all is called worse where nothing has changed.
ERROR = 0.05
# Fewer pairs say nothing about how much pairs scatter.
PAIRS_MIN = 5
# What slices of trials hold, and whether more of it is better.
MEASURES = {"ttft_s_p50": False, "ttft_s_p99": False, "good_rps": True}
# Intervals of searches hold the truth in 90 %.
_HALF_90 = NormalDist().inv_cdf(0.95)


class Verdict(StrEnum):
    """What a change shows."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "not shown to differ"


@dataclass(frozen=True, slots=True)
class Change:
    """One measure of one load. ``change`` is a part of what it was (0.1: 10 % more), between
    ``low`` and ``high``; ``pairs`` is ``None`` for rates of searches.

    Where a search only says that a rate is ``at_least`` something, the change is ``None``, and so
    is the end of it that nobody knows.
    """

    load: str
    measure: str
    before: float
    after: float
    change: float | None
    low: float | None
    high: float | None
    pairs: int | None
    verdict: Verdict
    before_at_least: bool = False
    after_at_least: bool = False


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What is paired, not yet judged; the error is one of ``freedom`` degrees."""

    load: str
    measure: str
    before: float
    after: float
    error: float
    pairs: int | None


def changes(before: Json, after: Json) -> list[Change]:
    """All that both results measured. The intervals hold together: the more there are, the wider
    is each (Bonferroni)."""
    found = [*_rates(before, after), *_trials(before, after)]
    bounds = _bounds(before, after)
    error = ERROR / max(1, len(found) + (bounds is not None))
    judged = [_judged(one, error) for one in found]
    return judged if bounds is None else [_judged_bounds(*bounds, error), *judged]


def _judged(one: _Pairs, error: float) -> Change:
    if one.pairs is None:
        # In logarithms: a rate has an interval of factors.
        half = NormalDist().inv_cdf(1.0 - error) * one.error
        ratio = one.after / one.before
        ends = (ratio * exp(-half) - 1.0, ratio * exp(half) - 1.0)
    else:
        half = student(error, one.pairs - 1) * one.error
        change = (one.after - one.before) / one.before
        ends = (change - half, change + half)
    return Change(
        one.load, one.measure, one.before, one.after, one.after / one.before - 1.0, *ends,
        one.pairs, _verdict(ends, more_is_better=MEASURES.get(one.measure, True)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rate:
    """What a search says of a rate: about ``rate``, with the standard error of its logarithm, or at
    least that, where there is none."""

    rate: float
    error: float | None

    def end(self, deviations: float) -> float | None:
        """An end of its interval; ``None`` where nobody knows it."""
        if self.error is None:
            return self.rate if deviations < 0.0 else None
        return self.rate * exp(deviations * self.error)


def _bounds(before: Json, after: Json) -> tuple[_Rate, _Rate] | None:
    """The SLO rates, where one of them at least is known from below only."""
    found: list[_Rate] = []
    for result in (before, after):
        slo, known = result.get("slo_rps") or {}, _estimate(result, "SLO rate")
        if known is not None:
            found.append(_Rate(*known))
        elif slo.get("low") and slo.get("high") is None:
            found.append(_Rate(slo["low"], None))
    if len(found) < 2 or all(one.error is not None for one in found):
        return None
    return found[0], found[1]


def _judged_bounds(before: _Rate, after: _Rate, error: float) -> Change:
    half = NormalDist().inv_cdf(1.0 - error)
    (low_1, high_1), (low_2, high_2) = ((one.end(-half), one.end(half)) for one in (before, after))
    low = None if high_1 is None or low_2 is None else low_2 / high_1 - 1.0
    high = None if high_2 is None or low_1 is None else high_2 / low_1 - 1.0
    verdict = Verdict.BETTER if low is not None and low > 0.0 else Verdict.SAME
    verdict = Verdict.WORSE if high is not None and high < 0.0 else verdict
    return Change(
        "search", "SLO rate", before.rate, after.rate, None, low, high, None, verdict,
        before.error is None, after.error is None,
    )  # fmt: skip


def _verdict(ends: tuple[float, float], *, more_is_better: bool) -> Verdict:
    low, high = ends if more_is_better else (-ends[1], -ends[0])
    if high < 0.0:
        return Verdict.WORSE
    return Verdict.BETTER if low > 0.0 else Verdict.SAME


def _rates(before: Json, after: Json) -> Iterator[_Pairs]:
    """The SLO rate and the throughput of the closed loop, where both searches estimated them."""
    for measure in ("SLO rate", "closed loop"):
        one, two = (_estimate(result, measure) for result in (before, after))
        if one is not None and two is not None:
            error = sqrt(one[1] ** 2 + two[1] ** 2)
            yield _Pairs("search", measure, one[0], two[0], error, None)


def _estimate(result: Json, measure: str) -> tuple[float, float] | None:
    """A rate and the standard error of its logarithm."""
    found = result.get("slo_rps")
    if measure != "SLO rate":
        found = (result.get("capacity_rps") or {}).get("closed_loop")
    if not found or not all(found.get(name) for name in ("estimate", "low", "high")):
        return None
    return found["estimate"], log(found["high"] / found["low"]) / (2.0 * _HALF_90)


def _trials(before: Json, after: Json) -> Iterator[_Pairs]:
    earlier, later = (_by_load(result) for result in (before, after))
    for load in earlier:
        if load not in later:
            continue
        for measure in MEASURES:
            pairs = [
                (one[measure], two[measure])
                for one, two in zip(earlier[load]["slices"], later[load]["slices"], strict=False)
                if one[measure] is not None and two[measure] is not None
            ]
            mean = fmean(one for one, _ in pairs) if pairs else 0.0
            if len(pairs) >= PAIRS_MIN and mean > 0.0:
                apart = [(two - one) / mean for one, two in pairs]
                error = stdev(apart) / sqrt(len(apart))
                yield _Pairs(load, measure, mean, fmean(two for _, two in pairs), error, len(pairs))


def _by_load(result: Json) -> dict[str, Json]:
    """Valid trials of fixed loads by name. Those of a search have rates of their own."""
    if "capacity_rps" in result:
        return {}
    trials: Sequence[Json] = result.get("trials") or [result]
    return {
        f"{one['rate_rps']:g} requests/s" if one["mode"] == "open" else
        f"{one['concurrency']} clients": one
        for one in trials if one.get("valid")
    }  # fmt: skip
