"""``sluice plan``: the fleet for a load and its targets, with what it rests on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from sluice.cli.options import print_json
from sluice.cli.plan_report import document, print_plan
from sluice.cli.plan_tables import listed, print_listed
from sluice.config.units import parse_duration_s, parse_size_bytes
from sluice.planner.estimate import Load, Targets
from sluice.planner.names import CannotPlan, NoFleet
from sluice.planner.plan import ENGINES, Question, plan
from sluice.planner.steady import Lengths
from sluice.planner.tables import Tables, own_tables, with_user_table
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
_EPILOG = f"""{_EXAMPLES}
\b
How to read a plan:
  ranges in ()          80 % bands: the true value is inside four times of five
  capacity              most requests per second with a stable queue, however
                        long they take
  SLO rate              most requests per second of which --percentile % meet
                        both targets
  replicas, 80 % band   what the two ends of the SLO rate's band would need
  cost                  lowest to highest price that sellers ask for the GPUs
  leaned on             the published measurements nearest to the question;
                        they correct the formula and set the width of bands

\b
--tables FILE adds models and GPUs, or replaces ours of the same name:
  [models.my-model]             # the keys of its config.json
  num_hidden_layers = 32
  hidden_size = 4096
  num_attention_heads = 32
  num_key_value_heads = 8
  intermediate_size = 14336
  vocab_size = 128256
  [hardware.my-gpu]
  architecture = "hopper"       # whose measurements are the nearest
  memory_gib = 79.6             # as the driver shows it
  bandwidth_gb_s = 3350.0
  bf16_tflops = 989.0           # dense; also fp8_tflops, fp4_tflops
  link = "nvlink"               # or "pcie", the default
  link_gb_s = 900.0             # both directions
  usd_per_hour_low = 2.0        # optional, as usd_per_hour_high, price_date

\b
Exit codes: 0 a plan, 1 no fleet can do this, 2 bad input.
"""


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


class _BadInput(click.ClickException):
    """A question that is wrong by itself."""

    exit_code = 2


def _refused(error: CannotPlan) -> click.ClickException:
    """That no fleet does what was asked is a finding, and exits with 1."""
    if isinstance(error, NoFleet):
        return click.ClickException(str(error))
    return _BadInput(str(error))


def _print_list(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """Runs before click misses the options of a plan, and after ``--tables`` and ``--json``."""
    if not wanted:
        return
    try:
        document = listed(_entries(context.params.get("tables")))
    except CannotPlan as error:
        raise _refused(error) from None
    if context.params.get("as_json"):
        print_json(document)
    else:
        print_listed(document)
    context.exit()


@click.command(epilog=_EPILOG)
@click.option("--model", required=True, help="A name that --list shows, or a config.json.")
@click.option("--gpu", required=True, help="A name that --list shows.")
@click.option("--tp", type=int, help="Tensor parallelism. Default: what needs the fewest GPUs.")
@click.option("--dp", type=int, default=1, show_default=True, help="Groups that share experts.")
@click.option("--precision", help="bf16, fp8, fp4, int4 …; default: fp8 where the GPU has it.")
@click.option("--kv", "kv_format", help="Format of the KV cache. Default: that of the precision.")
@click.option(
    "--engine",
    default="vllm",
    show_default=True,
    help=f"Engine that the estimate is for: {', '.join(ENGINES)}.",
)
@click.option("--rps", type=float, required=True, help="Requests per second, all together.")
@click.option("--input", "prompt", type=float, required=True, help="Mean prompt tokens.")
@click.option("--output", type=float, required=True, help="Mean output tokens.")
@click.option("--cached", type=float, default=0.0, help="Share of the prompt in a prefix cache.")
@click.option("--ttft", type=_Duration(), required=True, help='Target, for example "1s".')
@click.option("--tpot", type=_Duration(), required=True, help='Target, for example "50ms".')
@click.option(
    "--percentile",
    type=float,
    default=95.0,
    show_default=True,
    help="How many requests of 100 meet the targets.",
)
@click.option(
    "--headroom",
    type=float,
    default=0.3,
    show_default=True,
    help="How much more than --rps may come, as a share of it.",
)
@click.option(
    "--utilisation",
    type=float,
    default=0.75,
    show_default=True,
    help="Share of its SLO rate that a replica is given at most.",
)
@click.option("--spare", type=int, default=0, show_default=True, help="Replicas that may fail.")
@click.option(
    "--tables",
    type=click.Path(path_type=Path),
    is_eager=True,
    help="TOML file with models and GPUs of your own; --help shows its form.",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="GGUF or safetensors file or folder: read the size of the weights from it.",
)
@click.option(
    "--beside", multiple=True, metavar="NAME=SIZE", help="Other weights, as encoder=1.2GiB."
)
@click.option("--explain", is_flag=True, help="Show what each number rests on.")
@click.option("--json", "as_json", is_flag=True, is_eager=True, help="Print one JSON document.")
@click.option(
    "--list",
    is_flag=True,
    expose_value=False,
    callback=_print_list,
    help="List models, GPUs, precisions and engines, and end.",
)
def command(*, as_json: bool, explain: bool, **asked: Any) -> None:
    """How many GPUs serve a load within its targets, what binds, and what would help.

    The estimate is for the engine that --engine names, from published measurements. This release
    of sluice serves its embedded engine itself and puts no such engine behind its gateway.
    """
    try:
        found = plan(_question(asked))
    except CannotPlan as error:
        raise _refused(error) from None
    if as_json:
        print_json(document(found, explain=explain))
    else:
        print_plan(found, explain=explain)


def _question(asked: Mapping[str, Any]) -> Question:
    """The question in the planner's words; options that it calls the same pass as they are."""
    entries = _entries(asked["tables"])
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


def _entries(path: Path | None) -> Tables:
    return own_tables() if path is None else with_user_table(own_tables(), path)


def _named_size(text: str) -> tuple[str, float]:
    name, equals, size = text.partition("=")
    if not (name and equals):
        raise CannotPlan(f"--beside {text!r} is not NAME=SIZE, for example encoder=1.2GiB")
    try:
        return name, float(parse_size_bytes(size))
    except ValueError as error:
        raise CannotPlan(f"--beside {name}: {error}") from None
