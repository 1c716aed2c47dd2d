"""Fitting the classifier: ridge regression on what the strong model adds, then probabilities.

A question that both models miss is no reason to pay for the large one, and one that only the weak
one answers is a reason not to: so the target is the gain. It is fitted in two parts whose weights
are added: the mean gain of a row's task, where rows name tasks, and what the row's own outcome says
beyond that. Most of what can be learned is which kind of task a prompt is (docs/routing.md), and it
is learned better from means than from single outcomes. How much each part counts is found by least
squares on scores of rows that neither part saw; where a row is judged, that is done without its
fold too. Ridge regression is solved by conjugate
gradients; a logistic function of two numbers, fitted on scores of rows that the fit did not see
(Platt, "Probabilistic outputs for support vector machines", 1999), makes probabilities.
Deterministic: the same rows give the same file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.classifier import Card, Classifier, Linear, probability
from sluice.complexity.familiar import familiar_of
from sluice.complexity.features import FAMILIES
from sluice.complexity.folds import FOLDS, fingerprints
from sluice.complexity.matrix import Matrix, Told
from sluice.complexity.measures import threshold_for
from sluice.complexity.outcomes import BadOutcomes, Outcome

Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """How strongly weights of n-grams are held down, and how many steps are taken."""

    penalty: float
    steps: int


# Chosen by cross-validation on the sets of benchmarks/route.py. Means of tasks have little noise
# and bear a weak penalty; what single outcomes say beyond them is nearly all noise.
TASK = Fit(penalty=20.0, steps=40)
BEYOND_TASK = Fit(penalty=2000.0, steps=6)
WITHOUT_TASKS = Fit(penalty=150.0, steps=6)
SHAPE_PENALTY_PER_ROW = 3e-3
# A task with few rows has a mean that is mostly chance: this many rows of the mean of all.
TASK_ROWS_PRIOR = 10.0
PLATT_STEPS = 25
ROWS_MIN = 50


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows with their features. ``target`` is made from the rows that a fit may see."""

    outcomes: Sequence[Outcome]
    matrix: Matrix
    scaled: Floats
    folds: NDArray[np.intp]
    rescues: Numbers
    gains: Numbers
    tasks: NDArray[np.intp]


def examples(outcomes: Sequence[Outcome], folds: NDArray[np.intp], told: Told) -> Examples:
    """Rows ready to be fitted. Raises ``BadOutcomes`` where nothing can be learned from them."""
    rescues = np.array([one.rescue for one in outcomes])
    gains = np.array([one.gain for one in outcomes])
    _refuse_hopeless(rescues, gains, folds)
    matrix = Matrix([one.prompt for one in outcomes], told)
    names = [one.task for one in outcomes]
    tasks = np.unique(names, return_inverse=True)[1]
    return Examples(outcomes, matrix, _scaled(matrix), folds, rescues, gains, tasks)


