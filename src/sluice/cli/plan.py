"""``sluice plan``: the fleet for a load and its targets, with what it rests on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from sluice.cli.options import json_option, print_json
from sluice.config.units import parse_duration_s, parse_size_bytes
from sluice.planner.estimate import Load, Targets
from sluice.planner.names import CannotPlan
from sluice.planner.plan import ENGINES, Plan, Question, knobs, plan
from sluice.planner.predict import Band
from sluice.planner.steady import Lengths, steady_state
from sluice.planner.tables import own_tables, with_user_table
from sluice.planner.weight_files import weights_bytes

_EXAMPLES = """\b
Examples:
  sluice plan --model llama-3.1-70b --gpu h100 --rps 1000 \\
      --input 3500 --output 500 --ttft 1s --tpot 50ms
  sluice plan --model gpt-oss-120b --gpu b200 --tp 2 --rps 50 \\
      --input 1000 --output 300 --ttft 500ms --tpot 20ms --explain
  sluice plan --model ./config.json --gpu mi300x --precision bf16 --rps 5 \\
      --input 2000 --output 200 --ttft 2s --tpot 80ms --json
"""
_GIB = 2.0**30


class _Duration(click.ParamType[float]):
    """Seconds, written with a unit."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration_s(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Refusal(click.ClickException):
    """A question without an answer is bad input."""

    exit_code = 2


@click.command(epilog=_EXAMPLES)
@click.option("--model", required=True, help="Name in the table, or the path of a config.json.")
@click.option("--gpu", required=True, help="Name of the accelerator in the table.")
@click.option("--tp", type=int, help="Tensor parallelism. Default: what needs the fewest GPUs.")
@click.option("--dp", type=int, default=1, show_default=True, help="Groups that share experts.")
@click.option("--precision", help="bf16, fp8, fp4, int4 …; default: fp8 where the GPU has it.")
@click.option("--kv", "kv_format", help="Format of the KV cache. Default: that of the precision.")
@click.option("--engine", default="vllm", show_default=True, help=f"One of {', '.join(ENGINES)}.")
@click.option("--rps", type=float, required=True, help="Requests per second, all together.")
@click.option("--input", "prompt", type=float, required=True, help="Mean prompt tokens.")
@click.option("--output", type=float, required=True, help="Mean output tokens.")
@click.option("--cached", type=float, default=0.0, help="Share of the prompt in a prefix cache.")
@click.option("--ttft", type=_Duration(), required=True, help='Target, for example "1s".')
@click.option("--tpot", type=_Duration(), required=True, help='Target, for example "50ms".')
@click.option("--percentile", type=float, default=95.0, show_default=True)
@click.option("--headroom", type=float, default=0.3, show_default=True, help="Above --rps.")
@click.option("--utilisation", type=float, default=0.75, show_default=True, help="Of the SLO rate.")
@click.option("--spare", type=int, default=0, show_default=True, help="Replicas that may fail.")
@click.option("--tables", type=click.Path(path_type=Path), help="TOML with your models and GPUs.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="GGUF or safetensors file or folder: read the size of the weights from it.",
)
@click.option(
    "--beside", multiple=True, metavar="NAME=SIZE", help="Other weights, as encoder=1.2GiB."
)
@click.option("--explain", is_flag=True, help="Show what each number rests on.")
@json_option
def command(*, as_json: bool, explain: bool, **asked: Any) -> None:
    """How many GPUs serve a load within its targets, what binds, and what would help."""
    try:
        found = plan(_question(asked))
    except CannotPlan as error:
        raise _Refusal(str(error)) from None
    if as_json:
        print_json(document(found, explain=explain))
    else:
        _print(found, explain=explain)


