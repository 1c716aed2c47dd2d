"""What not even an empty replica can do: targets below one step or below one prefill.

Called by ``plan.py`` before it looks for a rate. A target is refused only where it is below the
floor at the fast edge of the band, and the answer names what a lone request is expected to take.
"""

from math import exp

from sluice.planner.estimate import LEAST, Load, Moment, Targets, moment
from sluice.planner.names import NoFleet, shown_s
from sluice.planner.predict import StepModel


def check_floors(model: StepModel, load: Load, targets: Targets) -> None:
    """Raises ``NoFleet`` with the reason and the nearest possible where a target is below the
    floor of this deployment."""
    if targets.engine_ttft_s <= 0:
        raise NoFleet(
            f"retrieval takes {shown_s(targets.retrieval_s)} of a TTFT target of "
            f"{shown_s(targets.ttft_s)}: nothing is left for the engine; ask for a TTFT above "
            f"{shown_s(targets.retrieval_s)} or make retrieval faster"
        )
    share = targets.percentile / 100.0
    residual = model.residual(load.lengths, 1.0)
    fast = moment(model, load, LEAST, share, exp(-residual.half_width))
    step_s = model.calculated_s(load.lengths, 1.0) * exp(residual.mean - residual.half_width)
    usual = moment(model, load, LEAST, share, 1.0)
    deployment = model.deployment
    what = f"{deployment.shape.name} on {deployment.layout.devices} x {deployment.accelerator.name}"
    if targets.tpot_s < step_s:
        raise NoFleet(
            f"TPOT {shown_s(targets.tpot_s)} is below one step of {what}: a lone request takes "
            f"about {shown_s(usual.tpot_s)} per token; ask for at least that, more tensor "
            f"parallelism, a smaller format or a faster device"
        )
    if targets.engine_ttft_s < fast.ttft_s:
        raise NoFleet(
            f"TTFT {shown_s(targets.ttft_s)} is below the prefill of {load.lengths.prompt:.0f} "
            f"tokens on {what}: a lone request takes about "
            f"{shown_s(usual.ttft_s + targets.retrieval_s)}{_after(targets)}; ask for at least "
            f"that, shorter prompts, more tensor parallelism or a faster device"
        )
    _check_whole(load, targets, (fast, usual), what)


def _check_whole(load: Load, targets: Targets, alone: tuple[Moment, Moment], what: str) -> None:
    """Of the end-to-end target: retrieval, the first token and all others in sequence."""
    output = load.lengths.output
    fast_s, usual_s = (targets.retrieval_s + each.e2e_s(output) for each in alone)
    if targets.e2e_s is None or targets.e2e_s >= fast_s:
        return
    spare_s = targets.e2e_s - targets.retrieval_s - alone[1].ttft_s
    fits = int(spare_s / alone[1].tpot_s) + 1 if spare_s > 0 else 0
    nearest = f"or at most {fits} output tokens" if fits >= 1 else "or shorter prompts"
    raise NoFleet(
        f"end-to-end {shown_s(targets.e2e_s)} is below what {output:.0f} tokens take on {what}: a "
        f"lone request takes about {shown_s(usual_s)}{_after(targets)}; ask for at least that, "
        f"{nearest}"
    )


def no_rate(model: StepModel, load: Load, targets: Targets, binding: str) -> NoFleet:
    """The refusal where the percentile of a lone request already misses a target."""
    alone = moment(model, load, LEAST, targets.percentile / 100.0, 1.0)
    ttft_s = alone.ttft_s + targets.retrieval_s
    return NoFleet(
        f"no rate meets the targets on {model.deployment.layout.devices} x "
        f"{model.deployment.accelerator.name}: {binding} is missed by a lone request in the "
        f"replica, where p{targets.percentile:g} of TTFT is about {shown_s(ttft_s)} and of TPOT "
        f"{shown_s(alone.tpot_s)}; ask for at least that, or use more tensor parallelism"
    )


def _after(targets: Targets) -> str:
    return f" with {shown_s(targets.retrieval_s)} of retrieval" if targets.retrieval_s else ""