def _refuse_hopeless(rescues: Numbers, gains: Numbers, folds: NDArray[np.intp]) -> None:
    if len(rescues) < ROWS_MIN:
        raise BadOutcomes(f"{len(rescues)} rows are too few: at least {ROWS_MIN}")
    if len(np.unique(folds)) < FOLDS:
        raise BadOutcomes("nearly all rows ask the same question: different ones are needed")
    if rescues.min() == rescues.max():
        every = "no row" if rescues.max() == 0.0 else "every row"
        raise BadOutcomes(
            f"only one class: in {every} the strong model is right where the weak one is wrong, "
            f"so there is nothing to tell apart"
        )
    if gains.sum() <= 0.0:
        raise BadOutcomes("the strong model is not better than the weak one on these rows")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The linear score of each row by a fit that saw no row of its fold, and how much each part
    counts in a fit to all rows."""

    scores: Numbers
    counts: Numbers


def out_of_fold(rows: Examples, told: Told) -> HeldOut:
    """Judge fits by rows that they did not see.

    The constants of the fits are left out: that of a fold is low where the mean of its own rows is
    high, which would put rows of different folds into a wrong order.
    """
    folds, gains = rows.folds, rows.gains
    parted = _are_parted(rows)
    pairs = [pair for pair in combinations(range(FOLDS), 2) if parted]
    without: dict[tuple[int, ...], Numbers] = {}
    for done, left_out in enumerate([*((fold,) for fold in range(FOLDS)), *pairs], 1):
        weights = _parts(rows, ~np.isin(folds, left_out))
        without[left_out] = np.array([_times(rows, part) for part in weights], dtype=np.float64)
        told("fitting", done, FOLDS + len(pairs))
    outside = _outside(folds, {fold: without[fold,] for fold in range(FOLDS)})
    scores = outside[0].copy()
    for fold in range(FOLDS) if parted else ():
        others = [other for other in range(FOLDS) if other != fold]
        inner = {other: without[min(fold, other), max(fold, other)] for other in others}
        used = folds != fold
        counts = _least_squares(_outside(folds, inner)[:, used], gains[used])
        scores[~used] = counts @ outside[:, ~used]
    return HeldOut(scores + gains.mean(), _least_squares(outside, gains))


def _outside(folds: NDArray[np.intp], by_fold: Mapping[int, Numbers]) -> Numbers:
    """Of scores by all fits, those of each row by the fit without its fold; 0 for other folds."""
    found = np.zeros_like(next(iter(by_fold.values())))
    for fold, scores in by_fold.items():
        inside = folds == fold
        found[:, inside] = scores[:, inside]
    return found


def _least_squares(parts: Numbers, gains: Numbers) -> Numbers:
    """How much each part counts, none less than nothing; 1 where there is one."""
    centred = parts - parts.mean(axis=1, keepdims=True)
    found = np.zeros(len(parts))
    active = np.arange(len(parts))
    while len(active) > 1:
        kept = centred[active]
        counts = np.linalg.solve(kept @ kept.T + 1e-9 * np.eye(len(active)), kept @ gains)
        if counts.min() >= 0.0:
            found[active] = counts
            return found
        active = active[counts >= 0.0]
    found[active if len(active) else 0] = 1.0
    return found


def calibrated(scores: Numbers, rescues: Numbers, folds: NDArray[np.intp]) -> Numbers:
    """Probabilities of out-of-fold scores, each by a fit to the other folds' scores."""
    found = np.zeros(len(scores))
    for fold in np.unique(folds).tolist():
        inside = folds == fold
        slope, offset = platt(scores[~inside], rescues[~inside])
        found[inside] = 1.0 / (1.0 + np.exp(-np.clip(slope * scores[inside] + offset, -500, 500)))
    return found


def trained(rows: Examples, held_out: HeldOut, card: Card) -> Classifier:
    """The classifier of all rows."""
    weights = fitted(rows, held_out.counts)
    slope, offset = platt(held_out.scores, rows.rescues)
    logits = (slope * held_out.scores + offset).tolist()
    probabilities = np.array([probability(logit) for logit in logits])
    thresholds = tuple(threshold_for(probabilities, percent / 100) for percent in range(1, 101))
    return Classifier(
        linear=_linear(rows, weights),
        slope=slope,
        offset=offset,
        card=replace(card, thresholds=thresholds),
        familiar=familiar_of([one.prompt for one in rows.outcomes], rows.folds),
        trained_on=fingerprints(rows.outcomes),
    )


def fitted(rows: Examples, counts: Numbers) -> Floats:
    """Weights of n-grams, then of shapes, then a constant, from all rows."""
    parts = _parts(rows, np.ones(len(rows.folds), dtype=bool))
    return np.append(counts.astype(np.float32) @ parts, np.float32(rows.gains.mean()))


def _parts(rows: Examples, used: NDArray[np.bool_]) -> Floats:
    """Weights of n-grams and of shapes, of each part of a fit to the rows that are ``used``."""
    mean = float(rows.gains[used].mean())
    means = _task_means(rows, used)
    targets: list[tuple[Numbers, Fit]]
    if _are_parted(rows):
        targets = [(means - mean, TASK), (rows.gains - means, BEYOND_TASK)]
    else:
        targets = [(rows.gains - mean, WITHOUT_TASKS)]
    return np.array([_ridge(rows, used, target, fit) for target, fit in targets])


