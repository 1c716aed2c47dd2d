"""What a journal says about a run, and the speed of the engine fitted from it.

Steps are taken from the end of the one before, where the replica was busy in between: what the
process does between two steps is part of how fast the engine is.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from zlib import crc32

import msgspec

from sluice.core.costmodel import Coefficients, Load
from sluice.core.events import ReplicaLimits
from sluice.planner.measured import fitted
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import (
    Record,
    ReplicaChanged,
    RequestArrived,
    RequestEnded,
    RequestRejected,
    Step,
)

# A pause up to this long between two steps is the replica's own work, a longer one is idleness.
PAUSE_NS_MAX = 20_000_000
# Steps outside this range of their prediction are left out of the fit: the machine stalled.
RATIO_MAX = 3.0
RATIOS_KEPT = 200
STEPS_MIN = 100
SPEED = "speed_"
# A refusal that took longer came after a wait: what was promised did not come true.
DOOR_S_MAX = 0.1


def read_records(journal: Path, since_ns: int | None = None) -> list[Record]:
    """All records of a journal that may still be written, or those since a wall-clock time."""
    return [entry.record for entry in JournalReader(journal).entries(since_ns)]


def facts_of(records: Iterable[Record], from_ns: int, to_ns: int) -> dict[str, float]:
    """Figures of one stretch of monotonic time."""
    inside = [one for one in records if from_ns <= one.t_ns < to_ns]
    steps = [one for one in inside if isinstance(one, Step)]
    arrived = {one.id: one.arrived_ns for one in inside if isinstance(one, RequestArrived)}
    refused_ms = [
        took_ms
        for one in inside
        if isinstance(one, RequestRejected) and one.id in arrived
        if (took_ms := (one.t_ns - arrived[one.id]) / 1e6) < DOOR_S_MAX * 1e3
    ]
    ended = [one for one in inside if isinstance(one, RequestEnded)]
    facts = {"preemptions": float(sum(one.preemptions for one in ended))}
    if refused_ms:
        facts |= {"refuse_ms_p50": median(refused_ms), "refuse_ms_p99": quantile(refused_ms, 0.99)}
    if steps:
        busy_ns = sum(step.measured_ns for step in steps)
        step_ms = [step.measured_ns / 1e6 for step in steps]
        facts |= {
            "busy_share": busy_ns / (to_ns - from_ns),
            "rows_mean": sum(len(s.decode) * s.measured_ns for s in steps) / busy_ns,
            "step_ms_p50": median(step_ms),
            "step_ms_p99": quantile(step_ms, 0.99),
            "output_tokens_per_s": 1e9 * sum(len(s.decode) for s in steps) / (to_ns - from_ns),
        }
    return facts


def speed_of(records: Sequence[Record], from_ns: int, to_ns: int) -> dict[str, float]:
    """How fast the engine was in one stretch of time, for ``Calibration.as_fast``.

    Empty where too few steps were taken.
    """
    inside = [one[1:] for one in _samples(records) if from_ns <= one[0] < to_ns]
    if len(inside) < STEPS_MIN:
        return {}
    coefficients = _robust_fit(inside)
    scale = sum(ns for _, ns in inside) / sum(coefficients.predict_ns(load) for load, _ in inside)
    fitted = {f"{SPEED}{name}": value for name, value in asdict(coefficients).items()}
    return {**fitted, f"{SPEED}scale": scale}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


# ------------------------------------------------------------------------------------ calibration


@dataclass(frozen=True, slots=True)
class Calibration:
    """How fast an engine is: coefficients, and by how much steps differ from them.

    ``ratios`` are quantiles of measured over predicted, with which the sum of all steps comes out
    right.
    """

    coefficients: Coefficients
    ratios: tuple[float, ...]
    limits: ReplicaLimits
    steps: int

    @property
    def name(self) -> str:
        """Short text that differs where any figure does."""
        return f"{crc32(json.dumps(self.to_json()).encode()):08x}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Calibration":
        """Back from plain values."""
        return msgspec.convert(document, cls)

    def as_fast(self, facts: Mapping[str, float]) -> "Calibration":
        """With the speed of one run, where its facts have it: machines are not always as fast."""
        fitted = {
            name.removeprefix(SPEED): value
            for name, value in facts.items()
            if name.startswith(SPEED)
        }
        if not fitted:
            return self
        scale = fitted.pop("scale") / fmean(self.ratios)
        ratios = tuple(ratio * scale for ratio in self.ratios)
        return replace(self, coefficients=Coefficients(**fitted), ratios=ratios)


UNCALIBRATED = Calibration(Coefficients(), (1.0,), ReplicaLimits(4096, 32, 4096, 32), 0)


def calibrate(records: Sequence[Record]) -> Calibration:
    """Fit the coefficients to all steps of a journal. Raises ``ValueError`` where it has few."""
    samples = [one[1:] for one in _samples(records)]
    if len(samples) < STEPS_MIN:
        raise ValueError(f"{len(samples)} steps are too few to fit")
    coefficients = _robust_fit(samples)
    predicted_ns = [coefficients.predict_ns(load) for load, _ in samples]
    ratios = sorted(
        min(10.0, wall_ns / p_ns) for (_, wall_ns), p_ns in zip(samples, predicted_ns, strict=True)
    )
    part = max(1, len(ratios) // RATIOS_KEPT)
    means = [fmean(ratios[at : at + part]) for at in range(0, len(ratios), part)]
    scale = sum(wall_ns for _, wall_ns in samples) / sum(predicted_ns) / fmean(means)
    changed = [one for one in records if isinstance(one, ReplicaChanged) and one.block_size]
    ready = changed[-1]
    limits = ReplicaLimits(
        ready.context_tokens_max, ready.block_size, ready.blocks_total, ready.sequences_max
    )
    return Calibration(coefficients, tuple(m * scale for m in means), limits, len(samples))


def _samples(records: Sequence[Record]) -> Iterator[tuple[int, Load, float]]:
    """Each step's end, load and wall time.

    The time is from the end of the step before where that was just now.
    """
    prompts = {one.id: one.prompt_tokens for one in records if isinstance(one, RequestArrived)}
    steps = sorted((one for one in records if isinstance(one, Step)), key=lambda one: one.t_ns)
    produced: dict[tuple[str, int], int] = {}
    pauses_ns = [
        pause for a, b in pairwise(steps) if (pause := b.t_ns - b.measured_ns - a.t_ns) >= 0
    ]
    usual_ns = median(one for one in pauses_ns if one < PAUSE_NS_MAX)
    last_ns = 0
    for step in steps:
        pause_ns = step.t_ns - step.measured_ns - last_ns
        last_ns = step.t_ns
        context = 0
        for key in step.decode:
            produced[key] = produced.get(key, 0) + 1
            context += prompts.get(key[0], 0) + produced[key]
        load = Load(len(step.decode), len(step.decode), context)
        for chunk in step.prefill:
            load = load.with_chunk(chunk.past_tokens, chunk.tokens)
        if load.tokens and not step.error:
            between = pause_ns if 0 <= pause_ns < PAUSE_NS_MAX else usual_ns
            yield step.t_ns, load, step.measured_ns + between


def _robust_fit(samples: Sequence[tuple[Load, float]]) -> Coefficients:
    """A fit to all samples, and another one to those that are not far from it."""
    first = fitted(samples)
    near = [s for s in samples if 1 / RATIO_MAX < s[1] / first.predict_ns(s[0]) < RATIO_MAX]
    return fitted(near)
