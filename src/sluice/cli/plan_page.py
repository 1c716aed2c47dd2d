"""A plan as one HTML file with plots, which loads nothing.

Called by ``plan.py`` for ``--html``. Numbers come from the plan and its document; nothing is
estimated here.
"""

from html import escape
from pathlib import Path
from typing import Any

from sluice.cli.page import page_of, table, write_whole
from sluice.cli.plan_report import headline, rows_of
from sluice.cli.plots import Axes, Mark, bars, lines
from sluice.planner.candidates import Candidates
from sluice.planner.curves import curve_of, step_parts_s
from sluice.planner.memory import GIB
from sluice.planner.names import CannotPlan
from sluice.planner.plan import Plan

# What is further above its target would flatten all that is near it.
_SHOWN_TARGETS = 4.0


def write_page(
    path: Path, found: Candidates, shown: dict[str, Any], explained: dict[str, dict[str, Any]]
) -> None:
    """Writes the report; ``shown`` is the plan's document and ``explained`` what its numbers are.

    Raises ``CannotPlan`` where the file cannot be written.
    """
    try:
        write_whole(path, page(found, shown, explained))
    except OSError as error:
        raise CannotPlan(f"cannot write {path}: {error.strerror}") from None


def page(found: Candidates, shown: dict[str, Any], explained: dict[str, dict[str, Any]]) -> str:
    """The report as HTML."""
    best = found.best
    knobs = [(f"× {knob['gain']:.2f}", knob["change"]) for knob in shown["knobs"]]
    numbers = [
        (path, _value(each["value"], each["unit"]), each["formula"], _inputs(each), each["source"])
        for path, each in explained.items()
    ]
    return page_of(
        headline(best),
        (
            table((), rows_of(best)),
            *(f"<p>Note: {escape(note)}</p>" for note in best.notes),
            '<div class="plots">',
            *(f"<figure>{plot}</figure>" for plot in _plots(found)),
            "</div><h2>What each change would do</h2>",
            table(("planned rate per GPU", "change"), knobs),
            "<h2>Leaned on</h2>",
            table((), [(each,) for each in shown["leaned_on"]]),
            '<h2>What each number is</h2><div class="wide"><small>',
            table(("number", "value", "formula", "inputs", "from"), numbers),
            "</small></div>",
        ),
    )


def _plots(found: Candidates) -> list[str]:
    best = found.best
    targets, rate = best.question.targets, best.replica.slo_rps
    curve = curve_of(best)
    share = f"p{targets.percentile:g}"
    load = "requests per second of one replica"
    at_rate = Mark("x", rate.estimate, "SLO rate", rate.low, rate.high)
    every = [curve, *(curve_of(each) for each in found.others)]
    return [
        lines(
            Axes("Time to first token against load", load, f"TTFT {share}, s"),
            {
                "TTFT": [
                    (each.rate_rps, each.ttft_s)
                    for each in curve.moments
                    if each.ttft_s <= _SHOWN_TARGETS * targets.engine_ttft_s
                ]
            },
            (Mark("y", targets.engine_ttft_s, "target"), at_rate),
        ),
        lines(
            Axes("Time per token against load", load, f"TPOT {share}, ms"),
            {
                "TPOT": [
                    (each.rate_rps, 1e3 * each.tpot_s)
                    for each in curve.moments
                    if each.tpot_s <= _SHOWN_TARGETS * targets.tpot_s
                ]
            },
            (Mark("y", 1e3 * targets.tpot_s, "target"), at_rate),
        ),
        lines(
            Axes("Throughput against speed", f"TPOT {share}, ms", "output tokens/s of one GPU"),
            {each.name: [(1e3 * s, tokens) for s, tokens in each.frontier()] for each in every},
            (Mark("x", 1e3 * targets.tpot_s, "target"),),
        ),
        bars("Memory of one GPU", {"memory": _memory_gib(best)}, "GiB"),
        bars(
            "Where the time goes, at the SLO rate",
            {
                kind: {name: 1e3 * seconds for name, seconds in parts.items()}
                for kind, parts in step_parts_s(best).items()
            },
            "ms",
        ),
    ]


def _memory_gib(found: Plan) -> dict[str, float]:
    """What takes the memory, with KV of the requests at the SLO rate and what is free beside."""
    replica, deployment = found.replica, found.model.deployment
    at = replica.at_slo
    assert at is not None  # noqa: S101 - a plan without a rate is refused
    parts = {name: value / GIB for name, value in replica.budget.lines().items()}
    del parts["device"]
    left = parts.pop("left for KV")
    each = deployment.kv_bytes(found.question.load.lengths.resident_tokens) / GIB
    used = min(left, at.concurrency / deployment.layout.groups * each)
    return {**parts, "KV at the SLO rate": used, "KV free": left - used}


def _value(value: float | str | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.4g} {unit}" if isinstance(value, float) else f"{value} {unit}"


def _inputs(each: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {_value(value, '').strip()}" for name, value in each["inputs"].items()
    )
