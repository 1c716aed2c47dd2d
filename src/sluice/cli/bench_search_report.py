"""What a search found, for readers: on the terminal, as Markdown, as plots. Nothing is computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.cli.plots import Axes, Mark, lines

Json = Mapping[str, Any]
# Shares far above the limit are out of the plot, which is about where the limit is crossed.
_SHOWN_LIMITS = 6.0


def rate_words(value: float | None) -> str:
    """A rate with three digits, and all before the point."""
    if value is None:
        return "unknown"
    return f"{value:.3g}" if value < 1000.0 else f"{value:,.0f}"


def interval_words(found: Json) -> str:
    """What is known, in one line."""
    capacity, slo = found["capacity_rps"], found["slo_rps"]
    closed = capacity["closed_loop"]
    parts = [] if closed is None else [f"closed loop {rate_words(closed['estimate'])}/s"]
    if capacity["low"] is not None or capacity["high"] is not None:
        parts.append(f"capacity {_between(capacity)}")
    if slo is not None:
        parts.append(f"SLO rate {_about(slo)}")
    left_s = max(0.0, found["budget_s"] - found["spent_s"])
    return f"{', '.join(parts) or 'nothing known yet'}; {left_s:.0f} s left"


def _between(bounds: Json) -> str:
    if bounds["low"] is None and bounds["high"] is None:
        return "not shown"
    if bounds["high"] is None:
        return f"at least {rate_words(bounds['low'])}/s"
    if bounds["low"] is None:
        return f"below {rate_words(bounds['high'])}/s"
    return f"{rate_words(bounds['low'])} to {rate_words(bounds['high'])}/s"


def _about(slo: Json) -> str:
    if slo["estimate"] is None:
        return _between(slo)
    return (
        f"{rate_words(slo['estimate'])}/s ({rate_words(slo['low'])} to {rate_words(slo['high'])})"
    )


def search_rows(found: Json) -> list[tuple[str, str]]:
    """The answer, line by line."""
    capacity, slo = found["capacity_rps"], found["slo_rps"]
    closed = capacity["closed_loop"]
    words = _between(capacity)
    if closed is not None:
        words += (
            f"; closed loop {rate_words(closed['estimate'])}/s with {closed['concurrency']} clients"
        )
    rows = [("capacity", words)]
    if capacity["metastable"]:
        rows.append(("", "after overload the server did not come back to a rate it had sustained"))
    if slo is not None:
        rows.append(
            ("SLO rate", f"{_about(slo)}, 90 % interval" if slo["estimate"] else _about(slo))
        )
        certified = slo["certified"]
        rows.append(("certified", "no rate" if certified is None else f"{rate_words(certified)}/s"))
        rows.append(("binding", found["binding"] or "nothing missed a target"))
        if slo["estimate"] is not None and not slo["resolved"]:
            half = (slo["high"] - slo["low"]) / 2.0 / slo["estimate"]
            rows.append(("", f"not resolved better than ±{half:.1%}: a longer --budget narrows it"))
    if found["client_rps"] is not None:
        rows.append(("client", f"kept its schedule to {rate_words(found['client_rps'])}/s alone"))
    took = f"{found['spent_s']:.0f} s of {found['budget_s']:.0f} s, {len(found['trials'])} trials"
    rows.append(("search", took if found["complete"] else f"{took}; ended early"))
    rows += [("note", note) for note in found["search_notes"]]
    return rows


def search_plots(found: Json) -> list[str]:
    """Shares that miss against the rate, and the intervals as the search went on."""
    slo, trials = found["slo_rps"], found["search_trials"]
    if slo is None or slo["low"] is None:
        return []
    limits = {
        each["metric"]: each["missed_share_max"]
        for trial in found["trials"]
        for each in trial["objectives"]
    }
    limit = max(limits.values(), default=0.0)
    shares = {name: _shares(trials, name, _SHOWN_LIMITS * limit) for name in found["fit"]}
    marks = [Mark("y", limit, "may miss")]
    if slo["estimate"] is not None:
        marks.append(Mark("x", slo["estimate"], "SLO rate", slo["low"], slo["high"]))
    return [
        lines(Axes("Share that missed, by trial", "offered requests/s", "share"), shares, marks)
    ]


def _shares(trials: Sequence[Json], name: str, most: float) -> list[tuple[float, float]]:
    points = []
    for trial in trials:
        count = trial["missed"].get(name)
        if trial["rate_rps"] and trial["valid"] and count and count["requests"]:
            share = count["missed"] / count["requests"]
            if share <= most:
                points.append((trial["rate_rps"], share))
    return sorted(points)
