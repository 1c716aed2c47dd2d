"""A classifier's worth on outcomes, beside what costs nothing: random order, length, neighbours.

Either by cross-validation (five fits, each judged on rows of questions that it did not see), or of
a model that exists. Called by ``cli/route.py`` and the benchmark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.baselines import embedded, length_scores, neighbour_scores
from sluice.complexity.classifier import Classifier
from sluice.complexity.folds import Grouping, folds_of, grouped, seen_in
from sluice.complexity.matrix import Told
from sluice.complexity.measures import (
    Calibration,
    Estimate,
    Quality,
    calibration_of,
    lead_of,
    quality_of,
    recovered,
)
from sluice.complexity.outcomes import BadOutcomes, Outcome, Review, reviewed
from sluice.complexity.training import Examples, HeldOut, calibrated, examples, out_of_fold

Numbers = NDArray[np.float64]
CURVE_POINTS = 41


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found. ``curves`` are shares of the gap recovered, at equal steps of the strong
    share; ``seen`` counts rows that the judged model was trained on."""

    review: Review
    grouping: Grouping
    questions: int
    weak: float
    strong: float
    quality: Quality
    baselines: Mapping[str, Quality]
    lead: Estimate
    calibration: Calibration
    curves: Mapping[str, Sequence[float]]
    seen: int


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """Rows that may be fitted again, what fits without a fold say, and what that is worth."""

    rows: Examples
    held_out: HeldOut
    evaluation: Evaluation


def cross_validated(
    outcomes: Sequence[Outcome], further: Sequence[Outcome], told: Told
) -> CrossValidation:
    """Judge what training on ``outcomes`` and ``further`` gives, on ``outcomes``.

    Rows of ``further`` about a question are never trained on when that question is judged. Raises
    ``BadOutcomes``.
    """
    together = [*outcomes, *further]
    grouping = grouped(together)
    rows = examples(together, folds_of(together, grouping), told)
    held_out = out_of_fold(rows, told)
    scores = held_out.scores
    probabilities = calibrated(scores, rows.rescues, rows.folds)
    asked = slice(0, len(outcomes))
    own = Grouping(grouping.groups[asked], grouping.by_question, grouping.by_passage)
    places = _Places(own, rows.folds[asked], seen=0)
    orders = (scores[asked], probabilities[asked])
    return CrossValidation(rows, held_out, _evaluated(outcomes, places, orders, told))


def judged(outcomes: Sequence[Outcome], classifier: Classifier, told: Told) -> Evaluation:
    """Judge a trained classifier. Raises ``BadOutcomes``."""
    grouping = grouped(outcomes)
    probabilities = scored([one.prompt for one in outcomes], classifier, told)
    seen = int(seen_in(outcomes, classifier.trained_on).sum())
    places = _Places(grouping, folds_of(outcomes, grouping), seen)
    return _evaluated(outcomes, places, (probabilities, probabilities), told)


def scored(prompts: Sequence[str], classifier: Classifier, told: Told) -> Numbers:
    """The probability of each prompt."""
    found = np.empty(len(prompts))
    for number, prompt in enumerate(prompts):
        found[number] = classifier.score(prompt)
        told("scoring", number + 1, len(prompts))
    return found


@dataclass(frozen=True, slots=True)
class _Places:
    """The group and the fold of each judged row, and how many a model was trained on."""

    grouping: Grouping
    folds: NDArray[np.intp]
    seen: int


def _evaluated(
    outcomes: Sequence[Outcome],
    places: _Places,
    orders: tuple[Numbers, Numbers],
    told: Told,
) -> Evaluation:
    """``orders`` are the scores and the probabilities of the rows."""
    scores, probabilities = orders
    gains = np.array([one.gain for one in outcomes])
    if gains.sum() <= 0.0:
        raise BadOutcomes("the strong model is not better than the weak one on these rows")
    groups = places.grouping.groups.tolist()
    prompts = [one.prompt for one in outcomes]
    others = {
        "random": np.zeros(len(scores)),
        "length": length_scores(prompts),
        "knn": neighbour_scores(embedded(prompts, told), gains, places.folds),
    }
    return Evaluation(
        review=reviewed(outcomes),
        grouping=places.grouping,
        questions=len(set(groups)),
        weak=float(np.mean([one.weak for one in outcomes])),
        strong=float(np.mean([one.strong for one in outcomes])),
        quality=quality_of(scores, gains, groups),
        baselines={name: quality_of(other, gains, groups) for name, other in others.items()},
        lead=lead_of(scores, others["length"], gains, groups),
        calibration=calibration_of(probabilities, np.array([one.rescue for one in outcomes])),
        curves={
            name: _curve(each, gains) for name, each in {"classifier": scores, **others}.items()
        },
        seen=places.seen,
    )


def _curve(scores: Numbers, gains: Numbers) -> list[float]:
    shares = np.linspace(0.0, 1.0, CURVE_POINTS)
    points: list[float] = np.interp(shares, *recovered(scores, gains)).tolist()
    return points
