"""What published measurements say beyond the formula, and how sure that is.

Kriging: the log of measured over calculated is taken as a random field over (model, engine,
architecture, device, precision, parallelism, batch, lengths), whose covariance is a sum of parts
that two cases share: an engine on an architecture, a model, a model on an engine, … The estimate
is the best linear one from the nearest rows: it goes to zero, and its spread to that of the field,
as the nearest rows get further away. (Rasmussen and Williams, Gaussian Processes for Machine
Learning, section 2.2; simple kriging.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2, sqrt
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Codes = NDArray[np.intp]
NEIGHBOURS = 32
# The first fields of a case are names, the rest are lengths.
NAMED = 8


class Case(NamedTuple):
    """Where in the field a measurement or a question is."""

    model: str
    family: str
    engine_name: str
    architecture: str
    device: str
    precision: str
    tensor: int
    groups: int
    concurrency: float
    prompt: float
    output: float


def logs_of(case: Case) -> tuple[float, float, float, float]:
    """Doublings of devices, requests, prompt and output tokens."""
    devices = case.tensor * case.groups
    return log2(devices), log2(case.concurrency), log2(case.prompt), log2(case.output)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the covariance: how much cases vary that agree in ``keys`` only (standard
    deviation of the log), and over how many doublings they stay alike."""

    keys: tuple[int, ...]
    deviation: float
    reach: float


@dataclass(frozen=True, slots=True)
class Row:
    """A published measurement: its case, log of measured over calculated, and its source.

    ``pull`` is its weight in the estimate from all rows together (inverse covariance times
    residuals), which the fit solves once; None where only the nearest rows are to be asked.
    """

    case: Case
    residual: float
    source: str = ""
    pull: float | None = None


class Estimate(NamedTuple):
    """Log of measured over calculated: expected value and standard deviation, and the rows that
    it leaned on, nearest first."""

    mean: float
    deviation: float
    leaned_on: tuple[Row, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """The covariance and the rows.

    ``noise`` is the deviation of measurements of one case. ``spread`` is how many deviations hold
    four of five left-out rows: the width of the 80 % band, found by leaving out and not assumed.
    """

    parts: tuple[Part, ...]
    noise: float
    rows: Sequence[Row]
    weights: tuple[float, float, float, float] = (1.0, 0.6, 0.6, 0.6)
    spread: float = 1.2816

    def estimate(self, case: Case) -> Estimate:
        """Expected log of measured over calculated at ``case``."""
        whole = sum(part.deviation**2 for part in self.parts)
        index = _index(self)
        every = index.covariance(*index.placed(case))
        near = np.argsort(-every, kind="stable")[:NEIGHBOURS]
        near = near[every[near] > 0.0]
        if not near.size:
            return Estimate(0.0, sqrt(whole + self.noise**2), ())
        shares = every[near]
        matrix = index.between(near) + self.noise**2 * np.eye(near.size)
        weights = np.linalg.solve(matrix, shares)
        values, far = (index.residuals[near], weights)
        if index.pulls is not None:
            values, far = index.pulls, every
        left = max(0.0, whole - float(shares @ weights))
        rows = tuple(self.rows[place] for place in near)
        return Estimate(float(values @ far), sqrt(left + self.noise**2), rows)


class _Index:
    """The rows of a field as arrays: names as numbers, so that all are compared at once."""

    def __init__(self, field: Field) -> None:
        self.field = field
        cases = [row.case for row in field.rows]
        self.codes: list[dict[str | float, int]] = [{} for _ in range(NAMED)]
        for case in cases:
            for codes, name in zip(self.codes, case[:NAMED], strict=True):
                codes.setdefault(name, len(codes))
        self.names = np.array([self._named(case) for case in cases], np.intp).reshape(-1, NAMED)
        self.logs = np.array([logs_of(case) for case in cases], np.float64).reshape(-1, 4)
        self.residuals = np.array([row.residual for row in field.rows], np.float64)
        pulls = [row.pull for row in field.rows if row.pull is not None]
        self.pulls = np.array(pulls) if cases and len(pulls) == len(cases) else None

    def _named(self, case: Case) -> list[int]:
        # A name that no row has agrees with none.
        return [codes.get(name, -1) for codes, name in zip(self.codes, case[:NAMED], strict=True)]

    def placed(self, case: Case) -> tuple[NDArray[np.bool_], Array]:
        """In which names ``case`` agrees with each row, and how far apart they are."""
        return self.names == np.array(self._named(case)), np.abs(self.logs - logs_of(case))

    def between(self, places: Codes) -> Array:
        """Covariance of these rows with each other."""
        names, logs = self.names[places], self.logs[places]
        return self.covariance(
            names[:, None] == names[None, :], np.abs(logs[:, None] - logs[None, :])
        )

    def covariance(self, same: NDArray[np.bool_], apart: Array) -> Array:
        """Of logs of cases that agree so and are so far apart, without noise."""
        doublings = apart @ np.array(self.field.weights)
        total = np.zeros_like(doublings)
        for part in self.field.parts:
            alike = same[..., list(part.keys)].all(axis=-1)
            total += part.deviation**2 * alike * np.exp(-doublings / part.reach)
        return cast(Array, total)


@lru_cache(maxsize=4)
def _index(field: Field) -> _Index:
    return _Index(field)


def field_as_json(field: Field) -> dict[str, Any]:
    """Plain values; sources are listed once."""
    sources = sorted({row.source for row in field.rows})
    return {
        "parts": [[list(p.keys), _short(p.deviation), _short(p.reach)] for p in field.parts],
        "noise": _short(field.noise),
        "weights": [_short(weight) for weight in field.weights],
        "spread": _short(field.spread),
        "sources": sources,
        "rows": [
            [
                *row.case,
                float(f"{row.residual:.3f}"),
                sources.index(row.source),
                None if row.pull is None else float(f"{row.pull:.4g}"),
            ]
            for row in field.rows
        ],
    }


def field_from_json(document: Mapping[str, Any]) -> Field:
    """What ``field_as_json`` wrote."""
    one, two, three, four = document["weights"]
    return Field(
        parts=tuple(Part(tuple(keys), a, b) for keys, a, b in document["parts"]),
        noise=document["noise"],
        rows=tuple(
            Row(Case(*case), residual, document["sources"][source], pull)
            for *case, residual, source, pull in document["rows"]
        ),
        weights=(one, two, three, four),
        spread=document["spread"],
    )


def _short(value: float) -> float:
    return float(f"{value:.3g}")
