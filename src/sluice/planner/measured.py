"""The speed of a replica from the steps in its journal, for a simulation of the same machine.

Steps count from the end of the one before where that was just now: what the process does between
two steps is part of how fast it is. Coefficients are those of ``core.costmodel``, fitted to all
steps by non-negative least squares of relative errors; ``ratios`` say how steps scatter around
them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil

from sluice.core.costmodel import TYPICAL, Coefficients, Load, nonnegative_least_squares
from sluice.telemetry.records import Record, RequestArrived, RequestEnded, Step

# A pause up to this long between two steps is the replica's own work, a longer one is idleness.
PAUSE_NS_MAX = 20_000_000
# Steps outside this range of their prediction are left out of the second fit: the machine stalled.
RATIO_MAX = 3.0
RATIOS_KEPT = 200
STEPS_MIN = 50
_DIMENSIONS = range(len(TYPICAL))


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast steps are, in the mean and around it; ``ratios`` are equally likely."""

    coefficients: Coefficients
    ratios: tuple[float, ...]
    steps: int

    def predict_ns(self, load: Load) -> float:
        """Mean duration of a step with this load."""
        return self.coefficients.predict_ns(load)


Sample = tuple[Load, float]


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
        self.samples.append((load, float(step.measured_ns + pause_ns)))


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


def speed_of(samples: Iterable[Sample]) -> Speed | None:
    """The speed behind these steps, ``None`` where they are too few to tell."""
    samples = list(samples)
    if len(samples) < STEPS_MIN:
        return None
    coefficients = _fitted(samples)
    kept = [s for s in samples if 1 / RATIO_MAX < s[1] / coefficients.predict_ns(s[0]) < RATIO_MAX]
    coefficients = _fitted(kept or samples)
    ratios = sorted(min(10.0, wall_ns / coefficients.predict_ns(load)) for load, wall_ns in samples)
    part = ceil(len(ratios) / RATIOS_KEPT)
    means = [sum(group) / len(group) for group in _groups(ratios, part)]
    # The sum of all steps comes out right.
    predicted_ns = sum(coefficients.predict_ns(load) for load, _ in samples)
    scale = sum(wall_ns for _, wall_ns in samples) / predicted_ns * len(means) / sum(means)
    return Speed(coefficients, tuple(mean * scale for mean in means), len(samples))


def _groups(values: list[float], size: int) -> Iterator[list[float]]:
    return (values[at : at + size] for at in range(0, len(values), size))


def _fitted(samples: Iterable[Sample]) -> Coefficients:
    gram = [[1e-9 * (row == column) for column in _DIMENSIONS] for row in _DIMENSIONS]
    moment = [0.0 for _ in _DIMENSIONS]
    for load, wall_ns in samples:
        features = [
            value * typical_share
            for value, typical_share in zip(
                (1, *load), (1e6 / wall_ns / typical for typical in TYPICAL), strict=True
            )
        ]
        for row, feature in enumerate(features):
            moment[row] += feature
            for column, other in enumerate(features):
                gram[row][column] += feature * other
    found = [1.0 for _ in _DIMENSIONS]
    for _ in range(20):  # each call goes as far as predictions can tell, from a better start
        found = nonnegative_least_squares(gram, moment, found)
    return Coefficients(*(ms * 1e6 / typical for ms, typical in zip(found, TYPICAL, strict=True)))
