"""A plan for readers of a terminal.

Called by ``plan.py``. It words and rounds what the planner found; nothing is estimated here.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

from sluice.cli.console import plain_console
from sluice.cli.plan_question import SlotsAnswer
from sluice.planner.candidates import Candidates
from sluice.planner.estimate import Moment
from sluice.planner.explain import measured_with
from sluice.planner.knobs import GAIN_MIN
from sluice.planner.names import shown_s
from sluice.planner.plan import Plan
from sluice.planner.predict import Band

_GIB = 2.0**30
_BINDING = {
    "tpot": "time per token: more requests in a replica would miss the TPOT target",
    "ttft": "time to first token: more requests per second would miss the TTFT target",
    "e2e": "end-to-end time: a higher rate would miss that target",
    "kv memory": "KV memory: no more requests fit into a replica",
    "batch limit": "batch limit: the engine takes no more requests into a step",
    "capacity": "capacity: no higher rate leaves a stable queue",
}


def print_plan(
    found: Candidates, shown: dict[str, Any], explained: dict[str, dict[str, Any]]
) -> None:
    """The best plan and what is beside it; ``shown`` is the same as a document, and ``explained``
    what its numbers are where that was asked for."""
    console = plain_console()
    best = found.best
    replica, model = best.replica, best.model
    console.print(headline(best), soft_wrap=True, style="bold")
    for name, value in rows_of(best):
        console.print(f"  {name:<22} {value}", soft_wrap=True)
    for note in best.notes:
        console.print(f"  note: {note}", soft_wrap=True)
    _print_knobs(console, shown["knobs"])
    _print_others(console, found)
    console.print(
        "Leaned on (your measurements):"
        if model.calibration is not None
        else "Leaned on (the nearest published measurements; they correct the formula):"
    )
    for each in replica.residual.leaned_on:
        console.print(f"  {each}", soft_wrap=True)
    if explained:
        _print_explained(console, explained)


def headline(found: Plan) -> str:
    """The fleet in one line."""
    question, model = found.question, found.model
    layout = model.deployment.layout
    spread = f"tensor parallel {layout.tensor}"
    if layout.groups > 1:
        spread += f", data parallel {layout.groups}"
    return (
        f"{_counted(found.replicas, 'replica')}, {found.devices:,} x {question.accelerator.name} "
        f"for {_number(question.rate_rps)} req/s of {question.shape.name} ({model.precision}, "
        f"{spread}, {model.engine_name})"
    )


def _print_knobs(console: Console, tried: list[dict[str, Any]]) -> None:
    """Those that help one by one, the others in one line with what they would cost."""
    helping = [knob for knob in tried if knob["gain"] > GAIN_MIN]
    if helping:
        console.print("What would help (planned rate per GPU):")
    for knob in helping:
        console.print(f"  x {knob['gain']:.2f}  {knob['change']}")
    rest = [f"{knob['change']} x {knob['gain']:.2f}" for knob in tried if knob not in helping]
    if rest:
        console.print(f"What would not: {'; '.join(rest)}", soft_wrap=True)


def _print_others(console: Console, found: Candidates) -> None:
    if found.others:
        console.print("Dearer and faster per token:")
    for each in found.others:
        deployment = each.model.deployment
        cost = each.cost_usd_per_hour
        price = "" if cost is None else f", {_number(cost[0])} USD per hour or more"
        console.print(
            f"  {each.devices:,} x {deployment.accelerator.name}, {each.model.precision}, tensor "
            f"parallel {deployment.layout.tensor}: TPOT {shown_s(each.at_forecast.tpot_s)} at "
            f"{_number(each.question.rate_rps)} req/s{price}",
            soft_wrap=True,
        )
    for reason in found.refused:
        console.print(f"Not possible: {reason}", soft_wrap=True)


def print_slots(found: SlotsAnswer) -> None:
    """Whether parallel slots fit, each line of the memory of one GPU, and the nearest that fit."""
    console = plain_console()
    verdict = found.verdict
    slots = verdict.slots
    words = "fit" if verdict.fits else "do not fit"
    console.print(
        Text.assemble(
            (f"{_counted(slots.count, 'slot')} of {slots.request_tokens:,} tokens {words}", "bold"),
            f" with {found.model} ({found.precision}) on {found.gpus} x {found.gpu}",
        ),
        soft_wrap=True,
    )
    if slots.sharing == "divided":
        console.print(
            f"  {slots.context_tokens:,} tokens divided among {slots.count}: each request has a "
            f"context of {slots.request_tokens:,}"
        )
    for name, value in verdict.lines().items():
        console.print(f"  {name:<22} {value / _GIB:8.2f} GiB")
    console.print(f"  {'KV':<22} {found.kv_bytes_per_token:,.0f} bytes per token")
    if not verdict.fits:
        console.print(f"  nearest: {_nearest_slots(found)}", soft_wrap=True)
    console.print(
        "  buffers are those of measured start-ups: a real load may differ by more than 5 %, "
        "compare the KV pool that the engine logs",
        soft_wrap=True,
    )


def _nearest_slots(found: SlotsAnswer) -> str:
    verdict = found.verdict
    slots = verdict.slots
    if verdict.request_tokens_max < 1:
        return "not even the weights leave room; more GPUs per replica or a smaller format"
    context = f"{slots.count} slots at {verdict.request_tokens_max:,}"
    if verdict.count_max < 1:
        return context
    return f"{_counted(verdict.count_max, 'slot')} at {slots.request_tokens:,} tokens, or {context}"


def rows_of(found: Plan) -> list[tuple[str, str]]:
    """What there is to say of the fleet, by name."""
    replica, question = found.replica, found.question
    high = "more than can be planned" if found.replicas_high is None else f"{found.replicas_high:,}"
    kv = (
        f"{found.kv_bytes_per_token:,.0f} bytes per token, {replica.kv_tokens_max:,} tokens, "
        f"{_counted(replica.sequences_max, 'request')} per replica"
    )
    target = f"p{question.targets.percentile:g} in the targets"
    bands = "bands, also those in (), hold the true value four times of five"
    rows = [
        ("capacity per replica", f"{_range(replica.capacity_rps)} req/s, at any latency"),
        ("SLO rate per replica", f"{_range(replica.slo_rps)} req/s, {target}"),
        ("  latencies there", _latencies(found, replica.at_slo)),
        (f"at {_number(question.rate_rps)} req/s", _latencies(found, found.at_forecast)),
        ("what binds", _BINDING[replica.binding]),
        ("replicas, 80 % band", f"{found.replicas_low:,} to {high}; {bands}"),
        ("margins", _margins(found)),
        ("KV", kv),
        ("prefill", f"{replica.prefill_share:.0%} of the time"),
        ("beyond the SLO rate", "sluice queues while targets hold, then degrades or refuses"),
    ]
    if found.model.calibration is None:
        rows.append(("measured with", measured_with(found.model)))
    if found.cost_usd_per_hour is not None:
        rows.append(("cost", _cost(found, *found.cost_usd_per_hour)))
    return rows


def _margins(found: Plan) -> str:
    question = found.question
    words = (
        f"{question.headroom:.0%} headroom and {question.utilisation:.0%} utilisation, in whole "
        f"replicas: {_percent(found.planned_share)} of the SLO rate in use at "
        f"{_number(question.rate_rps)} req/s"
    )
    if found.may_fail:
        without = _percent(found.share_without_spare)
        zone = " (a zone)" if question.zones > 1 and found.may_fail > question.spare else ""
        words += f", {without} when {_counted(found.may_fail, 'replica')}{zone} failed"
    return words


def _latencies(found: Plan, at: Moment | None) -> str:
    assert at is not None  # noqa: S101 - a plan without a rate is refused
    question = found.question
    retrieval_s = question.targets.retrieval_s
    whole_s = at.e2e_s(question.load.lengths.output) + retrieval_s
    words = (
        f"TTFT {shown_s(at.ttft_s + retrieval_s)}, TPOT {shown_s(at.tpot_s)}, end-to-end "
        f"{shown_s(whole_s)} at p{question.targets.percentile:g}, with "
        f"{at.concurrency:.3g} requests in a replica"
    )
    return words + (f"; {shown_s(retrieval_s)} of it retrieval" if retrieval_s else "")


def _cost(found: Plan, low: float, high: float) -> str:
    date = found.question.accelerator.price_date or "undated"
    if low == high:
        return f"{_number(low)} USD per hour (price {date})"
    return (
        f"{_number(low)} to {_number(high)} USD per hour: the lowest and the highest price that "
        f"sellers ask for this GPU (prices {date})"
    )


def _range(band: Band) -> str:
    return f"{_number(band.estimate)} ({_number(band.low)} to {_number(band.high)})"


def _number(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:.3g}" if value < 100.0 else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{100.0 * share:.2g}%"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _print_explained(console: Console, explained: dict[str, dict[str, Any]]) -> None:
    console.print("What each number is:")
    for path, each in explained.items():
        value = "" if each["value"] is None else f" = {_value(each['value'])} {each['unit']}"
        inputs = ", ".join(f"{name} {_value(held)}" for name, held in each["inputs"].items())
        console.print(Text.assemble("  ", (path, "bold"), value), soft_wrap=True)
        given = f" ({inputs})" if inputs else ""
        console.print(f"      {each['formula']}{given}", soft_wrap=True)
        console.print(f"      from: {each['source']}", soft_wrap=True)


def _value(value: float | str) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
