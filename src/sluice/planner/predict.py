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
from sluice.planner.memory import MEMORY_SHARE
from sluice.planner.residual import Case, Estimate, Field, field_from_json
from sluice.planner.steady import CHUNK_TOKENS_MAX, Lengths, Steady, steady_state
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
    """A measurement of the user's own: seconds per step with so many requests in a replica, and
    the median time to the first token where it is known.

    ``lengths`` are those of its requests where they are not those of the question; ``source`` says
    where it comes from.
    """

    concurrency: float
    step_s: float
    ttft_s: float | None = None
    lengths: Lengths | None = None
    source: str = "your calibration"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Correction of the predicted log step time, straight in the log of concurrency through the
    points, which ``concurrencies`` says where they are; outside of them as at the nearest.

    ``surprise`` is the largest distance of a point from what was predicted without it, in the log:
    where the level was far off, so may be the way it goes on. ``first_token_factor`` is how many
    times longer the prefill of a lone request took than predicted.
    """

    offset: float
    slope: float
    concurrencies: tuple[float, ...]
    sources: tuple[str, ...]
    surprise: float
    first_token_factor: float = 1.0

    def at(self, concurrency: float) -> float:
        """Correction to the log at this concurrency."""
        inside = min(max(concurrency, min(self.concurrencies)), max(self.concurrencies))
        return self.offset + self.slope * log(inside)

    def half_width(self, concurrency: float) -> float:
        """Half the 80 % band of the log: as sure as measurements repeat at a point, less away."""
        doublings = min(abs(log2(concurrency / each)) for each in self.concurrencies)
        widening = CALIBRATED_WIDENING + SURPRISED_WIDENING * self.surprise
        return CALIBRATED_HALF_WIDTH + widening * doublings


# Found by predicting curves that were left out of the fit from one of their own points: the error
# that four of five rows keep within, by doublings of the concurrency away from that point.
CALIBRATED_HALF_WIDTH = 0.045
CALIBRATED_WIDENING = 0.04
# Chosen, not measured: what is nine times off may be so in its launches or in its reading alone.
SURPRISED_WIDENING = 0.1


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step times of one deployment on one engine."""

    deployment: Deployment
    engine_name: str
    precision: str
    fit: Fitted
    calibration: Calibration | None = None
    chunk_tokens: float = CHUNK_TOKENS_MAX
    memory_share: float = MEMORY_SHARE

    @property
    def first_token_factor(self) -> float:
        """What a calibration says about the time to the first token beyond that of steps."""
        return 1.0 if self.calibration is None else self.calibration.first_token_factor

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
        return self.steady(lengths, concurrency).step_s(self.level[1])

    def steady(self, lengths: Lengths, concurrency: float) -> Steady:
        """The kinds of steps with so many requests in the replica."""
        return steady_state(
            self.deployment,
            lengths,
            concurrency,
            others=self.others,
            chunk_tokens=self.chunk_tokens,
        )

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
        case = self.case(lengths, concurrency)
        found = _estimated(self.fit.field, case)
        half = found.deviation * self.fit.field.spread
        name, _ = self.level
        if not name.startswith(self.engine_name):
            half = (half**2 + FOREIGN_DEVIATION**2) ** 0.5
        if self.calibration is None:
            return Residual(found.mean, half, _leaned_on(self.fit.field, case))
        # The points override the level of what neighbours say; how it goes on from there, nothing
        # says better than they do.
        mean = found.mean + self.calibration.at(concurrency)
        widest = max(half, self.calibration.surprise / 2.0)
        own = min(widest, self.calibration.half_width(concurrency))
        return Residual(mean, own, self.calibration.sources)

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
            log(point.step_s / plain.step(point.lengths or lengths, point.concurrency).estimate)
            for point in points
        ]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        across = sum((x - mean_x) ** 2 for x in xs)
        slope = 0.0
        if across > 0.05:
            slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / across
            slope = min(max(slope, -0.5), 0.5)
        found = Calibration(
            offset=mean_y - slope * mean_x,
            slope=slope,
            concurrencies=tuple(point.concurrency for point in points),
            sources=tuple(dict.fromkeys(point.source for point in points)),
            surprise=max(map(abs, ys)),
        )
        return replace(self, calibration=found)


@cache
def _estimated(field: Field, case: Case) -> Estimate:
    return field.estimate(case)


@cache
def _leaned_on(field: Field, case: Case) -> tuple[str, ...]:
    return leaned_on(_estimated(field, case), case)


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
