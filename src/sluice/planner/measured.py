"""The speed of a replica from the steps in its journal, for a simulation of the same machine.

Steps count from the end of the one before where that was just now: what the process does between
two steps is part of how fast it is. Coefficients are those of ``core.costmodel``, fitted to all
steps by non-negative least squares of relative errors. What a step took beyond them is kept with
its time: other programs on the machine, its clocks and stalls belong to the traffic of that time.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.core.costmodel import TYPICAL, Coefficients, Load, nonnegative_least_squares
from sluice.telemetry.records import Record, RequestArrived, RequestEnded, Step

# A pause up to this long between two steps is the replica's own work, a longer one is idleness.
PAUSE_NS_MAX = 20_000_000
# Steps outside this range of their prediction are left out of the second fit: the machine stalled.
RATIO_MAX = 3.0
STEPS_MIN = 50
_DIMENSIONS = range(len(TYPICAL))


class Sample(NamedTuple):
    """One step: when it ended, what was in it, and how long it took."""

    t_ns: int
    load: Load
    wall_ns: float


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast steps are: ``coefficients``, and at ``times_ns`` the ``ratios`` of what a step took
    to what they say."""

    coefficients: Coefficients
    times_ns: Sequence[int]
    ratios: Sequence[float]

    def predict_ns(self, load: Load) -> float:
        """Usual duration of a step with this load."""
        return self.coefficients.predict_ns(load)

    def ratio(self, at_ns: int) -> float:
        """By how much a step at this time took longer than usual."""
        return self.ratios[min(len(self.ratios) - 1, bisect_left(self.times_ns, at_ns))]


@dataclass(slots=True)
class StepSamples:
    """The loads and wall times of the steps of one replica, as records come in order of time."""

    samples: list[Sample] = field(default_factory=list)
    _ended_ns: int = 0
    _pauses: int = 0
    _pauses_ns: int = 0

    def add(self, step: Step, load: Load) -> None:
        """Take one step that was computed."""
        pause_ns = step.t_ns - step.measured_ns - self._ended_ns
        self._ended_ns = step.t_ns
        if 0 <= pause_ns < PAUSE_NS_MAX:
            self._pauses += 1
            self._pauses_ns += pause_ns
        else:
            pause_ns = self._pauses_ns // max(1, self._pauses)
        self.samples.append(Sample(step.t_ns, load, float(step.measured_ns + pause_ns)))


class StepLoads:
    """Works out what was in each step of a journal. Give it all records, in order of time."""

    def __init__(self) -> None:
        self.replicas: dict[str, StepSamples] = {}
        self._prompts: dict[str, int] = {}
        self._produced: dict[tuple[str, int], int] = {}

    def take(self, record: Record) -> None:
        """Look at one record."""
        if isinstance(record, RequestArrived):
            self._prompts[record.id] = record.prompt_tokens
        elif isinstance(record, RequestEnded):
            self._prompts.pop(record.id, None)
            choice = 0
            while self._produced.pop((record.id, choice), None) is not None:
                choice += 1
        elif isinstance(record, Step):
            self._step(record)

    def _step(self, step: Step) -> None:
        context = 0
        for row in step.decode:
            made = self._produced[row] = self._produced.get(row, 0) + 1
            context += self._prompts.get(row[0], 0) + made
        load = Load(len(step.decode), len(step.decode), context)
        for chunk in step.prefill:
            load = load.with_chunk(chunk.past_tokens, chunk.tokens)
        if load.tokens and step.measured_ns > 0 and not step.error:
            self.replicas.setdefault(step.replica, StepSamples()).add(step, load)


def speed_of(samples: Sequence[Sample]) -> Speed | None:
    """The speed behind these steps, ``None`` where they are too few to tell."""
    if len(samples) < STEPS_MIN:
        return None
    coefficients = fitted((sample.load, sample.wall_ns) for sample in samples)
    kept = [s for s in samples if 1 / RATIO_MAX < _ratio(s, coefficients) < RATIO_MAX]
    coefficients = fitted((sample.load, sample.wall_ns) for sample in kept or samples)
    return Speed(
        coefficients,
        array("q", (sample.t_ns for sample in samples)),
        array("d", (_ratio(sample, coefficients) for sample in samples)),
    )


def _ratio(sample: Sample, coefficients: Coefficients) -> float:
    return sample.wall_ns / coefficients.predict_ns(sample.load)


def fitted(steps: Iterable[tuple[Load, float]]) -> Coefficients:
    """Coefficients by least squares of relative errors; ``steps`` are loads and nanoseconds."""
    gram = [[1e-9 * (row == column) for column in _DIMENSIONS] for row in _DIMENSIONS]
    moment = [0.0 for _ in _DIMENSIONS]
    for load, wall_ns in steps:
        features = [
            value / typical * 1e6 / wall_ns
            for value, typical in zip((1, *load), TYPICAL, strict=True)
        ]
        for row, feature in enumerate(features):
            moment[row] += feature
            for column, other in enumerate(features):
                gram[row][column] += feature * other
    found = [1.0 for _ in _DIMENSIONS]
    for _ in range(20):  # each call goes as far as predictions can tell, from a better start
        found = nonnegative_least_squares(gram, moment, found)
    return Coefficients(*(ms * 1e6 / typical for ms, typical in zip(found, TYPICAL, strict=True)))
