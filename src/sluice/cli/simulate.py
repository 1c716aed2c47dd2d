"""``sluice simulate``: a fleet that does not exist, under a load or a trace, in virtual time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sluice.cli.options import WHOLE, BadInput, print_json, settings_options
from sluice.cli.retrieval_options import retrieval_options
from sluice.cli.simulate_report import document, print_outcome
from sluice.cli.simulate_workload import WorkloadWanted, workload_options, workload_wanted
from sluice.cli.telling import Told
from sluice.config.load import load_settings
from sluice.config.settings import Settings
from sluice.config.sources import Override, parse_override
from sluice.config.units import parse_duration_s
from sluice.planner.faults import fault_named
from sluice.planner.names import CannotPlan
from sluice.planner.simulation import WARM_UP, SimulatedFleet, Span, simulate
from sluice.runtime.virtual_fleet import LaterStart
from sluice.telemetry.journal_file import JournalFile
from sluice.wiring.simulation import simulated_fleet
from sluice.workload.asks import BadWorkload
from sluice.workload.retrieval import RetrievalTime, Retrieving

# Names in the settings of the model and the class that options make.
MODEL, CLASS = "model", "targets"
_DIGITS = 10
_OF_MODEL = ("tp", "replicas", "autoscale", "policy", "ttft", "tpot", "e2e", "percentile")

_EPILOG = """\b
Examples:
  sluice simulate --model llama-3.1-8b --gpu h100 --replicas 2 --rate 20 \\
      --input 1000 --output 200 --ttft 1s --tpot 40ms
  sluice simulate --trace azure-conv --rate 30 --model llama-3.1-70b --gpu h100 --tp 4 \\
      --replicas 6 --ttft 1s --tpot 50ms --fault replica-lost@60s --load-time 90s
  sluice simulate --trace azure-code --model llama-3.1-70b --gpu h100 --tp 4 --autoscale 1-6 \\
      --load-time 3m --ttft 2s --tpot 50ms
  sluice simulate --trace my.csv --column t=start:ms --column input=prompt --column output=answer \\
      -c fleet.toml --class chat=3 --class batch=1 --json

\b
A fleet of several models, classes and tenants is written as for sluice serve, with sources
such as sim:llama-3.1-8b@h100x1, and given with -c.

\b
Traces: azure-conv, azure-code, or a file: CSV or JSON lines, plain or gzipped, in the form of
Azure's, Mooncake's, BurstGPT's or ServeGen's traces, or any other with --column.

