"""How well ``sluice doctor`` names causes, on incidents whose true cause and share are known.

    python -m benchmarks.doctor                   # the incidents that are reported
    python -m benchmarks.doctor --first 1000 --count 100 --each   # others, one line for each
    python -m benchmarks.doctor live              # incidents on a server with the embedded engine
    python -m benchmarks.doctor hour FOLDER       # a journal of an hour at 100 requests/s
    python -m benchmarks.doctor speed FOLDER      # time and memory of one diagnosis

Incidents are made once per folder (``doctor_incidents``); constants of the doctor were set on seeds
from 1000 on, figures are from seeds from 20000 on. A case counts as an incident where its faults
moved the reported metric by a fifth in the paired run.
"""

import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.doctor_baselines import BASELINES
from benchmarks.doctor_cases import CAUSES, METRICS, Case, cases
from benchmarks.doctor_hour import write_hour
from benchmarks.doctor_incidents import is_potent, make, shares
from benchmarks.doctor_live import INCIDENTS, Place, played
from benchmarks.doctor_live_report import diagnosed, print_live, write_plots
from sluice.doctor.diagnosis import Verdict, Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.doctor.windows import Window

# A true share that is worth naming.
SHARE_MIN = 0.10


@dataclass(slots=True)
class Judged:
    """One case: what is true and what was said."""

    name: str
    faults: list[str]
    kind: str
    potent: bool = False
    moved: bool = False
    spike: bool = False
    true: dict[str, float] = field(default_factory=dict)
    first: str = ""
    named: list[str] = field(default_factory=list)
    confirmed: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    shares: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    baselines: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0
    metric: str = ""
    misfit: float | None = None


def judge(arguments: tuple[Case, Path]) -> Judged:
    """Make a case where it is not there yet, and diagnose it."""
    case, root = arguments
    folder = make(case, root)
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    began_s = time.process_time()
    journal = read_journal(folder / "journal")
    end_ns = float(journal.requests["arrived_ns"][-1]) + 1
    window = Window(truth["fault_s"] * 1e9, end_ns)
    found = diagnose(journal, Wanted(incident=window))
    faults = [CAUSES[name] for name, _ in case.faults]
    kind = ("null", "single", "double")[len(faults)]
    judged = Judged(case.name, faults, f"decoy {kind}" if case.decoys else kind)
    judged.cpu_s = time.process_time() - began_s
    judged.metric = found.spike.metric
    judged.moved = any(is_potent(truth, metric) for metric in METRICS)
    judged.potent = bool(faults) and is_potent(truth, found.spike.metric)
    judged.spike, judged.misfit = found.spike.confirmed, found.shares.misfit
    judged.true = shares(truth, found.spike.metric)
    told = [each for each in found.found if each.verdict is not Verdict.POSSIBLE]
    judged.first = told[0].name if told else ""
    judged.named = [each.name for each in found.found]
    for each in found.causes:
        if each.share is not None:
            bounds = each.share.low, each.share.share, each.share.high
            judged.shares[each.name] = bounds
            if each.verdict is Verdict.CONFIRMED:
                judged.confirmed[each.name] = bounds
    if found.spike.confirmed:
        for name, baseline in BASELINES.items():
            judged.baselines[name] = baseline(journal, found.windows, found.spike) or ""
    return judged


def _right(judged: Judged) -> set[str]:
    """Causes that are true enough to be named first."""
    return {name for name, share in judged.true.items() if share >= SHARE_MIN}


def report(all_judged: list[Judged]) -> None:
    """The tables."""
    incidents = [each for each in all_judged if each.faults and each.potent]
    nulls = [each for each in all_judged if not each.faults]
    print(f"{len(all_judged)} cases: {len(incidents)} incidents with an effect, "
          f"{len(nulls)} without a fault, "
          f"{len(all_judged) - len(incidents) - len(nulls)} left out (no effect)")  # fmt: skip
    kinds = Counter(name for each in incidents for name in each.faults)
    print(f"causes in them: {', '.join(f'{name} {n}' for name, n in kinds.most_common())}")
    found = [each for each in incidents if each.spike]
    first = sum(each.first in _right(each) for each in incidents)
    third = sum(bool(_right(each) & set(each.named[:3])) for each in incidents)
    said = [(each, name) for each in all_judged for name in each.confirmed]
    true = sum(name in each.faults and _close(each, name) for each, name in said)
    covered = [
        bounds[0] <= each.true[name] <= bounds[2]
        for each in incidents
        for name, bounds in each.shares.items()
        if name in each.true and each.spike
    ]
    errors = [
        abs(bounds[1] - each.true[name])
        for each in incidents
        for name, bounds in each.shares.items()
        if name in each.true and each.spike
    ]
    alarms = sum(each.spike for each in nulls)
    blamed = sum(bool(each.confirmed) for each in nulls)
    misfits = [e.misfit for e in incidents if e.misfit is not None] or [0.0]
    rows = (
        ("spike confirmed", _of(len(found), len(incidents)), ""),
        ("top-1", _of(first, len(incidents)), "≥ 85 %"),
        ("top-1 of the spikes confirmed", _of(first, len(found)), ""),
        ("among the first three", _of(third, len(incidents)), ""),
        ("precision of confirmed", _of(true, len(said)), "≥ 95 %"),
        ("incidents with a confirmed cause",
         _of(sum(bool(e.confirmed) for e in incidents), len(incidents)), ""),
        ("spikes told without a fault", _of(alarms, len(nulls)), "≤ 5 %"),
        ("causes confirmed without a fault", _of(blamed, len(nulls)), "≤ 5 %"),
        ("interval covers the true share", _of(sum(covered), len(covered)), "≥ 85 %"),
        ("median error of a share", f"{np.median(errors) if errors else 0.0:.2f}", ""),
        ("replay off by, median and p90",
         " and ".join(f"{one:.0%}" for one in np.quantile(misfits, (0.5, 0.9))), ""),
        ("CPU per diagnosis, median", f"{np.median([e.cpu_s for e in all_judged]):.1f} s", ""),
    )  # fmt: skip
    print()
    for name, value, target in rows:
        print(f"{name:<36} {value:>18}  {target}")
    print("\nmethod          top-1 of all incidents   of those with a spike confirmed")
    print(f"{'doctor':<16}{_of(first, len(incidents)):>22}{_of(first, len(found)):>30}")
    for method in BASELINES:
        hits = sum(each.baselines.get(method, "") in _right(each) for each in incidents)
        print(f"{method:<16}{_of(hits, len(incidents)):>22}{_of(hits, len(found)):>30}")
    _by_cause(incidents)


