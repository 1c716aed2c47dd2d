"""``sluice plan``: the fleet for a load and its targets, with what it rests on."""

from pathlib import Path
from typing import Any

import click

from sluice.cli.options import WHOLE, BadInput, print_json
from sluice.cli.plan_document import document, explanations, slots_document
from sluice.cli.plan_page import write_page
from sluice.cli.plan_question import answer, answer_slots, entries_of, missing
from sluice.cli.plan_report import print_plan, print_slots
from sluice.cli.plan_tables import listed, print_listed
from sluice.cli.retrieval_options import retrieval_options
from sluice.config.units import parse_duration_s
from sluice.planner.estimate import BATCH_MAX
from sluice.planner.memory import MEMORY_SHARE
from sluice.planner.names import CannotPlan, NoFleet
from sluice.planner.question import ENGINES
from sluice.planner.steady import CHUNK_TOKENS_MAX

_EXAMPLES = """\b
Examples:
  sluice plan --model llama-3.1-70b --gpu h100 --rps 1000 \\
      --input 3500 --output 500 --ttft 1s --tpot 50ms
  sluice plan --model gpt-oss-120b --gpu b200 --tp 2 --rps 50 \\
      --input 1000 --output 300 --ttft 500ms --tpot 20ms --explain
  sluice plan --model llama-3.1-70b --gpu h100,h200,b200 --precision fp8,fp4 \\
      --rps 100 --input 1000 --output 300 --ttft 1s --tpot 50ms --html plan.html
  sluice plan --model llama-3.1-8b --gpu h100 --tp 1 --rps 40 --input 1000 \\
      --output 300 --ttft 1s --tpot 40ms --calibrate concurrency=64,tpot=15ms
  sluice plan --model llama-3.1-8b --gpu l4 --slots 4 --context 32768
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
  margins               headroom and utilisation multiply: 30 % and 75 % leave
                        58 % of the SLO rate in use at --rps

\b
--calibrate: a measurement of this deployment overrides what was published.
  rate=2.1,tpot=31ms              requests per second of one replica, and the
                                  median time between tokens at that rate
  concurrency=64,tpot=31ms        or how many requests are in it; ttft=400ms
                                  (median) may follow both
  result.json                     what sluice bench --json wrote
  JOURNAL                         the folder of a journal: its steps
The best point is at about half of the load; more points also turn the curve.

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
  [prices.h100]                 # prices alone, of a GPU that has an entry
  usd_per_hour_low = 2.0        # and, where they differ, usd_per_hour_high
  price_date = "2026-11"

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


def _refused(error: CannotPlan) -> click.ClickException:
    """That no fleet does what was asked is a finding, and exits with 1."""
    if isinstance(error, NoFleet):
        return click.ClickException(str(error))
    return BadInput(str(error))


def _print_list(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """Runs before click misses the options of a plan, and after ``--tables`` and ``--json``."""
    if not wanted:
        return
    try:
        document = listed(entries_of(context.params.get("tables")))
    except CannotPlan as error:
        raise _refused(error) from None
    if context.params.get("as_json"):
        print_json(document)
    else:
        print_listed(document)
    context.exit()


@click.command(epilog=_EPILOG)
@click.option("--model", help="A name that --list shows, or a config.json.")
@click.option("--gpu", "gpus", multiple=True, help="A name that --list shows; several with commas.")
@click.option("--tp", type=WHOLE, help="Tensor parallelism. Default: what needs the fewest GPUs.")
@click.option("--dp", type=WHOLE, default=1, show_default=True, help="Groups that share experts.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    help="bf16, fp8, fp4, int4 …, or several with commas; default: fp8 where the GPU has it.",
)
@click.option("--kv", "kv_format", help="Format of the KV cache. Default: that of the precision.")
@click.option(
    "--engine",
    default="vllm",
    show_default=True,
    help=f"Engine that the estimate is for: {', '.join(ENGINES)}.",
)
@click.option("--rps", type=float, help="Requests per second, all together.")
@click.option("--input", "prompt", type=float, help="Mean prompt tokens.")
@click.option("--output", type=float, help="Mean output tokens.")
@click.option(
    "--output-variation",
    type=float,
    default=0.0,
    show_default=True,
    help="Standard deviation of outputs over their mean; chat has about 1.",
)
@click.option("--cached", type=float, default=0.0, help="Share of the prompt in a prefix cache.")
@click.option("--ttft", type=_Duration(), help='Target, for example "1s".')
@click.option("--tpot", type=_Duration(), help='Target, for example "50ms".')
@click.option(
    "--e2e", type=_Duration(), help="Target from the question to the last token, of a mean output."
)
@retrieval_options
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
@click.option("--spare", type=WHOLE, default=0, show_default=True, help="Replicas that may fail.")
@click.option(
    "--zones",
    type=WHOLE,
    default=1,
    show_default=True,
    help="Zones that replicas are spread over; one of several may fail.",
)
@click.option(
    "--batch",
    type=WHOLE,
    default=BATCH_MAX,
    show_default=True,
    help="Most requests in one step of an engine (vLLM: --max-num-seqs).",
)
@click.option(
    "--chunk",
    type=WHOLE,
    default=CHUNK_TOKENS_MAX,
    show_default=True,
    help="Most prompt tokens in one step (vLLM: --max-num-batched-tokens).",
)
@click.option(
    "--memory-share",
    type=float,
    default=MEMORY_SHARE,
    show_default=True,
    help="Share of the memory that the engine takes.",
)
@click.option(
    "--calibrate", multiple=True, metavar="POINT", help="A measurement of yours; see below."
)
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
@click.option(
    "--simulate",
    type=WHOLE,
    metavar="REQUESTS",
    help="Find the SLO rate by simulating sluice's policy, so many requests a run.",
)
@click.option("--slots", type=WHOLE, help="Ask instead whether so many parallel requests fit.")
@click.option("--context", type=WHOLE, help="With --slots: tokens that each slot is given.")
@click.option("--divided", is_flag=True, help="With --slots: --context is divided among them.")
@click.option("--explain", is_flag=True, help="Show formula, inputs and source of each number.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a report with plots to this file; it loads nothing.",
)
@click.option("--json", "as_json", is_flag=True, is_eager=True, help="Print one JSON document.")
@click.option(
    "--list",
    is_flag=True,
    expose_value=False,
    callback=_print_list,
    help="List models, GPUs, precisions and engines, and end.",
)
def command(*, as_json: bool, explain: bool, page: Path | None, **asked: Any) -> None:
    """How many GPUs serve a load within its targets, what binds, and what would help.

    The estimate is for the engine that --engine names, from published measurements or your own.
    With several GPUs or precisions the cheapest plan is shown, and what answers faster.
    """
    absent = missing(asked)
    if absent:
        raise click.UsageError(f"Missing {', '.join(absent)}.")
    try:
        if asked["slots"] is not None:
            _show_slots(asked | {"page": page}, as_json=as_json)
            return
        found = answer(asked)
        shown, explained = document(found), explanations(found.best)
        if page is not None:
            write_page(page, found, shown, explained)
    except CannotPlan as error:
        raise _refused(error) from None
    if as_json:
        print_json(shown | {"explain": explained} if explain else shown)
    else:
        print_plan(found, shown, explained if explain else {})


def _show_slots(asked: dict[str, Any], *, as_json: bool) -> None:
    """Slots that do not fit are a finding."""
    found = answer_slots(asked)
    if as_json:
        print_json(slots_document(found))
    else:
        print_slots(found)
    if not found.verdict.fits:
        click.get_current_context().exit(1)
