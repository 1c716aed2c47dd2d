"""Fits the planner's coefficients to published measurements, level by level.

``calculated`` is the formula on many cases at once; ``fit_levels`` fits it in logarithms with a
soft absolute loss, each level held to the one above it (``*/*`` -> ``*/architecture`` ->
``engine/architecture``), so that few rows move it little. ``fit_field`` finds the covariance of
what is left over. All of it runs on a laptop in seconds.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sluice.planner.coefficients import Coefficients, Levels
from sluice.planner.residual import Case, Field, Part, Row, logs_of
from sluice.planner.steady import Steady, steady_state
from sluice.planner.work import Work
from tools.planner_rows import Measured, fold_of

Array = NDArray[np.float64]
Places = NDArray[np.intp]
NAMES = tuple(field.name for field in fields(Coefficients))
# Loss: absolute beyond this log error, so that a mislabelled row pulls no harder than others.
SOFT = 0.1
# How firmly a level is held to the one above, per coefficient.
HOLD_PRIOR = 3.0
HOLD = 6.0
ROWS_MIN = 15
ROUNDS = 25
RESIDUAL_MAX = 0.7
HOLD_FIELD = 0.002
FIELD_ROUNDS = 2
# Not a divisor of the folds of the benchmark: the parts that are left out shall differ.
SPREAD_FOLDS = 7


def stacked(works: Sequence[Work]) -> Work:
    """One ``Work`` of arrays: the formula is plain arithmetic, on them as on numbers."""
    columns: Any = [np.array(column) for column in zip(*works, strict=True)]
    return Work(*columns)


class Cases:
    """Cases of which the step time can be calculated together."""

    def __init__(self, rows: Sequence[Measured], *, saturated: bool) -> None:
        others = 0.0 if saturated else 1.0
        states = [
            steady_state(row.deployment, row.lengths, row.concurrency, others=others)
            for row in rows
        ]
        self.steady = Steady(
            stacked([state.decode for state in states]),
            stacked([state.mixed for state in states]),
            cast(float, np.array([state.mixed_share for state in states])),
        )
        measured = [
            row.concurrency / row.deployment.layout.devices / row.value if saturated else row.value
            for row in rows
        ]
        self.measured_log: Array = np.log(np.array(measured))

    def calculated_log(self, theta: Array) -> Array:
        """Log of the step time at coefficients of which the logs are ``theta``."""
        coefficients = Coefficients(*np.exp(theta))
        return cast(Array, np.log(self.steady.step_s(coefficients)))


def theta_of(coefficients: Coefficients) -> Array:
    """Logs of the coefficients."""
    return np.log(np.array([getattr(coefficients, name) for name in NAMES], dtype=np.float64))


def _fit(calculated: Callable[[Array], Array], goal: Array, start: Array, hold: float) -> Array:
    """Levenberg-Marquardt on the reweighted soft absolute loss, held to ``start``."""
    theta = start.copy()
    damping = 1.0

    def loss(errors: Array, at: Array) -> float:
        soft = SOFT**2 * (np.sqrt(1 + (errors / SOFT) ** 2) - 1)
        return float(2 * soft.sum() + (hold * SOFT) ** 2 * ((at - start) ** 2).sum())

    errors = calculated(theta) - goal
    best = loss(errors, theta)
    for _ in range(ROUNDS):
        slope = np.empty((len(goal), len(theta)))
        for i in range(len(theta)):
            moved = theta.copy()
            moved[i] += 1e-4
            slope[:, i] = (calculated(moved) - goal - errors) / 1e-4
        weight = 1.0 / np.sqrt(1 + (errors / SOFT) ** 2)
        gram = slope.T @ (slope * weight[:, None]) + (hold * SOFT) ** 2 * np.eye(len(theta))
        push = slope.T @ (errors * weight) + (hold * SOFT) ** 2 * (theta - start)
        step = np.linalg.solve(gram + damping * np.diag(np.diag(gram)), -push)
        tried = theta + np.clip(step, -1.0, 1.0)
        tried_errors = calculated(tried) - goal
        tried_loss = loss(tried_errors, tried)
        if tried_loss < best:
            done = best - tried_loss < 1e-6 * best
            theta, errors, best, damping = tried, tried_errors, tried_loss, damping / 4
            if done:
                break
        else:
            damping *= 6
            if damping > 1e6:
                break
    return theta


def fit_levels(rows: Sequence[Measured], *, saturated: bool, prior: Coefficients) -> Levels:
    """Coefficients of every level that has enough rows."""
    cases = Cases(rows, saturated=saturated)
    thetas = {"*/*": _fit(cases.calculated_log, cases.measured_log, theta_of(prior), HOLD_PRIOR)}
    counts = {"*/*": len(rows)}
    for engines in (False, True):
        members = defaultdict(list)
        for row in rows:
            engine = row.case.engine_name if engines else "*"
            members[f"{engine}/{row.case.architecture}"].append(row)
        for name in sorted(members):
            group = members[name]
            if len(group) < ROWS_MIN:
                continue
            parent = f"*/{group[0].case.architecture}" if engines else "*/*"
            start = thetas.get(parent, thetas["*/*"])
            part = Cases(group, saturated=saturated)
            hold = HOLD * (len(group) / 100) ** 0.25
            thetas[name] = _fit(part.calculated_log, part.measured_log, start, hold)
            counts[name] = len(group)
    levels = {name: Coefficients(*map(float, np.exp(theta))) for name, theta in thetas.items()}
    return Levels(levels, counts)


def residuals(rows: Sequence[Measured], levels: Levels, *, saturated: bool) -> Array:
    """Log of measured over calculated step time, of each row at its own level."""
    found = np.empty(len(rows))
    members = defaultdict(list)
    for place, row in enumerate(rows):
        members[row.case.engine_name, row.case.architecture].append(place)
    for (engine, architecture), places in members.items():
        part = Cases([rows[place] for place in places], saturated=saturated)
        _, level = levels.best(engine, architecture)
        found[places] = part.measured_log - part.calculated_log(theta_of(level))
    return found


# Positions in `Case` of what the parts of the covariance agree in.
MODEL, FAMILY, ENGINE, ARCHITECTURE, DEVICE, PRECISION, TENSOR, GROUPS = range(8)
PART_KEYS: tuple[tuple[int, ...], ...] = (
    (),
    (ENGINE, ARCHITECTURE),
    (MODEL,),
    (FAMILY, ENGINE, ARCHITECTURE),
    (MODEL, ENGINE),
    (MODEL, ARCHITECTURE, PRECISION),
    (ENGINE, DEVICE, PRECISION),
    (MODEL, ENGINE, ARCHITECTURE, PRECISION),
    (MODEL, ENGINE, DEVICE, PRECISION),
    (MODEL, ENGINE, DEVICE, PRECISION, TENSOR, GROUPS),
)
FIELD_START = Field(parts=tuple(Part(keys, 0.06, 4.0) for keys in PART_KEYS), noise=0.04, rows=())


class Agreement:
    """Which pairs of cases agree in what, and how many doublings they are apart: computed once,
    because the search below needs nothing else of the cases."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.same = []
        for keys in PART_KEYS:
            labels = ["|".join(str(case[key]) for key in keys) for case in cases]
            numbers = np.unique(labels, return_inverse=True)[1]
            self.same.append((numbers[:, None] == numbers[None, :]).astype(np.float64))
        logs = np.array([logs_of(case) for case in cases])
        self.apart = [np.abs(column[:, None] - column[None, :]) for column in logs.T]

    def covariance(self, field: Field) -> Array:
        """Between all pairs, without noise."""
        apart = sum(weight * each for weight, each in zip(field.weights, self.apart, strict=True))
        total = np.zeros_like(self.apart[0])
        for part, same in zip(field.parts, self.same, strict=True):
            total += part.deviation**2 * same * np.exp(-apart / part.reach)
        return cast(Array, total)


