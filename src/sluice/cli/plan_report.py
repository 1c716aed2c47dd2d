"""A plan as ``sluice plan`` shows it: one JSON document, or lines for readers.

Called by ``plan.py``. It words and rounds what the planner found; nothing is estimated here.
"""

from typing import Any

from rich.console import Console
from rich.table import Table

from sluice.planner.names import shown_s
from sluice.planner.plan import Plan, knobs
from sluice.planner.predict import Band
from sluice.planner.steady import steady_state

_GIB = 2.0**30


def document(found: Plan, *, explain: bool) -> dict[str, Any]:
    """The plan as one JSON document."""
    replica, deployment = found.replica, found.model.deployment
    cost = found.cost_usd_per_hour
    result: dict[str, Any] = {
        "model": deployment.shape.name,
        "gpu": deployment.accelerator.name,
        "precision": found.model.precision,
        "tensor_parallel": deployment.layout.tensor,
        "data_parallel": deployment.layout.groups,
        "engine": found.model.engine_name,
        "per_replica": {
            "capacity_rps": _band(replica.capacity_rps),
            "slo_rps": _band(replica.slo_rps),
        },
        "replicas": found.replicas,
        "replicas_low": found.replicas_low,
        "replicas_high": found.replicas_high,
        "gpus": found.devices,
        "planned_share_of_slo_rate": found.planned_share,
        "planned_share_without_spare": found.share_without_spare,
        "kv": {
            "bytes_per_token": found.kv_bytes_per_token,
            "tokens_max": replica.kv_tokens_max,
            "sequences_max": replica.sequences_max,
        },
        "binding": replica.binding,
        "prefill_share": replica.prefill_share,
        "cost_usd_per_hour": None
        if cost is None
        else {"low": cost[0], "high": cost[1], "date": found.question.accelerator.price_date},
        "leaned_on": list(replica.residual.leaned_on),
        "notes": list(found.notes),
        "knobs": [{"change": each.change, "gain": each.gain} for each in knobs(found)],
    }
    if explain:
        result["explain"] = _explained(found)
    return result


def _band(band: Band) -> dict[str, float]:
    return {"estimate": band.estimate, "low": band.low, "high": band.high}


def _explained(found: Plan) -> dict[str, Any]:
    replica, model = found.replica, found.model
    lengths = found.question.load.lengths
    at = replica.at_slo
    concurrency = float(replica.sequences_max) if at is None else at.concurrency
    level, coefficients = model.level
    state = steady_state(model.deployment, lengths, concurrency, others=model.others)
    residual = model.residual(lengths, concurrency)
    return {
        "memory_gib": {name: value / _GIB for name, value in replica.budget.lines().items()},
        "coefficients": f"{level}, {model.fit.kind} fit of {model.fit.date}",
        "requests_in_replica": concurrency,
        "tpot_s": None if at is None else at.tpot_s,
        "ttft_s": None if at is None else at.ttft_s,
        "decode_step_s": coefficients.parts_s(state.decode),
        "step_with_prefill_s": coefficients.parts_s(state.mixed),
        "share_of_steps_with_prefill": state.mixed_share,
        "measured_over_calculated": {
            "log_mean": residual.mean,
            "log_half_width_80": residual.half_width,
        },
    }


def print_plan(found: Plan, *, explain: bool) -> None:
    """The same for readers."""
    console = Console(highlight=False)
    replica, question, model = found.replica, found.question, found.model
    layout = model.deployment.layout
    console.print(
        f"[bold]{_counted(found.replicas, 'replica')}, {found.devices} x "
        f"{question.accelerator.name}[/bold] for {_number(question.rate_rps)} req/s of "
        f"{question.shape.name} ({model.precision}, tensor parallel {layout.tensor}, "
        f"{model.engine_name})",
        soft_wrap=True,
    )
    for name, value in _rows(found):
        console.print(f"  {name:<22} {value}", soft_wrap=True)
    for note in found.notes:
        console.print(f"  note: {note}", soft_wrap=True)
    gains = knobs(found)
    if gains:
        console.print("What would help (SLO rate per GPU):")
        for knob in gains:
            console.print(f"  x {knob.gain:.2f}  {knob.change}")
    console.print("Leaned on (the nearest published measurements; they correct the formula):")
    for each in replica.residual.leaned_on:
        console.print(f"  {each}", soft_wrap=True)
    if explain:
        _print_explained(console, _explained(found))


def _rows(found: Plan) -> list[tuple[str, str]]:
    replica, question = found.replica, found.question
    high = "more than can be planned" if found.replicas_high is None else f"{found.replicas_high}"
    kv = (
        f"{found.kv_bytes_per_token:,.0f} bytes per token, {replica.kv_tokens_max:,} tokens, "
        f"{_counted(replica.sequences_max, 'request')} per replica"
    )
    target = f"p{question.targets.percentile:g} of TTFT and TPOT in target"
    bands = "bands, also those in (), hold the true value four times of five"
    ours = "this release of sluice serves its embedded engine itself"
    rows = [
        ("capacity per replica", f"{_range(replica.capacity_rps)} req/s, at any latency"),
        ("SLO rate per replica", f"{_range(replica.slo_rps)} req/s, {target}"),
        ("what binds", replica.binding),
        ("replicas, 80 % band", f"{found.replicas_low} to {high}; {bands}"),
        ("margins", _margins(found)),
        ("KV", kv),
        ("prefill", f"{replica.prefill_share:.0%} of the time"),
        ("beyond the SLO rate", "sluice queues while targets hold, then degrades or refuses"),
        ("engine", f"estimated for {found.model.engine_name}; {ours}"),
    ]
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
    if question.spare:
        without = _percent(found.share_without_spare)
        words += f", {without} when {_counted(question.spare, 'replica')} failed"
    return words


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


def _print_explained(console: Console, explained: dict[str, Any]) -> None:
    table = Table(title="What the numbers rest on", show_header=False)
    for name, value in explained.items():
        if isinstance(value, dict):
            for part, number in value.items():
                unit = f"{number * 1e3:.3f} ms" if name.endswith("_s") else f"{number:.3f}"
                table.add_row(f"{name.removesuffix('_s').replace('_', ' ')}: {part}", unit)
        elif isinstance(value, float):
            unit = shown_s(value) if name.endswith("_s") else f"{value:.3f}"
            table.add_row(name.removesuffix("_s").replace("_", " "), unit)
        else:
            table.add_row(name.replace("_", " "), str(value))
    console.print(table)
