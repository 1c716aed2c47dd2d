"""What would help: changes of one thing each, with the gain that the same estimate predicts.

Called for reports after ``plan.py`` found a fleet. Each knob is a question that differs from the
answered one in one place; whether a change is acceptable is the reader's to decide.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sluice.planner.names import CannotPlan
from sluice.planner.plan import Plan, plan_with
from sluice.planner.predict import family_of
from sluice.planner.question import Question, published_in_fp4
from sluice.planner.shapes import ModelShape
from sluice.planner.tables import Tables

# Above this a burst of the arrivals is a breach of the targets.
UTILISATION_MAX = 0.9
# What gains less is within the estimate's last digits.
GAIN_MIN = 1.02


@dataclass(frozen=True, slots=True)
class Knob:
    """A change, and the planned rate per device that it gives, as a factor of the plan's."""

    change: str
    gain: float


def knobs(found: Plan) -> list[Knob]:
    """Every change that is possible, the largest gain first; below 1 it costs."""
    asked = replace(found.question, points=())
    tensor, calibration = found.model.deployment.layout.tensor, found.model.calibration
    # The closed form answers the same question again: a simulated rate is no measure for it.
    base = plan_with(asked, tensor, calibration).planned_rps_per_device
    tried = []
    for change, question in _changed(found):
        try:
            other = plan_with(question, question.tensor or 1, calibration)
        except CannotPlan:
            continue
        tried.append(Knob(change, other.planned_rps_per_device / base))
    return sorted(tried, key=lambda knob: -knob.gain)


def smaller_model(shape: ModelShape, entries: Tables) -> ModelShape | None:
    """The largest model of the same family with at most half of the weights, if there is one."""
    found = []
    for name in entries.models:
        if family_of(name) == family_of(shape.name):
            other = entries.model(name)
            if other.params <= 0.5 * shape.params:
                found.append(other)
    return max(found, key=lambda other: other.params, default=None)


def _changed(found: Plan) -> Iterator[tuple[str, Question]]:
    layout = found.model.deployment.layout
    asked = replace(found.question, tensor=layout.tensor, points=())
    yield f"tensor parallelism {2 * layout.tensor}", replace(asked, tensor=2 * layout.tensor)
    if layout.tensor > 1:
        yield f"tensor parallelism {layout.tensor // 2}", replace(asked, tensor=layout.tensor // 2)
    fixed = published_in_fp4(asked.shape)
    for name in ("fp8", "fp4"):
        peak = asked.accelerator.fp8_tflops if name == "fp8" else asked.accelerator.fp4_tflops
        if peak is not None and name != found.model.precision and not fixed:
            yield (
                f"weights in {name}",
                replace(asked, precision=name, kv_format=None, file_bytes=None),
            )
    yield from _of_requests(asked)
    yield from _of_engine(asked)


def _of_requests(asked: Question) -> Iterator[tuple[str, Question]]:
    """What clients would notice: other lengths, other targets, another model."""
    load, targets = asked.load, asked.targets
    shorter = replace(load.lengths, output=0.75 * load.lengths.output)
    yield (
        "max_tokens such that outputs are a quarter shorter",
        replace(asked, load=replace(load, lengths=shorter)),
    )
    cached = replace(load.lengths, cached=1.0 - 0.5 * (1.0 - load.lengths.cached))
    yield (
        "half of the computed prompt from the prefix cache",
        replace(asked, load=replace(load, lengths=cached)),
    )
    yield (
        "TPOT target half as long again",
        replace(asked, targets=replace(targets, tpot_s=1.5 * targets.tpot_s)),
    )
    yield (
        "TTFT target twice as long",
        replace(asked, targets=replace(targets, ttft_s=2.0 * targets.ttft_s)),
    )
    if asked.smaller is not None:
        yield (
            f"a smaller model: {asked.smaller.name}",
            replace(asked, shape=asked.smaller, file_bytes=None, beside=()),
        )


def _of_engine(asked: Question) -> Iterator[tuple[str, Question]]:
    """What the operator sets: batch limit, chunk, memory, utilisation."""
    load = asked.load
    for batch in (load.batch_max // 2, load.batch_max * 2):
        if batch >= 1:
            yield (
                f"at most {batch:,} requests in a batch",
                replace(asked, load=replace(load, batch_max=batch)),
            )
    for chunk in (asked.chunk_tokens / 4, asked.chunk_tokens * 2):
        if chunk >= 16:
            yield f"prefill in chunks of {chunk:,.0f} tokens", replace(asked, chunk_tokens=chunk)
    higher = min(asked.utilisation + 0.1, UTILISATION_MAX)
    if higher > asked.utilisation:
        yield (
            f"utilisation {higher:.2g}, with less room for bursts",
            replace(asked, utilisation=higher),
        )
