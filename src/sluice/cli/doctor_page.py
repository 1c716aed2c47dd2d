"""A diagnosis as one HTML file with plots, which loads nothing.

Called by ``doctor.py`` for ``--html``. Numbers come from the diagnosis and its journal.
"""

from html import escape
from pathlib import Path

import numpy as np

from sluice.cli.doctor_report import EXCESS_S_MIN, document, headline, replay_words, share_words
from sluice.cli.page import page_of, table, write_whole
from sluice.cli.plots import Axes, Mark, bars, lines
from sluice.doctor.columns import Journal
from sluice.doctor.diagnosis import Diagnosis, Verdict
from sluice.doctor.spike import latency_of

_BINS = 60


def write_page(path: Path, found: Diagnosis, journal: Journal) -> None:
    """Write the report. Raises ``OSError``."""
    write_whole(path, page(found, journal))


def page(found: Diagnosis, journal: Journal) -> str:
    """The report as HTML."""
    shown = document(found)
    causes = [
        (
            each.verdict.value,
            each.name,
            "" if each.share is None else share_words(each.share),
            "; ".join(each.evidence) or (each.missing and f"missing: {each.missing}"),
            "; ".join(each.against),
            each.next_look,
        )
        for each in found.causes
    ]
    window, baseline = shown["window"], shown["baseline"]
    parts = [
        (
            f"<p>window {window['start']} to {window['end']}; baseline {baseline['start']} to "
            f"{baseline['end']}</p>"
        ),
        *(f"<p>Note: {escape(problem)}</p>" for problem in found.problems),
        '<div class="plots">',
        *(f"<figure>{plot}</figure>" for plot in plots(found, journal)),
        "</div>",
    ]
    if causes:
        heads = ("verdict", "cause", "share", "evidence", "against it", "next")
        parts += ["<h2>Causes</h2>", '<div class="wide">', table(heads, causes), "</div>"]
    if found.shares.replayed:
        parts.append(f"<p>{escape(replay_words(found.shares))}</p>")
    if found.examples:
        parts.append(f"<p>slow requests: {escape(', '.join(found.examples))}</p>")
    return page_of(headline(found), parts)


def plots(found: Diagnosis, journal: Journal) -> list[str]:
    """Drawings as SVG: the latency over time, and where the excess is and would go."""
    drawn = [_over_time(found, journal)]
    if found.excess is not None:
        phases = {
            name: 1e3 * value
            for name, value in found.excess.phases.items()
            if value >= EXCESS_S_MIN
        }
        drawn.append(bars("Mean excess of the slowest", {"excess": phases}, "ms"))
    if found.held is not None:
        shares = {name: 100 * share for name, share in found.held.shares.items()}
        drawn.append(bars("What replicas did while they waited", {"time": shares}, "%"))
    told = (Verdict.CONFIRMED, Verdict.LIKELY, Verdict.POSSIBLE)
    rows = {
        each.name: {"share of the change": 100 * max(0.0, each.share.share)}
        for each in found.causes
        if each.share is not None and each.verdict in told
    }
    if rows:
        drawn.append(bars("What would go without each cause", rows, "%"))
    return drawn


def _over_time(found: Diagnosis, journal: Journal) -> str:
    """Median and a high percentile over the time of the journal."""
    spike, windows = found.spike, found.windows
    latency_s = latency_of(journal.requests, spike.metric)
    at_s = (journal.requests["arrived_ns"] - journal.requests["arrived_ns"][0]) / 1e9
    edges = np.linspace(0.0, float(at_s[-1]) + 1e-9, _BINS + 1)
    place = np.digitize(at_s, edges) - 1
    high, middle = [], []
    for number in range(_BINS):
        inside = latency_s[(place == number) & ~np.isnan(latency_s)]
        if len(inside):
            at = float(edges[number])
            high.append((at, float(np.quantile(inside, spike.percentile / 100))))
            middle.append((at, float(np.median(inside))))
    begin_ns = journal.requests["arrived_ns"][0]
    start_s, end_s = (
        (each - begin_ns) / 1e9 for each in (windows.incident.start_ns, windows.incident.end_ns)
    )
    return lines(
        Axes(f"{spike.metric.upper()} over time", "seconds since the first request", "s"),
        {f"p{spike.percentile:g}": high, "p50": middle},
        (Mark("x", start_s, "window", start_s, end_s),),
    )