def _by_cause(incidents: list[Judged]) -> None:
    print("\ncause                 incidents  spikes  first  called instead")
    instead: dict[str, Counter[str]] = defaultdict(Counter)
    for each in incidents:
        for name in each.faults:
            instead[name][each.first if each.spike else "(no spike)"] += 1
    for name, calls in sorted(instead.items()):
        total = sum(calls.values())
        others = ", ".join(f"{c or '(none)'} {n}" for c, n in calls.most_common() if c != name)
        print(f"{name:<22}{total:>8}{total - calls['(no spike)']:>8}{calls[name]:>7}  {others}")


def _close(judged: Judged, name: str) -> bool:
    return judged.true.get(name, 0.0) >= SHARE_MIN


def _of(part: int, whole: int) -> str:
    return f"{part}/{whole} = {100 * part / max(1, whole):.1f} %"


@click.group(invoke_without_command=True)
@click.option("--first", type=int, default=20_000, help="First seed.")
@click.option("--count", type=int, default=260, help="Cases.")
@click.option("--processes", type=int, default=1)
@click.option("--each", is_flag=True, help="A line for each case.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("/tmp/doctor-incidents"))  # noqa: S108
@click.pass_context
def main(context: click.Context, /, **asked: Any) -> None:
    """Judge the doctor on incidents."""
    if context.invoked_subcommand is not None:
        return
    first, count, folder = asked["first"], asked["count"], asked["folder"]
    work = [(case, folder) for case in cases(first, count)]
    judged: list[Judged] = []
    with multiprocessing.Pool(asked["processes"]) as pool:
        for one in pool.imap(judge, work):
            judged.append(one)
            if asked["each"]:
                _line(one)
            print(f"\r{len(judged)} of {count}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    report(judged)


def _line(one: Judged) -> None:
    true = {name: round(share, 2) for name, share in one.true.items()}
    bounds = {
        name: tuple(round(value, 2) for value in each)
        for name, each in one.shares.items()
        if name in one.true or each[1] > SHARE_MIN
    }
    ok = "none" if not one.potent else "ok" if one.first in _right(one) else "MISS"
    print(
        f"{ok:<5}{one.name} {one.metric} {'spike' if one.spike else '-'} true {true} "
        f"first {one.first or '-'} confirmed {list(one.confirmed)} bounds {bounds} "
        f"misfit {one.misfit if one.misfit is None else round(one.misfit, 2)} {one.baselines}",
        flush=True,
    )


@main.command()
@click.option("--seconds", type=float, default=22.0, show_default=True, help="Of each window.")
@click.option("--only", multiple=True, help="Incidents to play.", metavar="NAME")
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="Its source.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the journal here.")
@click.option(
    "--plots", type=click.Path(path_type=Path), help="Draw the first of the incidents there."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def live(*, only: tuple[str, ...], as_json: bool, folder: Path | None, **asked: Any) -> None:
    """Play incidents on a real server and diagnose them; about a minute for each."""
    incidents = tuple(each for each in INCIDENTS if not only or each.name in only)
    if not incidents:
        names = ", ".join(each.name for each in INCIDENTS)
        raise click.UsageError(f"--only must be one of {names}")
    with tempfile.TemporaryDirectory() as spare:
        place = Place(folder or Path(spare), asked["model"], asked["seconds"])
        place.folder.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()

        def told(what: str) -> None:
            print(f"{time.monotonic() - began_s:6.0f} s  {what}", file=sys.stderr, flush=True)

        plays, healthy = asyncio.run(played(place, incidents, told))
        told("diagnosing")
        document = diagnosed(place.journal, plays, healthy)
        if asked["plots"] is not None:
            write_plots(place.journal, asked["plots"], plays[0])
    document |= {"rate_rps": place.rate_rps, "wall_s": time.monotonic() - began_s}
    if as_json:
        print(json.dumps(document))
    else:
        print_live(document)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seconds", type=int, default=3600, show_default=True)
def hour(folder: Path, seconds: int) -> None:
    """Write a journal of an hour at 100 requests per second on eight replicas."""
    requests, steps = write_hour(folder, seconds)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{requests:,} requests, {steps:,} steps, {size / 2**20:,.0f} MiB")


@main.command()
@click.argument("journal", type=click.Path(path_type=Path))
def speed(journal: Path) -> None:
    """CPU time and memory of a diagnosis."""
    began_s, wall_s = time.process_time(), time.perf_counter()
    read = read_journal(journal)
    read_s = time.process_time() - began_s
    found = diagnose(read, Wanted())
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{len(read.requests):,} requests, {len(read.steps):,} steps; read {read_s:.1f} s CPU, "
        f"whole {time.process_time() - began_s:.1f} s CPU, {time.perf_counter() - wall_s:.1f} s; "
        f"{peak_mib:,.0f} MiB; spike {found.spike.confirmed}"
    )


if __name__ == "__main__":
    main()
