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
from functools import cache
from heapq import nlargest
from math import exp, log2, sqrt
from typing import Any, NamedTuple

NEIGHBOURS = 32


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

    def same(self, other: "Case", keys: tuple[int, ...]) -> bool:
        """Whether the two agree in the fields with these positions."""
        return all(self[key] == other[key] for key in keys)


@cache
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

    def covariance(self, one: Case, two: Case) -> float:
        """Of the logs of two cases, without noise."""
        apart = sum(
            weight * abs(a - b)
            for weight, a, b in zip(self.weights, logs_of(one), logs_of(two), strict=True)
        )
        return sum(
            part.deviation**2 * exp(-apart / part.reach)
            for part in self.parts
            if one.same(two, part.keys)
        )

    def estimate(self, case: Case) -> Estimate:
        """Expected log of measured over calculated at ``case``."""
        whole = sum(part.deviation**2 for part in self.parts)
        every = [self.covariance(case, row.case) for row in self.rows]
        near = nlargest(NEIGHBOURS, ((share, -place) for place, share in enumerate(every)))
        rows = [self.rows[-place] for share, place in near if share > 0]
        if not rows:
            return Estimate(0.0, sqrt(whole + self.noise**2), ())
        shares = [share for share, _ in near[: len(rows)]]
        matrix = [
            [
                self.covariance(one.case, two.case) + (self.noise**2 if i == j else 0.0)
                for j, two in enumerate(rows[: i + 1])
            ]
            for i, one in enumerate(rows)
        ]
        lower = _cholesky(matrix)
        half = _forward(lower, shares)
        pulls = [row.pull for row in self.rows if row.pull is not None]
        if len(pulls) == len(every):
            mean = sum(share * pull for share, pull in zip(every, pulls, strict=True))
        else:
            solved = _forward(lower, [row.residual for row in rows])
            mean = sum(a * b for a, b in zip(half, solved, strict=True))
        left = max(0.0, whole - sum(a * a for a in half))
        return Estimate(mean, sqrt(left + self.noise**2), tuple(rows))


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """Lower factor of a symmetric matrix of which the lower half is given."""
    lower: list[list[float]] = []
    for i, given in enumerate(matrix):
        line: list[float] = []
        for j in range(i + 1):
            above = line if j == i else lower[j]
            rest = given[j] - sum(a * b for a, b in zip(line, above, strict=False))
            line.append(sqrt(max(rest, 1e-12)) if j == i else rest / lower[j][j])
        lower.append(line)
    return lower


def _forward(lower: list[list[float]], right: Sequence[float]) -> list[float]:
    """Solution of ``lower @ x = right``."""
    solved: list[float] = []
    for line, value in zip(lower, right, strict=True):
        rest = value - sum(a * b for a, b in zip(line, solved, strict=False))
        solved.append(rest / line[len(solved)])
    return solved


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