def _question(asked: Mapping[str, Any]) -> Question:
    """The question in the planner's words; options that it calls the same pass as they are."""
    entries = own_tables()
    if asked["tables"] is not None:
        entries = with_user_table(entries, asked["tables"])
    weights = asked["weights"]
    return Question(
        shape=entries.model(asked["model"]),
        accelerator=entries.accelerator(asked["gpu"]),
        rate_rps=asked["rps"],
        load=Load(Lengths(asked["prompt"], asked["output"], asked["cached"])),
        targets=Targets(asked["ttft"], asked["tpot"], asked["percentile"]),
        precision=asked["precision"],
        kv_format=asked["kv_format"],
        tensor=asked["tp"],
        groups=asked["dp"],
        engine_name=asked["engine"],
        headroom=asked["headroom"],
        utilisation=asked["utilisation"],
        spare=asked["spare"],
        file_bytes=None if weights is None else float(weights_bytes(weights)),
        beside=tuple(_named_size(text) for text in asked["beside"]),
    )


def _named_size(text: str) -> tuple[str, float]:
    name, equals, size = text.partition("=")
    if not (name and equals):
        raise CannotPlan(f"--beside {text!r} is not NAME=SIZE, for example encoder=1.2GiB")
    try:
        return name, float(parse_size_bytes(size))
    except ValueError as error:
        raise CannotPlan(f"--beside {name}: {error}") from None


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


def _print(found: Plan, *, explain: bool) -> None:
    console = Console(highlight=False)
    replica, question, model = found.replica, found.question, found.model
    layout = model.deployment.layout
    console.print(
        f"[bold]{found.replicas} replicas, {found.devices} x {question.accelerator.name}[/bold] "
        f"for {question.rate_rps:g} req/s of {question.shape.name} ({model.precision}, "
        f"tensor parallel {layout.tensor}, {model.engine_name})"
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
    console.print("Leaned on:")
    for each in replica.residual.leaned_on:
        console.print(f"  {each}", soft_wrap=True)
    if explain:
        _print_explained(console, _explained(found))


def _rows(found: Plan) -> list[tuple[str, str]]:
    replica, question = found.replica, found.question
    cost = found.cost_usd_per_hour
    high = "more than can be planned" if found.replicas_high is None else f"{found.replicas_high}"
    margins = (
        f"{question.headroom:.0%} headroom and {question.utilisation:.0%} utilisation: "
        f"{found.planned_share:.0%} of the SLO rate in use at {question.rate_rps:g} req/s"
    )
    kv = (
        f"{found.kv_bytes_per_token:,.0f} bytes per token, {replica.kv_tokens_max:,} tokens, "
        f"{replica.sequences_max:,} requests per replica"
    )
    target = f"p{question.targets.percentile:g} in target"
    rows = [
        ("capacity per replica", f"{_range(replica.capacity_rps)} req/s, any latency"),
        ("SLO rate per replica", f"{_range(replica.slo_rps)} req/s, {target}"),
        ("what binds", replica.binding),
        ("replicas, 80 % band", f"{found.replicas_low} to {high}"),
        ("margins", margins),
        ("KV", kv),
        ("prefill", f"{replica.prefill_share:.0%} of the time"),
        ("beyond the SLO rate", "sluice queues while targets hold, then degrades or refuses"),
    ]
    if cost is not None:
        date = question.accelerator.price_date or "undated"
        rows.append(("cost", f"{cost[0]:,.0f} to {cost[1]:,.0f} USD per hour (prices {date})"))
    return rows


def _range(band: Band) -> str:
    return f"{band.estimate:.3g} ({band.low:.3g} to {band.high:.3g})"


def _print_explained(console: Console, explained: dict[str, Any]) -> None:
    table = Table(title="What the numbers rest on", show_header=False)
    for name, value in explained.items():
        if isinstance(value, dict):
            for part, number in value.items():
                unit = f"{number * 1e3:.3f} ms" if name.endswith("_s") else f"{number:.3f}"
                table.add_row(f"{name.removesuffix('_s').replace('_', ' ')}: {part}", unit)
        elif isinstance(value, float):
            unit = f"{value * 1e3:.2f} ms" if name.endswith("_s") else f"{value:.3f}"
            table.add_row(name.removesuffix("_s").replace("_", " "), unit)
        else:
            table.add_row(name.replace("_", " "), str(value))
    console.print(table)
