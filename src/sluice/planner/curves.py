"""A plan as curves for plots: latency against load, throughput against speed, and parts of a whole.

Called for the report in HTML. The points are moments of the same estimate that the plan is made of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from sluice.planner.estimate import Moment, moment, places
from sluice.planner.plan import Plan

# Concurrencies tried per doubling.
DENSITY = 4
# A latency this many times its target says no more than that it is missed.
BEYOND = 3.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Moments of one deployment with more and more requests in a replica, up to what it holds."""

    name: str
    devices: int
    output: float
    moments: tuple[Moment, ...]

    def frontier(self) -> list[tuple[float, float]]:
        """Seconds per token, and output tokens per second of one device."""
        return [(each.tpot_s, each.rate_rps * self.output / self.devices) for each in self.moments]


def curve_of(found: Plan) -> Curve:
    """From a lone request to a full replica or far beyond the targets."""
    model, question = found.model, found.question
    held, _ = places(model, question.load)
    share = question.targets.percentile / 100.0
    moments: list[Moment] = []
    step, concurrency = 2.0 ** (1.0 / DENSITY), 1.0
    while concurrency < held:
        each = moment(model, question.load, concurrency, share, 1.0)
        # Rates that fall again are not reached: the queue grows instead.
        if not isfinite(each.ttft_s) or (moments and each.rate_rps <= moments[-1].rate_rps):
            break
        moments.append(each)
        late = each.tpot_s / question.targets.tpot_s, each.ttft_s / question.targets.ttft_s
        if max(late) > BEYOND:
            break
        concurrency *= step
    layout = model.deployment.layout
    name = f"{question.accelerator.name} {model.precision}, tensor parallel {layout.tensor}"
    return Curve(name, layout.devices, question.load.lengths.output, tuple(moments))


def step_parts_s(found: Plan) -> Mapping[str, Mapping[str, float]]:
    """Where the time of a step goes at the SLO rate, with and without prefill in it."""
    at = found.replica.at_slo
    assert at is not None  # noqa: S101 - a plan without a rate is refused
    state = found.model.steady(found.question.load.lengths, at.concurrency)
    _, coefficients = found.model.level
    return {
        "decode step": coefficients.parts_s(state.decode),
        "step with prefill": coefficients.parts_s(state.mixed),
    }
