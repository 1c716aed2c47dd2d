"""What the doctor says of the incidents of ``doctor_live``, and how often it is right."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.doctor_live import Played
from sluice.cli.doctor_page import plots
from sluice.doctor.columns import Journal, Requests
from sluice.doctor.diagnosis import Diagnosis, Verdict, Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.doctor.windows import Window, time_of


def diagnosed(folder: Path, plays: Sequence[Played], healthy: Sequence[Window]) -> dict[str, Any]:
    """One document: a row for each incident, and what was found between healthy windows."""
    journal = read_journal(folder)
    rows = [_row(journal, play) for play in plays]
    nulls = [_looked(journal, before, after) for before, after in pairwise(healthy)]
    return {
        "incidents": rows,
        "first": sum(row["right"] for row in rows),
        "nulls": len(nulls),
        "nulls_spiked": sum(found.spike.confirmed for found in nulls),
        "nulls_blamed": sum(bool(_confirmed(found)) for found in nulls),
    }


def write_plots(folder: Path, into: Path, play: Played) -> None:
    """The drawings of one incident, each a file."""
    journal = read_journal(folder)
    into.mkdir(parents=True, exist_ok=True)
    ground = '<rect width="100%" height="100%" fill="white"/>'
    # What came before and behind belongs to other incidents.
    around = Window(play.baseline.start_ns, play.window.end_ns)
    found = _looked(journal, play.baseline, play.window)
    for number, drawn in enumerate(plots(found, journal_in(journal, around)), 1):
        head, end, rest = drawn.partition(">")
        (into / f"doctor-{number}.svg").write_text(head + end + ground + rest, encoding="utf-8")


def _looked(journal: Journal, before: Window, after: Window) -> Diagnosis:
    return diagnose(journal, Wanted(incident=after, baseline=before))


def _confirmed(found: Diagnosis) -> list[str]:
    return [each.name for each in found.causes if each.verdict is Verdict.CONFIRMED]


def journal_in(journal: Journal, window: Window) -> Journal:
    """The same with the requests of a window alone."""
    requests = journal.requests
    rows = np.flatnonzero(window.of(requests))
    kept = Requests(
        [requests.ids[row] for row in rows],
        {name: values[rows] for name, values in requests.numbers.items()},
        {name: values[rows] for name, values in requests.names.items()},
        requests.of,
    )
    return replace(journal, requests=kept)


def _told(window: Window) -> str:
    """As ``sluice doctor --window`` takes it."""
    return f"{time_of(window.start_ns)}..{time_of(window.end_ns)}"


def _row(journal: Journal, play: Played) -> dict[str, Any]:
    found = _looked(journal, play.baseline, play.window)
    told = [each for each in found.found if each.verdict is not Verdict.POSSIBLE]
    first = told[0] if told else None
    share = None if first is None else first.share
    return {
        "incident": play.incident.name,
        "window": _told(play.window),
        "baseline": _told(play.baseline),
        "accepted": sorted(play.incident.accepted),
        "requests": play.requests,
        "failed": play.failed,
        "metric": found.spike.metric,
        "before_s": found.spike.before_s,
        "after_s": found.spike.after_s,
        "confirmed": found.spike.confirmed,
        "first": None if first is None else first.name,
        "verdict": None if first is None else first.verdict.value,
        "share": None if share is None else [share.low, share.share, share.high],
        "evidence": [] if first is None else list(first.evidence),
        "others": [each.name for each in found.found if each is not first],
        "misfit": found.shares.misfit,
        "right": first is not None and first.name in play.incident.accepted,
    }


def print_live(document: dict[str, Any]) -> None:
    """The table."""
    print(f"{'incident':<17}{'n':>5}{'lost':>5}  {'p99':<26}{'called':<18}{'':<11}"
          f"{'share':<20}{'misfit':>7}  others")  # fmt: skip
    for row in document["incidents"]:
        moved = "too few answers"
        if row["before_s"] is not None and row["after_s"] is not None:
            moved = f"{row['metric']} {row['before_s']:.3f} → {row['after_s']:.3f} s"
        if not row["confirmed"]:
            moved += " (no spike)"
        share, misfit = row["share"], row["misfit"]
        told = "" if share is None else f"{share[1]:.0%} ({share[0]:.0%} to {share[2]:.0%})"
        off = "" if misfit is None else f"{misfit:.0%}"
        mark = "" if row["right"] else " ✗"
        print(f"{row['incident']:<17}{row['requests']:>5}{row['failed']:>5}  {moved:<26}"
              f"{(row['first'] or '-') + mark:<18}{row['verdict'] or '':<11}{told:<20}{off:>7}  "
              f"{', '.join(row['others'])}")  # fmt: skip
    count = len(document["incidents"])
    print(f"\nnamed first: {document['first']} of {count} (target 10 of 12); "
          f"{document['rate_rps']:.1f} requests/s usual; "
          f"{document['wall_s'] / 60:.1f} min")  # fmt: skip
    print(f"between healthy windows: {document['nulls_spiked']} spikes of {document['nulls']}, "
          f"{document['nulls_blamed']} with a confirmed cause")  # fmt: skip