\b
Exit codes: 0 done, 2 bad input.
"""


@click.command(epilog=_EPILOG)
@workload_options
@retrieval_options
@click.option("--model", help="A name that sluice plan --list shows, or a config.json.")
@click.option("--gpu", help="A name that sluice plan --list shows.")
@click.option("--tp", type=WHOLE, help="GPUs of each replica. Default: 1.")
@click.option("--replicas", type=WHOLE, help="Replicas of the model. Default: 1.")
@click.option(
    "--autoscale",
    metavar="MIN-MAX",
    help="Let the number of replicas follow the load, as 1-8; --load-time is how long a start "
    "takes. More of it is set with --set autoscale.… and --set models.model.replicas.warm.",
)
@click.option("--policy", help="slo, fcfs or static. Default: slo.")
@click.option("--ttft", metavar="DURATION", help='Target for the first token, as "1s".')
@click.option("--tpot", metavar="DURATION", help='Target for each further token, as "50ms".')
@click.option("--e2e", metavar="DURATION", help="Time after which an answer is worthless.")
@click.option("--percentile", help="Share of requests that are to meet them. Default: 95.")
@click.option("--requests", type=WHOLE, help="How many. Default: 10000, or those of the trace.")
@click.option("--warm-up", type=WHOLE, help="Not counted at first. Default: a tenth of --requests.")
@click.option(
    "--retries",
    type=WHOLE,
    default=0,
    show_default=True,
    help="How often a refused client comes back when it was told to.",
)
@click.option("--seed", type=WHOLE, default=1, show_default=True, help="Decides all that is drawn.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KIND@TIME[:…]",
    help="replica-lost@60s, replica-gone@60s, replica-slow@60s:x=3,for=30s or "
    "replica-stall@60s:for=2s; with replica=NAME for another than the first.",
)
@click.option("--load-time", metavar="DURATION", help="Time that a replica needs to start again.")
@click.option(
    "--journal",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for a journal of the run; slower, and replicas learn their speed as live ones do.",
)
@settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(*, as_json: bool, **asked: Any) -> None:
    """Play a load or a trace on a fleet in virtual time, with the server's own policy.

    Arrivals are open-loop: nobody waits for an answer before the next request comes.
    """
    began_s = time.monotonic()
    try:
        wanted = _with_retrieval(workload_wanted(asked), asked)
        settings = _settings(asked)
        fleet = _with_faults(_fleet(settings, wanted, asked), asked["faults"])
        span = _span(wanted, asked)
        with Told(span.requests) as told:
            span = replace(span, told=told.at)
            journal = _journal(asked["journal"])
            outcome = simulate(
                wanted.workload, fleet, seed=asked["seed"], span=span, journal=journal
            )
    except OSError as error:
        # What reads a trace says so itself.
        folder = asked["journal"]
        what = "cannot simulate" if folder is None else f"cannot write the journal {folder}"
        raise BadInput(f"{what}: {error.strerror or error}") from None
    except (BadWorkload, CannotPlan) as error:
        raise BadInput(str(error)) from None
    found = document(outcome)
    found["wall_s"] = time.monotonic() - began_s
    if as_json:
        print_json(found)
    else:
        print_outcome(found)


def _with_retrieval(wanted: WorkloadWanted, asked: Mapping[str, Any]) -> WorkloadWanted:
    """The same requests with retrieval before them."""
    time_s, tokens = asked["retrieval"], asked["chunks"]
    if time_s is None and not tokens:
        return wanted
    lengths = replace(wanted.lengths, prompt=wanted.lengths.prompt + tokens)
    workload = Retrieving(wanted.workload, time_s or RetrievalTime(0.0, 0.0), tokens)
    return replace(wanted, workload=workload, lengths=lengths)


def _settings(asked: Mapping[str, Any]) -> Settings:
    """File, environment and ``--set``, with what the other options say as if by ``--set``."""
    given = [*_model_overrides(asked), *asked["overrides"]]
    return load_settings(asked["config"], given, secrets=False).settings


def _model_overrides(asked: Mapping[str, Any]) -> Sequence[Override]:
    if asked["model"] is None and asked["gpu"] is None:
        given = [f"--{name}" for name in _OF_MODEL if asked[name] is not None]
        if given:
            raise BadWorkload(
                f"{', '.join(given)} belong to --model; for a model of a file write, for example, "
                f"--set models.NAME.policy=fcfs"
            )
        return ()
    if asked["model"] is None or asked["gpu"] is None:
        raise BadWorkload("--model and --gpu go together: a model runs on something")
    texts = {
        f"models.{MODEL}.source": f"sim:{asked['model']}@{asked['gpu']}x{_one(asked['tp'])}",
        **_replicas(asked),
    }
    if asked["policy"] is not None:
        texts[f"models.{MODEL}.policy"] = asked["policy"]
    targets = {name: asked[name] for name in ("ttft", "tpot", "e2e", "percentile") if asked[name]}
    if targets:
        texts[f"models.{MODEL}.slo"] = CLASS
    texts |= {f"slo.{CLASS}.{name}": value for name, value in targets.items()}
    return [parse_override(f"{key}={value}") for key, value in texts.items()]


def _replicas(asked: Mapping[str, Any]) -> dict[str, str]:
    """The settings of how many replicas there are."""
    bounds, name = asked["autoscale"], f"models.{MODEL}.replicas"
    if bounds is None:
        return {f"{name}.min": str(_one(asked["replicas"]))}
    least, dash, most = bounds.partition("-")
    numbers = [text.isascii() and text.isdigit() and len(text) < _DIGITS for text in (least, most)]
    if not (dash and all(numbers) and 0 <= int(least) <= int(most) > 0):
        raise BadWorkload(f"--autoscale must be MIN-MAX, as 1-8, not {bounds}")
    if asked["replicas"] is not None:
        raise BadWorkload("give --replicas or --autoscale, not both")
    start = asked["load_time"] or "0.001s"
    return {f"{name}.min": least, f"{name}.max": most, "autoscale.cold_start": start}


def _one(count: int | None) -> int:
    return 1 if count is None else count


def _fleet(settings: Settings, wanted: WorkloadWanted, asked: Mapping[str, Any]) -> SimulatedFleet:
    fleet = simulated_fleet(settings, wanted.lengths, load_ns(asked["load_time"]))
    if not any(pool.limits.scale is not None for pool in fleet.pools):
        return fleet
    # Those that there are at first serve at once; later ones take their time.
    return replace(fleet, starting=LaterStart(fleet.load_ns))


def load_ns(text: str | None) -> int:
    """What ``--load-time`` says. Raises ``BadWorkload``."""
    try:
        return 0 if text is None else round(parse_duration_s(text) * 1e9)
    except ValueError as error:
        raise BadWorkload(f"--load-time: {error}") from None


def _journal(folder: Path | None) -> JournalFile | None:
    return None if folder is None else JournalFile(folder, "simulation")


def _with_faults(fleet: SimulatedFleet, texts: Sequence[str]) -> SimulatedFleet:
    faults = tuple(fault_named(text, fleet.replica_ids) for text in texts)
    return replace(fleet, faults=faults)


def _span(wanted: WorkloadWanted, asked: Mapping[str, Any]) -> Span:
    requests = wanted.requests if asked["requests"] is None else asked["requests"]
    if not 1 <= requests <= 10**9:
        raise BadWorkload(f"--requests must be 1 to 1e9, not {requests}")
    warm_up = int(WARM_UP * requests) if asked["warm_up"] is None else asked["warm_up"]
    if not 0 <= warm_up < requests:
        raise BadWorkload(
            f"--warm-up must be 0 or more and below the {requests} requests, not {warm_up}"
        )
    if not 0 <= asked["retries"] <= 100:
        raise BadWorkload(f"--retries must be 0 to 100, not {asked['retries']}")
    return Span(requests, warm_up, asked["retries"])
