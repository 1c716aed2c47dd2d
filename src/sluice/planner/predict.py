"""Predicted step times of a deployment: formula, then published neighbours, then calibration.

Each stage overrides what the one before left open. A prediction carries its 80 % band and what it
leaned on; a model or device without rows of its own gets the formula and a wide band.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, floor, log, log2
from typing import Any

from sluice.planner.coefficients import Coefficients, Levels, fitted, levels_from_json
from sluice.planner.residual import Case, Estimate, Field, field_from_json
from sluice.planner.steady import Lengths, steady_state
from sluice.planner.work import Deployment

# `estimate.py` asks the field at half doublings of the prompt where a rate must be monotone:
# between two of them the formula alone decides what more tokens cost.
SNAPS_PER_DOUBLING = 2
# An engine or architecture without a level of its own: spread that other engines show.
FOREIGN_DEVIATION = 0.2


@dataclass(frozen=True, slots=True)
class Band:
    """An estimate with the range that holds the measured value four times of five."""

    estimate: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Band":
        """The band of the value times a positive number."""
        return Band(self.estimate * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Residual:
    """Log of true over calculated step time: expected value and half the width of the 80 % band."""

    mean: float
    half_width: float
    leaned_on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    """One kind of fit: coefficients by level, the field of residuals, and the date."""

    kind: str
    levels: Levels
    field: Field
    date: str

    def knows(self, architecture: str) -> bool:
        """Whether there are rows of devices like this one."""
        return f"*/{architecture}" in self.levels.levels


@cache
def own_fit(kind: str) -> Fitted:
    """The fit that comes with the package: ``closed_loop`` or ``capacity``."""
    document: Mapping[str, Any] = fitted()
    section = document[kind]
    return Fitted(
        kind,
        levels_from_json(section["levels"]),
        field_from_json(section["residual"]),
        document["date"],
    )


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement of the user's own: seconds per step with so many requests in a replica."""

    concurrency: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Correction of the log step time, straight in the log of concurrency through the points."""

    offset: float
    slope: float
    half_width: float

    def at(self, concurrency: float) -> float:
        """Correction to the log at this concurrency."""
        return self.offset + self.slope * log(concurrency)


# A calibrated prediction is as sure as measurements repeat, more so with more points.
CALIBRATED_HALF_WIDTH = (0.10, 0.05, 0.04)


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step times of one deployment on one engine."""

    deployment: Deployment
    engine_name: str
    precision: str
    fit: Fitted
    calibration: Calibration | None = None

    @property
    def level(self) -> tuple[str, Coefficients]:
        """The coefficients in use and the name of their level."""
        return self.fit.levels.best(self.engine_name, self.deployment.accelerator.architecture)

    @property
    def others(self) -> float:
        """Requests whose prefill a decoding request does not see."""
        return 0.0 if self.fit.kind == "capacity" else 1.0

    def calculated_s(self, lengths: Lengths, concurrency: float) -> float:
        """Mean step time of the steady state by the formula."""
        state = steady_state(self.deployment, lengths, concurrency, others=self.others)
        return state.step_s(self.level[1])

    def case(self, lengths: Lengths, concurrency: float) -> Case:
        """Where in the field the question is."""
        shape, device = self.deployment.shape, self.deployment.accelerator
        return Case(
            shape.name,
            family_of(shape.name),
            self.engine_name,
            device.architecture,
            device.name,
            self.precision,
            self.deployment.layout.tensor,
            self.deployment.layout.groups,
            max(concurrency, 1.0),
            max(lengths.computed, 1.0),
            lengths.output,
        )

    def residual(self, lengths: Lengths, concurrency: float) -> Residual:
        """What neighbours, or the calibration, say beyond the formula."""
        if self.calibration is not None:
            width = self.calibration.half_width
            return Residual(self.calibration.at(concurrency), width, ("your calibration",))
        found = _estimated(self.fit.field, self.case(lengths, concurrency))
        half = found.deviation * self.fit.field.spread
        name, _ = self.level
        if not name.startswith(self.engine_name):
            half = (half**2 + FOREIGN_DEVIATION**2) ** 0.5
        return Residual(found.mean, half, leaned_on(found, self.case(lengths, concurrency)))

    def step(self, lengths: Lengths, concurrency: float) -> Band:
        """Predicted mean step time in seconds, with its band."""
        residual = self.residual(lengths, concurrency)
        base = self.calculated_s(lengths, concurrency) * exp(residual.mean)
        width = exp(residual.half_width)
        return Band(base, base / width, base * width)

    def calibrated(self, lengths: Lengths, points: Sequence[Point]) -> "StepModel":
        """The model through the user's points: one moves it, two or more also turn it."""
        plain = replace(self, calibration=None)
        xs = [log(point.concurrency) for point in points]
        ys = [
            log(point.step_s / plain.calculated_s(lengths, point.concurrency)) for point in points
        ]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        across = sum((x - mean_x) ** 2 for x in xs)
        slope = 0.0
        if across > 0.05:
            slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / across
            slope = min(max(slope, -0.5), 0.5)
        width = CALIBRATED_HALF_WIDTH[min(len(points), len(CALIBRATED_HALF_WIDTH)) - 1]
        return replace(self, calibration=Calibration(mean_y - slope * mean_x, slope, width))


@cache
def _estimated(field: Field, case: Case) -> Estimate:
    return field.estimate(case)


def family_of(model: str) -> str:
    """Models that one code path of an engine serves, as far as the name tells."""
    return model.split("-", maxsplit=1)[0].rstrip("0123456789.")


def snapped(value: float) -> float:
    """The half doubling at or below ``value``."""
    return float(2.0 ** (floor(log2(max(value, 1.0)) * SNAPS_PER_DOUBLING) / SNAPS_PER_DOUBLING))


def leaned_on(estimate: Estimate, case: Case) -> tuple[str, ...]:
    """The nearest rows in words, each model, engine and device once, and how near they are."""
    if not estimate.leaned_on:
        return ("no published rows near this: the formula with coefficients of all rows",)
    found: dict[str, None] = {}
    for row in estimate.leaned_on:
        other = row.case
        words = (
            f"{other.model} on {other.device} x{other.tensor * other.groups}, {other.engine_name}"
        )
        found.setdefault(f"{words}, {other.precision} ({row.source})")
    listed = list(found)[:5]
    if all(row.case.model != case.model for row in estimate.leaned_on):
        listed.insert(0, f"no rows of {case.model}: rows of other models")
    if all(row.case.device != case.device for row in estimate.leaned_on):
        listed.insert(0, f"no rows on {case.device}: rows of other devices")
    return tuple(listed)
