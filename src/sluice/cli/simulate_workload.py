"""The options that say which requests come, and the workload that they make."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import click

from sluice.cli.options import WHOLE
from sluice.config.units import parse_duration_s
from sluice.planner.steady import Lengths
from sluice.workload.arrivals import arrivals_named, checked_rate
from sluice.workload.asks import BadWorkload, Workload
from sluice.workload.lengths import Joint, Separate, lengths_of
from sluice.workload.mixes import Mix, shares_of
from sluice.workload.servegen import ServeGen, is_servegen
from sluice.workload.synthetic import Sessions, Synthetic
from sluice.workload.trace_rows import columns_of, trace_rows
from sluice.workload.traces import Trace, facts_of, trace_path

F = TypeVar("F", bound=Callable[..., Any])

REQUESTS_DEFAULT = 10_000
# What a trace brings with it.
_DRAWN = {
    "prompt": "--input",
    "output": "--output",
    "lengths": "--lengths",
    "spread": "--spread",
    "arrivals": "--arrivals",
    "turns": "--turns",
    "think": "--think",
    "system": "--system",
}

_OPTIONS = (
    click.option("--trace", metavar="FILE", help="A trace file, azure-conv or azure-code."),
    click.option(
        "--lengths", metavar="FILE", help="A trace of which only the lengths are drawn, in pairs."
    ),
    click.option("--rate", type=float, help="Requests per second; a trace is scaled to it."),
    click.option("--input", "prompt", type=float, help="Mean prompt tokens."),
    click.option("--output", type=float, help="Mean output tokens."),
    click.option(
        "--spread",
        type=float,
        help="Standard deviation of lengths over their mean (lognormal). Default: all the same.",
    ),
    click.option(
        "--arrivals",
        help="poisson, constant, gamma:cv=3, onoff:on=10,off=50 or ramp:to=20,over=300 (seconds). "
        "Default: poisson.",
    ),
    click.option("--turns", type=float, help="Mean requests of a conversation. Default: 1."),
    click.option("--think", metavar="DURATION", help="Mean time between them. Default: 30s."),
    click.option("--system", type=WHOLE, help="Tokens that all prompts begin with."),
    click.option(
        "--max-tokens", type=WHOLE, help="Limit that clients set. Default: 2048, or more."
    ),
    click.option("--class", "classes", multiple=True, metavar="NAME=WEIGHT", help="SLO classes."),
    click.option("--tenant", "tenants", multiple=True, metavar="NAME=WEIGHT", help="Tenants."),
    click.option("--ask", "models", multiple=True, metavar="NAME=WEIGHT", help="Models asked for."),
    click.option(
        "--column", "columns", multiple=True, metavar="ROLE=NAME", help="Columns of the trace."
    ),
)


def workload_options(function: F) -> F:
    """Add the options; ``workload_wanted`` takes them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class WorkloadWanted:
    """A workload, the mean lengths in it, and how many requests are played unless one says."""

    workload: Workload
    lengths: Lengths
    requests: int


def workload_wanted(asked: Mapping[str, Any]) -> WorkloadWanted:
    """What the options ask for. Raises ``BadWorkload``."""
    mix = Mix(
        shares_of("--ask", asked["models"]),
        shares_of("--class", asked["classes"]),
        shares_of("--tenant", asked["tenants"]),
    )
    if asked["max_tokens"] is not None and asked["max_tokens"] < 1:
        raise BadWorkload(f"--max-tokens must be at least 1, not {asked['max_tokens']}")
    if asked["trace"] is None:
        return _synthetic(asked, mix)
    given = [option for name, option in _DRAWN.items() if asked[name] is not None]
    if given:
        raise BadWorkload(
            f"a trace has its own arrivals and lengths: leave out {' and '.join(given)}, or --trace"
        )
    return _traced(asked, mix)


def _synthetic(asked: Mapping[str, Any], mix: Mix) -> WorkloadWanted:
    if asked["rate"] is None:
        raise BadWorkload("--rate missing: give --trace, or --rate with --input and --output")
    if asked["columns"] and asked["lengths"] is None:
        raise BadWorkload("--column belongs to --trace or --lengths")
    lengths, prompt, output = _lengths(asked)
    sessions = _sessions(asked)
    arrivals = arrivals_named(asked["arrivals"] or "poisson")
    workload = Synthetic(
        checked_rate(asked["rate"]), lengths, arrivals, mix, sessions, asked["max_tokens"]
    )
    whole = Lengths(workload.mean_prompt_tokens(prompt, output), output)
    return WorkloadWanted(workload, whole, REQUESTS_DEFAULT)


def _lengths(asked: Mapping[str, Any]) -> tuple[Separate | Joint, float, float]:
    """The lengths to draw, and the means of prompts and outputs."""
    given = [name for name in ("prompt", "output") if asked[name] is not None]
    if asked["lengths"] is not None:
        if given or asked["spread"] is not None:
            raise BadWorkload("give --lengths, or --input and --output")
        rows = trace_rows(trace_path(asked["lengths"]), columns_of(asked["columns"]))
        pairs = [(row.prompt_tokens, row.output_tokens) for row in rows]
        prompts, outputs = zip(*pairs, strict=True)
        return Joint(pairs), fmean(prompts), fmean(outputs)
    if len(given) < 2:
        missing = "--input" if "prompt" not in given else "--output"
        raise BadWorkload(f"{missing} missing: give --input and --output, --lengths or --trace")
    prompt, output = asked["prompt"], asked["output"]
    return lengths_of(prompt, output, asked["spread"] or 0.0), prompt, output


def _sessions(asked: Mapping[str, Any]) -> Sessions:
    try:
        think_s = 30.0 if asked["think"] is None else parse_duration_s(asked["think"])
    except ValueError as error:
        raise BadWorkload(f"--think: {error}") from None
    turns = 1.0 if asked["turns"] is None else asked["turns"]
    if not 1.0 <= turns <= 1000.0:
        raise BadWorkload(f"--turns must be 1 to 1000, not {turns:g}")
    system = asked["system"] or 0
    if not 0 <= system <= 10**7:
        raise BadWorkload(f"--system must be 0 to 1e7 tokens, not {system}")
    return Sessions(turns, think_s, system)


def _traced(asked: Mapping[str, Any], mix: Mix) -> WorkloadWanted:
    if asked["rate"] is not None:
        checked_rate(asked["rate"])
    path = trace_path(asked["trace"])
    columns = columns_of(asked["columns"])
    if columns is None and is_servegen(path):
        clients = ServeGen(path, asked["rate"], mix, asked["max_tokens"])
        lengths = Lengths(*clients.mean_tokens())
        return WorkloadWanted(clients, lengths, REQUESTS_DEFAULT)
    facts = facts_of(path, columns)
    trace = Trace(facts, asked["rate"], mix, asked["max_tokens"])
    lengths = Lengths(facts.prompt_tokens, facts.output_tokens)
    return WorkloadWanted(trace, lengths, facts.requests)