def _ridge(rows: Examples, used: NDArray[np.bool_], target: Numbers, fit: Fit) -> Floats:
    """Weights for a target whose mean is zero, without a constant."""
    scaled, row_weights = rows.scaled, used.astype(np.float32)
    width = scaled.shape[1]
    penalties = np.full(len(rows.matrix.rarity) + width, fit.penalty, dtype=np.float32)
    penalties[-width:] = SHAPE_PENALTY_PER_ROW * row_weights.sum()
    # A step of steepest descent suits n-grams; shapes are dense and need one that is smaller.
    preconditioner = np.ones_like(penalties)
    preconditioner[-width:] = 1.0 / row_weights.sum()
    weights = np.zeros_like(penalties)
    residual = _transposed(rows, row_weights * target.astype(np.float32))
    direction = preconditioner * residual
    size = float(residual @ direction)
    for _ in range(fit.steps):
        if size <= 1e-12:
            break
        image = _transposed(rows, row_weights * _times(rows, direction)) + penalties * direction
        length = size / float(direction @ image)
        weights += length * direction
        residual -= length * image
        after = preconditioner * residual
        size, before = float(residual @ after), size
        direction = after + (size / before) * direction
    return weights


def platt(scores: Numbers, rescues: Numbers) -> tuple[float, float]:
    """Slope and offset of the logistic function of a score, by Newton's method. The slope is never
    negative: a score that misleads gives the same probability to all."""
    spread = float(scores.std()) or 1.0
    centre = float(scores.mean())
    both = np.column_stack(((scores - centre) / spread, np.ones(len(scores))))
    # Laplace's rule keeps the start finite; the small penalty keeps separable rows finite.
    share = (rescues.sum() + 1.0) / (len(rescues) + 2.0)
    found = np.array([0.0, np.log(share / (1.0 - share))])
    for _ in range(PLATT_STEPS):
        expected = 1.0 / (1.0 + np.exp(-np.clip(both @ found, -30.0, 30.0)))
        slopes = both.T @ (rescues - expected) - 1e-3 * found
        curvature = (both * (expected * (1.0 - expected))[:, None]).T @ both + 1e-3 * np.eye(2)
        found += np.clip(np.linalg.solve(curvature, slopes), -2.0, 2.0)
    if found[0] < 0.0:
        return 0.0, float(np.log(share / (1.0 - share)))
    slope = float(found[0]) / spread
    return slope, float(found[1]) - slope * centre


def _are_parted(rows: Examples) -> bool:
    """Whether the rows name tasks of different gains. One answer for all fits, of which each sees
    some of the rows only."""
    return bool(np.ptp(_task_means(rows, np.ones(len(rows.folds), dtype=bool))) > 0.0)


def _task_means(rows: Examples, used: NDArray[np.bool_]) -> Numbers:
    """The mean gain of each row's task, from the rows that are used; of few rows, nearer to the
    mean of all."""
    seen, tasks = rows.gains[used], rows.tasks[used]
    sums = np.bincount(tasks, weights=seen, minlength=rows.tasks.max() + 1)
    counts = np.bincount(tasks, minlength=len(sums))
    means = (sums + TASK_ROWS_PRIOR * seen.mean()) / (counts + TASK_ROWS_PRIOR)
    found: Numbers = means[rows.tasks]
    return found


def _scaled(matrix: Matrix) -> Floats:
    low, high = _bounds(matrix)
    held = np.clip(matrix.shapes, low, high)
    centre, spread = _spread(matrix)
    return ((held - centre) / spread).astype(np.float32)


def _bounds(matrix: Matrix) -> tuple[Floats, Floats]:
    low, high = np.percentile(matrix.shapes, (1.0, 99.0), axis=0).astype(np.float32)
    return low, high


def _spread(matrix: Matrix) -> tuple[Floats, Floats]:
    held = np.clip(matrix.shapes, *_bounds(matrix))
    return held.mean(axis=0), held.std(axis=0) + np.float32(1e-6)


def _times(rows: Examples, weights: Floats) -> Floats:
    width = rows.scaled.shape[1]
    return rows.matrix.times(weights[:-width]) + rows.scaled @ weights[-width:]


def _transposed(rows: Examples, factors: Floats) -> Floats:
    return np.concatenate((rows.matrix.transposed_times(factors), rows.scaled.T @ factors))


def _linear(rows: Examples, weights: Floats) -> Linear:
    """The weights as serving multiplies them: rarity and the scale of shapes are inside."""
    width = rows.scaled.shape[1]
    low, high = _bounds(rows.matrix)
    centre, spread = _spread(rows.matrix)
    shape = weights[-1 - width : -1] / spread
    return Linear(
        grams=(weights[: -1 - width] * rows.matrix.rarity).reshape(FAMILIES, -1),
        shape=shape,
        shape_low=low,
        shape_high=high,
        bias=float(weights[-1] - shape @ centre),
    )