def left_out_errors(
    agreement: Agreement, field: Field, values: Array, groups: Sequence[Places]
) -> tuple[Array, Array]:
    """Errors and deviations at each row when its whole group is left out (closed form: Rasmussen
    and Williams, eq. 5.12, for groups)."""
    whole = agreement.covariance(field) + field.noise**2 * np.eye(len(values))
    inverse = np.linalg.inv(whole)
    solved = inverse @ values
    errors, deviations = np.empty(len(values)), np.empty(len(values))
    for places in groups:
        block = np.linalg.inv(inverse[np.ix_(places, places)])
        errors[places] = block @ solved[places]
        deviations[places] = np.sqrt(np.maximum(np.diag(block), 1e-9))
    return errors, deviations


def grouped(labels: Sequence[str]) -> list[Places]:
    """Places of the rows of each group."""
    numbers = np.unique(list(labels), return_inverse=True)[1]
    return [np.flatnonzero(numbers == each) for each in range(numbers.max() + 1)]


def fit_field(
    rows: Sequence[Measured],
    values: Array,
    *,
    rounds: int = FIELD_ROUNDS,
    start: Field = FIELD_START,
) -> Field:
    """The covariance that predicts left-out curves, pairs and models best, by coordinate search.

    It is held to ``start``: there are a hundred curves and two dozen numbers to choose.
    """
    clipped = np.clip(values, -RESIDUAL_MAX, RESIDUAL_MAX)
    agreement = Agreement([row.case for row in rows])
    splits = [
        (1.0, grouped([row.curve for row in rows])),
        (0.3, grouped([row.pair for row in rows])),
        (0.3, grouped([row.case.model for row in rows])),
    ]

    theta = _packed(start)
    origin = theta.copy()

    def score(at: Array) -> float:
        field = _unpacked(at)
        total = HOLD_FIELD * float(((at - origin) ** 2).sum())
        for weight, groups in splits:
            errors, deviations = left_out_errors(agreement, field, clipped, groups)
            soft = np.sqrt(0.03**2 + errors**2)
            spread = np.log(deviations) + np.abs(errors) / deviations * 1.2
            total += weight * float(soft.mean() + 0.02 * spread.mean())
        return total

    best = score(theta)
    stride = np.full(len(theta), 0.7)
    for _ in range(rounds):
        for place in range(len(theta)):
            for sign in (1.0, -1.0):
                tried = theta.copy()
                tried[place] += sign * stride[place]
                found = score(tried)
                if found < best:
                    theta, best = tried, found
                    break
            else:
                stride[place] /= 2
    return _unpacked(theta)


