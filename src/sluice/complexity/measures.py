"""How good an order of prompts is: what it recovers of the strong model's gain, and for how much.

APGR is that of RouteLLM (arXiv 2406.18665, section 3.1): send the highest 0 %, 10 %, … 100 % of
scores to the strong model; the area between the accuracy found and the weak model's, over the area
between the two models. Random order gives 0.5. CPT(q) is the smallest share of strong calls that
recovers q of the gap. Equal scores share what they gain, as the mean over all orders of them, so
that a constant score is exactly random. Intervals are bootstraps over questions.

Scores come from elsewhere; nothing is trained here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

DECILES = np.linspace(0.0, 1.0, 11)
DRAWS = 400
INTERVAL_PERCENT = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Quality:
    """What an order of prompts is worth; CPT in percent of calls."""

    apgr: Estimate
    cpt50: Estimate
    cpt80: Estimate


@dataclass(frozen=True, slots=True)
class Bin:
    """Prompts of similar probability: their mean probability and how many were rescued."""

    rows: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether probabilities are what they say: Brier score, mean distance of a bin's prediction
    from what was observed (expected calibration error), and the bins."""

    brier: float
    error: float
    bins: tuple[Bin, ...]


def recovered(scores: Numbers, gains: Numbers) -> tuple[Numbers, Numbers]:
    """Share of strong calls, rising from 0 to 1, and the share of the gap that it recovers.

    The models' gap is positive.
    """
    # Equal scores are one step, taken along a straight line.
    values, group = np.unique(-scores, return_inverse=True)
    rows = np.bincount(group, minlength=len(values)).cumsum()
    gained = np.bincount(group, weights=gains, minlength=len(values)).cumsum()
    share = np.concatenate(([0.0], rows / len(scores)))
    return share, np.concatenate(([0.0], gained / gained[-1]))


def apgr_of(scores: Numbers, gains: Numbers) -> float:
    """Average performance gap recovered, by trapezoids over deciles."""
    at = np.interp(DECILES, *recovered(scores, gains))
    return float((at[1:] + at[:-1]).mean() / 2)


def share_for(scores: Numbers, gains: Numbers, part: float) -> float:
    """CPT as a share: the fewest strong calls that recover ``part`` (0 to 1) of the gap."""
    share, gained = recovered(scores, gains)
    after = int(np.argmax(gained >= min(part, 1.0)))
    if after == 0:
        return 0.0
    low, high = gained[after - 1], gained[after]
    within = (part - low) / (high - low)
    return float(share[after - 1] + within * (share[after] - share[after - 1]))


def quality_of(scores: Numbers, gains: Numbers, questions: Sequence[int], seed: int = 1) -> Quality:
    """APGR and CPTs with their intervals. ``questions`` gives the question's number of each row."""

    def measured(rows: NDArray[np.intp]) -> tuple[float, float, float]:
        drawn, gained = scores[rows], gains[rows]
        half, most = (100 * share_for(drawn, gained, part) for part in (0.5, 0.8))
        return apgr_of(drawn, gained), half, most

    found = measured(np.arange(len(scores)))
    drawn = np.array(
        [measured(rows) for rows in resampled(questions, seed) if gains[rows].sum() > 0]
    )
    low, high = np.percentile(drawn, INTERVAL_PERCENT, axis=0)
    return Quality(*(Estimate(*map(float, each)) for each in zip(found, low, high, strict=True)))


def lead_of(
    ours: Numbers, theirs: Numbers, gains: Numbers, questions: Sequence[int], seed: int = 1
) -> Estimate:
    """By how much the APGR of one order is above that of another, on the same draws."""

    def difference(rows: NDArray[np.intp]) -> float:
        return apgr_of(ours[rows], gains[rows]) - apgr_of(theirs[rows], gains[rows])

    drawn = [difference(rows) for rows in resampled(questions, seed) if gains[rows].sum() > 0]
    low, high = np.percentile(drawn, INTERVAL_PERCENT)
    return Estimate(difference(np.arange(len(ours))), float(low), float(high))


def resampled(questions: Sequence[int], seed: int) -> list[NDArray[np.intp]]:
    """Rows of ``DRAWS`` bootstrap samples: questions are drawn, each with all of its rows."""
    numbers = np.asarray(questions, dtype=np.intp)
    order = np.argsort(numbers, kind="stable")
    _, starts, counts = np.unique(numbers[order], return_index=True, return_counts=True)
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(DRAWS):
        drawn = generator.integers(0, len(starts), len(starts))
        lengths = counts[drawn]
        within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        samples.append(order[np.repeat(starts[drawn], lengths) + within])
    return samples


def calibration_of(probabilities: Numbers, rescues: Numbers, bins: int = 10) -> Calibration:
    """Bins of equally many rows, in order of probability."""
    order = np.argsort(probabilities, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    found = tuple(
        Bin(len(part), float(probabilities[part].mean()), float(rescues[part].mean()))
        for part in parts
    )
    error = sum(one.rows * abs(one.predicted - one.observed) for one in found) / len(order)
    return Calibration(float(np.mean((probabilities - rescues) ** 2)), error, found)


def threshold_for(scores: Numbers, share: float) -> float:
    """The score at or above which ``share`` (0 to 1, not 0) of ``scores`` lies; a score equal to
    the threshold goes to the strong model."""
    return float(np.sort(scores)[len(scores) - max(round(share * len(scores)), 1)])


def share_at(scores: Numbers, threshold: float) -> float:
    """The share of scores that the threshold sends to the strong model."""
    return float(np.mean(scores >= threshold))
