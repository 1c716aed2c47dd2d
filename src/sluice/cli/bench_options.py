"""The options of ``sluice bench``, and the values that they make. Nothing is sent here."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from sluice.cli.options import WHOLE
from sluice.cli.simulate_workload import workload_wanted
from sluice.config.load import variable
from sluice.config.units import parse_duration_s
from sluice.loadtest.plans import Addition, CachePolicy, Scaled, Traffic
from sluice.loadtest.trial import CannotMeasure, Metric, Objective, Span
from sluice.loadtest.wire import Api, Target, target_of
from sluice.workload.asks import BadWorkload
from sluice.workload.lengths import lengths_of
from sluice.workload.servegen import ServeGen
from sluice.workload.synthetic import Synthetic
from sluice.workload.traces import Trace

F = TypeVar("F", bound=Callable[..., Any])

INPUT_TOKENS, OUTPUT_TOKENS = 256, 64
DURATION_S = 60.0
WARM_UP_SHARE, WARM_UP_S_MAX = 0.1, 30.0
TAIL_S_MAX = 5.0
ADVERSARY = "adversary"

_TARGET_OPTIONS = (
    click.option("--model", help="Model asked for. Default: the one that the server has."),
    click.option("--key-env", metavar="NAME", help="Variable that holds the API key."),
    click.option(
        "--tenant-key",
        "tenant_keys",
        multiple=True,
        metavar="TENANT=NAME",
        help="Variable that holds the key of a tenant.",
    ),
    click.option("--completions", is_flag=True, help="Ask /completions instead of chat."),
    click.option(
        "--no-stream", is_flag=True, help="Ask for whole answers; then only e2e is known."
    ),
    click.option(
        "--choices", type=WHOLE, default=1, show_default=True, help="Answers per request."
    ),
    click.option(
        "--body",
        "members",
        multiple=True,
        metavar="NAME=JSON",
        help="A further member of every request, as min_tokens=64.",
    ),
    click.option(
        "--ca", type=click.Path(dir_okay=False), help="Certificates to trust in addition."
    ),
    click.option("--insecure", is_flag=True, help="Trust any certificate."),
)
_LOAD_OPTIONS = (
    click.option("--rate", "rates", multiple=True, metavar="RPS", help="Requests per second, open "
        "loop; several with commas, one trial each."),
    click.option("--concurrency", "concurrencies", multiple=True, metavar="N", help="Clients of a "
        "closed loop; several with commas, one trial each."),
    click.option("--duration", metavar="DURATION", help="Counted part of a trial. Default: 60s."),
    click.option("--warm-up", metavar="DURATION", help="Not counted before. Default: a tenth."),
    click.option(
        "--patience", metavar="DURATION", default="120s", show_default=True,
        help="Time from the planned start after which a client gives up.",
    ),
    click.option(
        "--spike", "spikes", multiple=True, metavar="rate=R,from=T,for=T",
        help="Requests in addition for a while; times count from the counted part.",
    ),
    click.option(
        "--adversary", "adversaries", multiple=True,
        metavar="rate=R,input=N,output=N,from=T,for=T",
        help=f'Load of another tenant, named "{ADVERSARY}", beside the one measured.',
    ),
    click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Play a saved plan."),
    click.option("--save-plan", type=click.Path(path_type=Path, dir_okay=False), help="Save "
        "what is sent when."),
)  # fmt: skip
_WORKLOAD_OPTIONS = (
    click.option("--trace", metavar="FILE", help="A trace file, azure-conv or azure-code; its time "
        "is scaled to --rate."),
    click.option("--lengths", metavar="FILE", help="A trace of which only lengths are drawn."),
    click.option("--input", "prompt", type=float, help=f"Mean prompt tokens. Default: "
        f"{INPUT_TOKENS}."),
    click.option("--output", type=float, help=f"Mean output tokens. Default: {OUTPUT_TOKENS}."),
    click.option("--spread", type=float, help="Standard deviation of lengths over their mean."),
    click.option("--arrivals", help="poisson, constant, gamma:cv=3, onoff:on=10,off=50 or "
        "ramp:to=20,over=300 (seconds). Default: poisson."),
    click.option("--turns", type=float, help="Mean requests of a conversation. Default: 1."),
    click.option("--think", metavar="DURATION", help="Mean time between them. Default: 30s."),
    click.option("--system", type=WHOLE, help="Tokens that all prompts begin with."),
    click.option("--class", "classes", multiple=True, metavar="NAME=WEIGHT", help="SLO classes."),
    click.option("--tenant", "tenants", multiple=True, metavar="NAME=WEIGHT", help="Tenants."),
    click.option("--column", "columns", multiple=True, metavar="ROLE=NAME",
        help="Columns of the trace."),
    click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="Prompts of "
        'your own: one text per line, or objects with "prompt".'),
    click.option(
        "--cache", type=click.Choice([each.value for each in CachePolicy]),
        default=CachePolicy.COLD.value, show_default=True,
        help="What the prefix cache knows: nothing, all prompts, or whatever it holds.",
    ),
    click.option("--seed", type=WHOLE, default=1, show_default=True, help="Decides what is drawn."),
)  # fmt: skip
_TARGETS = (
    click.option("--ttft", metavar="DURATION", help='Target for the first token, as "1s".'),
    click.option("--tpot", metavar="DURATION", help='Target for each further token, as "60ms".'),
    click.option("--e2e", metavar="DURATION", help="Target for the whole answer."),
    click.option("--gap", metavar="DURATION", help="Longest pause within an answer: stalls."),
    click.option(
        "--percentile", type=float, default=95.0, show_default=True,
        help="Share of requests that are to meet them.",
    ),
    click.option(
        "--failures-max", type=float, default=0.01, show_default=True,
        help="Share of requests that may fail or be refused; above it the exit code is 1.",
    ),
)  # fmt: skip


def bench_options(function: F) -> F:
    """Add the options that say what is measured."""
    for option in reversed((*_TARGET_OPTIONS, *_LOAD_OPTIONS, *_WORKLOAD_OPTIONS, *_TARGETS)):
        function = option(function)
    return function


def target_wanted(url: str, asked: Mapping[str, Any]) -> Target:
    """The endpoint, without a model where none is named. Raises ``CannotMeasure``."""
    keys = {tenant: _key(name) for tenant, name in map(_split, asked["tenant_keys"])}
    if asked["key_env"] is not None:
        keys[""] = _key(asked["key_env"])
    return replace(
        target_of(url, asked["model"] or ""),
        api=Api.COMPLETIONS if asked["completions"] else Api.CHAT,
        streamed=not asked["no_stream"],
        keys=keys,
        extra=dict(_member(text) for text in asked["members"]),
        ca=asked["ca"],
        insecure=asked["insecure"],
    )


def _split(text: str) -> tuple[str, str]:
    tenant, equals, name = text.partition("=")
    if not equals or not tenant or not name:
        raise CannotMeasure(f"--tenant-key {text!r} is not TENANT=NAME")
    return tenant, name


def _key(name: str) -> str:
    value = variable(name).strip()
    if not value:
        raise CannotMeasure(f"the variable {name} is unset or empty: it is to hold the API key")
    return value


def _no_number(word: str) -> float:
    raise ValueError(f"JSON has no {word}")


def _member(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if equals and name:
            return name, json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        pass
    raise CannotMeasure(f'--body {text!r} is not NAME=JSON, as min_tokens=64 or user="me"')


def objectives_wanted(asked: Mapping[str, Any]) -> tuple[Objective, ...]:
    """The targets. Raises ``CannotMeasure``."""
    percentile = asked["percentile"]
    if not 0.0 < percentile < 100.0:
        raise CannotMeasure(f"--percentile must be above 0 and below 100, not {percentile:g}")
    found = tuple(
        Objective(metric, _duration_s(f"--{metric.value}", asked[metric.value]), percentile)
        for metric in Metric
        if asked[metric.value] is not None
    )
    if asked["no_stream"] and any(each.metric is not Metric.E2E for each in found):
        raise CannotMeasure("whole answers have no first token: give --e2e, or leave --no-stream")
    if not 0.0 <= asked["failures_max"] <= 1.0:
        raise CannotMeasure(f"--failures-max must be 0 to 1, not {asked['failures_max']:g}")
    return found


def span_wanted(asked: Mapping[str, Any]) -> Span:
    """The length of trials. Raises ``CannotMeasure``."""
    counted_s = DURATION_S
    if asked["duration"] is not None:
        counted_s = _duration_s("--duration", asked["duration"])
    warm_s = min(WARM_UP_S_MAX, WARM_UP_SHARE * counted_s)
    if asked["warm_up"] is not None:
        warm_s = _duration_s("--warm-up", asked["warm_up"])
    patience_s = _duration_s("--patience", asked["patience"])
    if counted_s <= 0.0 or patience_s <= 0.0:
        raise CannotMeasure("--duration and --patience must be above 0")
    return Span(counted_s, warm_s, min(TAIL_S_MAX, 0.1 * counted_s), patience_s)


def _duration_s(option: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise CannotMeasure(f"{option}: {error}") from None


def numbers_wanted(option: str, texts: Sequence[str]) -> list[float]:
    """Numbers of an option that takes several. Raises ``CannotMeasure``."""
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    try:
        found = [float(part) for part in parts]
    except ValueError as error:
        raise CannotMeasure(f"{option}: {error}") from None
    if any(not 0.0 < each <= 1e7 for each in found):
        raise CannotMeasure(f"{option} must be above 0 and at most 1e7")
    return found


def traffic_wanted(asked: Mapping[str, Any]) -> Traffic:
    """The kind of traffic. Raises ``BadWorkload`` and ``CannotMeasure``."""
    workload = _workload(asked)
    if not 1 <= asked["choices"] <= 128:
        raise CannotMeasure(f"--choices must be 1 to 128, not {asked['choices']}")
    additions = [_addition("spike", text, workload) for text in asked["spikes"]]
    additions += [_addition(ADVERSARY, text, workload) for text in asked["adversaries"]]
    run = secrets.token_hex(6)
    return Traffic(workload, CachePolicy(asked["cache"]), run, additions, asked["choices"])


def _workload(asked: Mapping[str, Any]) -> Scaled:
    given = dict(asked) | {"rate": 1.0, "max_tokens": None, "models": ()}
    if asked["trace"] is None and asked["lengths"] is None:
        given["prompt"] = INPUT_TOKENS if asked["prompt"] is None else asked["prompt"]
        given["output"] = OUTPUT_TOKENS if asked["output"] is None else asked["output"]
    workload = workload_wanted(given).workload
    if not isinstance(workload, Synthetic | Trace | ServeGen):
        raise BadWorkload("this workload cannot be scaled to a rate")
    return workload


def _tokens(text: str, key: str, given: str | float) -> float:
    try:
        return float(given)
    except ValueError:
        raise CannotMeasure(
            f"--{ADVERSARY} {text!r}: {key} must be a number of tokens, not {given!r}"
        ) from None


def _addition(name: str, text: str, workload: Scaled) -> Addition:
    """What ``--spike`` or ``--adversary`` says."""
    known = ("rate", "from", "for", "input", "output") if name == ADVERSARY else (
        "rate", "from", "for"
    )  # fmt: skip
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() not in known:
            raise CannotMeasure(f"--{name} {text!r}: {part!r} is not one of {', '.join(known)}")
        values[key.strip()] = value.strip()
    if "rate" not in values:
        raise CannotMeasure(f"--{name} {text!r} has no rate=")
    (rate_rps,) = numbers_wanted(f"--{name} rate", [values["rate"]])
    if name == ADVERSARY:
        prompt, output = (
            _tokens(text, key, values.get(key, usual))
            for key, usual in (("input", INPUT_TOKENS), ("output", OUTPUT_TOKENS))
        )
        workload = Synthetic(1.0, lengths_of(prompt, output))
    return Addition(
        name,
        workload,
        rate_rps,
        _duration_s(f"--{name} from", values.get("from", "0s")),
        _duration_s(f"--{name} for", values.get("for", "3650d")),
        ADVERSARY if name == ADVERSARY else "",
    )