def _packed(field: Field) -> Array:
    numbers = [part.deviation for part in field.parts]
    numbers += [part.reach for part in field.parts]
    return np.log(np.array([*numbers, field.noise, *field.weights], dtype=np.float64))


def _unpacked(theta: Array) -> Field:
    numbers = [float(each) for each in np.exp(theta)]
    count = len(PART_KEYS)
    parts = tuple(
        Part(keys, deviation, reach)
        for keys, deviation, reach in zip(
            PART_KEYS, numbers[:count], numbers[count : 2 * count], strict=True
        )
    )
    one, two, three, four = numbers[2 * count + 1 :]
    return Field(parts, numbers[2 * count], (), (one, two, three, four))


def with_rows(field: Field, rows: Sequence[Measured], values: Array) -> Field:
    """``field`` with these rows in it, and what each pulls."""
    clipped = np.clip(values, -RESIDUAL_MAX, RESIDUAL_MAX)
    agreement = Agreement([row.case for row in rows])
    whole = agreement.covariance(field) + field.noise**2 * np.eye(len(rows))
    pulls = np.linalg.solve(whole, clipped)
    found = tuple(
        Row(row.case, float(value), row.source, float(pull))
        for row, value, pull in zip(rows, clipped, pulls, strict=True)
    )
    return replace(field, rows=found)


def crossed_spread(rows: Sequence[Measured], field: Field, *, saturated: bool) -> float:
    """How many deviations hold four of five rows of curves that were left out of everything.

    Coefficients and rows are fitted again without each fold of curves: with coefficients that saw
    them, left-out curves would look nearer than new ones are.
    """
    ratios: list[float] = []
    for fold in range(SPREAD_FOLDS):
        out = [row for row in rows if fold_of(row.curve, SPREAD_FOLDS) == fold]
        kept = [row for row in rows if fold_of(row.curve, SPREAD_FOLDS) != fold]
        if not out or not kept:
            continue
        levels = fit_levels(kept, saturated=saturated, prior=Coefficients())
        part = with_rows(field, kept, residuals(kept, levels, saturated=saturated))
        for row, value in zip(out, residuals(out, levels, saturated=saturated), strict=True):
            found = part.estimate(row.case)
            ratios.append(abs(float(value) - found.mean) / found.deviation)
    return float(np.quantile(ratios, 0.8))


@dataclass(frozen=True, slots=True)
class Model:
    """Everything that is fitted to one kind of rows."""

    levels: Levels
    field: Field


def fit_model(rows: Sequence[Measured], field: Field, *, saturated: bool) -> Model:
    """Coefficients, then the residual rows under a covariance that is given, and the band."""
    levels = fit_levels(rows, saturated=saturated, prior=Coefficients())
    spread = crossed_spread(rows, field, saturated=saturated)
    found = with_rows(field, rows, residuals(rows, levels, saturated=saturated))
    return Model(levels, replace(found, spread=spread))


def search_field(rows: Sequence[Measured], *, saturated: bool) -> Field:
    """The covariance for these rows, by coordinate search; takes minutes."""
    levels = fit_levels(rows, saturated=saturated, prior=Coefficients())
    values = residuals(rows, levels, saturated=saturated)
    return fit_field(rows, values)
