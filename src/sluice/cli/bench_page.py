"""Results of ``sluice bench`` as one HTML file with plots, which loads nothing.

Numbers come from the document; nothing is estimated here.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sluice.cli.bench_report import (
    OVERVIEW,
    POINTS,
    command_of,
    headline,
    latency_rows,
    load_name,
    overview_row,
    rows_of,
    trials_of,
)
from sluice.cli.bench_search_report import search_plots, search_rows
from sluice.cli.page import page_of, table
from sluice.cli.plots import Axes, Mark, lines

Json = Mapping[str, Any]


def page(result: Json) -> str:
    """The report as HTML."""
    endpoint = result["manifest"]["endpoint"]
    trials = trials_of(result)
    searched = "capacity_rps" in result
    parts = [
        *([table((), search_rows(result))] if searched else ()),
        *(f"<p>Note: {escape(note)}</p>" for note in result["notes"]),
        '<div class="wide">',
        table(("load", *OVERVIEW), [overview_row(trial) for trial in trials]),
        "</div>",
    ]
    if len(trials) > 1:
        plots = [*search_plots(result), *_across(trials)] if searched else _across(trials)
        parts += ['<div class="plots">', *_figures(plots), "</div>"]
    for trial in trials:
        parts += [
            f"<h2>{escape(headline(trial))}</h2>",
            table((), rows_of(trial)),
            "<p></p>",
            table(("ms, of whole answers", *POINTS), latency_rows(trial)),
            '<div class="plots">',
            *_figures(_within(trial)),
            "</div>",
        ]
    manifest = result["manifest"]
    parts.append(f"<p><small>{escape(manifest['chunk_rule'])}</small></p>")
    made_by = f"sluice {manifest['sluice']}: {command_of(manifest)}"
    parts.append(f"<p><small>{escape(made_by)}</small></p>")
    return page_of(f"Load test of {endpoint['model']} at {endpoint['address']}", parts)


def _figures(plots: Sequence[str]) -> list[str]:
    return [f"<figure>{plot}</figure>" for plot in plots]


def _across(trials: Sequence[Json]) -> list[str]:
    """Plots against the load that was offered."""
    told = sorted((t for t in trials if t["valid"]), key=lambda t: float(t["planned_rps"]))

    def against(*keys: str | int, times: float = 1.0) -> list[tuple[float, float]]:
        points = ((trial["planned_rps"], _at(trial, keys)) for trial in told)
        return [(x, times * y) for x, y in points if y is not None]

    offered = "offered requests/s"
    rates = ("planned_rps", "sent_rps", "completed_rps", "good_rps")
    plots = [
        lines(
            Axes("Rates against offered load", offered, "requests/s"),
            {name.removesuffix("_rps"): against(name) for name in rates},
        ),
        lines(
            Axes("Time to first token against offered load", offered, "s"),
            {p: against("ttft_s", p) for p in ("p50", "p95", "p99")},
        ),
        lines(
            Axes("Time per output token against offered load", offered, "ms"),
            {p: against("tpot_s", p, times=1e3) for p in ("p50", "p95", "p99")},
        ),
    ]
    objectives = [each["objective"] for each in told[0]["objectives"]] if told else []
    if objectives:
        shares = {
            name: against("objectives", number, "missed_share")
            for number, name in enumerate(objectives)
        }
        limit = told[0]["objectives"][0]["missed_share_max"]
        axes = Axes("Share of requests that missed a target", offered, "share")
        plots.append(lines(axes, shares, (Mark("y", limit, "may miss"),)))
    return plots


def _within(trial: Json) -> list[str]:
    """Plots over the time of one trial."""
    name, parts = load_name(trial), trial["slices"]

    def over_time(key: str) -> list[tuple[float, float]]:
        return [(part["from_s"], part[key]) for part in parts if part[key] is not None]

    begin = Mark("x", trial["warm_up_s"], "counted from here")
    rates = ("planned_rps", "completed_rps", "good_rps", "refused_rps", "failed_rps")
    return [
        lines(
            Axes(f"Rates over time, {name}", "s", "requests/s"),
            {each.removesuffix("_rps"): over_time(each) for each in rates},
            (begin,),
        ),
        lines(
            Axes(f"Time to first token over time, {name}", "s", "s"),
            {"p50": over_time("ttft_s_p50"), "p99": over_time("ttft_s_p99")},
            (begin,),
        ),
        lines(
            Axes(f"In flight over time, {name}", "s", "requests"),
            {"in flight": over_time("in_flight")},
            (begin,),
        ),
        lines(
            Axes(f"Longest pause within an answer, {name}", "s", "s"),
            {"longest gap": over_time("gap_s_max")},
            (begin,),
        ),
        lines(
            Axes(f"Lag of the client, {name}", "share of requests", "ms"),
            {"lag": [(share, 1e3 * lag_s) for share, lag_s in trial["lag_curve"]]},
        ),
    ]


def _at(trial: Json, keys: Sequence[str | int]) -> float | None:
    value: Any = trial
    for key in keys:
        value = value[key]
    return None if value is None else float(value)
