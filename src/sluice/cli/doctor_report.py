"""A diagnosis as a document for JSON and as lines for a terminal.

It words and rounds what ``doctor/diagnosis`` found; nothing is judged here.
"""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice.cli.console import plain_console
from sluice.doctor.diagnosis import Diagnosis, Judged, Verdict
from sluice.doctor.shares import Share, Shares
from sluice.doctor.spike import Spike
from sluice.doctor.windows import Window, time_of

_STYLES = {
    Verdict.CONFIRMED: "bold red",
    Verdict.LIKELY: "yellow",
    Verdict.POSSIBLE: "cyan",
    Verdict.CANNOT_TELL: "magenta",
    Verdict.RULED_OUT: "dim",
}
_PIPE_WIDTH = 120
# A phase with less says nothing.
EXCESS_S_MIN = 1e-4
# Where so many requests are of new lengths, other requests and slowdown cannot be told apart.
_NEW_SHARE_MIN = 0.02


def document(found: Diagnosis) -> dict[str, Any]:
    """All that was found as plain values."""
    return {
        "spike": _spike(found.spike),
        "metrics": [_spike(each) for each in found.spikes],
        "window": _window(found.windows.incident),
        "baseline": _window(found.windows.baseline),
        "window_found": found.windows.found,
        "refused_share": {"before": found.refused[0], "after": found.refused[1]},
        "phases": None
        if found.excess is None
        else {
            "excess_s": found.excess.phases,
            "unattributed_s": found.excess.unattributed_s,
            "requests": found.excess.requests,
        },
        "held_by": None if found.held is None else found.held.shares,
        "engine_stages": {
            name: {"before_s": told.before_s, "after_s": told.after_s}
            for name, told in found.stages.items()
        },
        "replay": {
            "requests": found.shares.replayed,
            "misfit": found.shares.misfit,
            "usable": found.shares.usable,
        },
        "causes": [_cause(each) for each in found.causes],
        "missing": list(found.missing),
        "examples": list(found.examples),
        "problems": list(found.problems),
    }


def _spike(spike: Spike) -> dict[str, Any]:
    return {
        "metric": f"{spike.metric}_p{spike.percentile:g}",
        "before_s": spike.before_s,
        "after_s": spike.after_s,
        "change_low_s": spike.low_s,
        "change_high_s": spike.high_s,
        "confirmed": spike.confirmed,
        "mix_s": spike.mix_s,
        "new_share": spike.new_share,
        "requests_before": spike.requests[0],
        "requests_after": spike.requests[1],
        "why": spike.why,
    }


def _window(window: Window) -> dict[str, str]:
    return {"start": time_of(window.start_ns), "end": time_of(window.end_ns)}


def _cause(judged: Judged) -> dict[str, Any]:
    share = judged.share
    return {
        "name": judged.name,
        "title": judged.title,
        "verdict": judged.verdict.value,
        "share_low": None if share is None else share.low,
        "share": None if share is None else share.share,
        "share_high": None if share is None else share.high,
        "evidence": list(judged.evidence),
        "against": list(judged.against),
        "missing": judged.missing or None,
        "next": judged.next_look or None,
    }


# ---------------------------------------------------------------------------------- for people


def print_diagnosis(found: Diagnosis, folder: Path | None = None) -> None:
    """The diagnosis, the answer first; ``folder`` is the journal, where it is not the usual one."""
    console = plain_console()
    if not console.is_terminal:
        console = plain_console(width=_PIPE_WIDTH)
    console.print(Text(headline(found), style="bold"), soft_wrap=True)
    console.print(Text(_compared(found)), soft_wrap=True)
    if max(found.refused) > 0:
        before, after = found.refused
        console.print(Text(f"refused: {before:.1%} before, {after:.1%} then"))
    for problem in found.problems:
        console.print(Text(f"note: {problem}"), soft_wrap=True)
    if found.spike.confirmed:
        _details(found, console)
        _print_examples(found, folder, console)


def headline(found: Diagnosis) -> str:
    """What happened, and the first cause, in a line."""
    spike = found.spike
    name = f"{spike.metric.upper()} p{spike.percentile:g}"
    if spike.before_s is None or spike.after_s is None:
        return f"{name}: {spike.why}"
    change = f"{_seconds(spike.before_s)} → {_seconds(spike.after_s)}"
    if not spike.confirmed:
        return f"No reliable change: {name} {change}; {spike.why}"
    first = found.causes[0] if found.causes else None
    if first is None or first.verdict not in (Verdict.CONFIRMED, Verdict.LIKELY):
        return f"{name} {change}: no cause found"
    share = "" if first.share is None else f", {share_words(first.share)} of it"
    return f"{name} {change}: {first.title} ({first.verdict}{share})"


def _compared(found: Diagnosis) -> str:
    incident, baseline = found.windows.incident, found.windows.baseline
    how = "found" if found.windows.found else "given"
    counts = found.spike.requests
    return (
        f"window ({how}) {time_of(incident.start_ns)} for {incident.duration_s:,.0f} s, "
        f"{counts[1]:,} requests; baseline {time_of(baseline.start_ns)} for "
        f"{baseline.duration_s:,.0f} s, {counts[0]:,} requests"
    )


def _details(found: Diagnosis, console: Console) -> None:
    spike = found.spike
    console.print(Text(_split(spike)), soft_wrap=True)
    _print_phases(found, console)
    told = [each for each in found.causes if each.verdict is not Verdict.RULED_OUT]
    for judged in told:
        _print_cause(judged, console)
    ruled_out = [each for each in found.causes if each.verdict is Verdict.RULED_OUT]
    if ruled_out:
        console.print(Text("\nruled out", style="bold"))
        for judged in ruled_out:
            reason = judged.against[0] if judged.against else "without it nothing would change"
            if judged.share is not None and not judged.against:
                reason = f"without it {share_words(judged.share)} of the change would go"
            console.print(Text(f"  {judged.name:<18} {reason}", style="dim"), soft_wrap=True)
    if found.shares.replayed:
        console.print(Text(f"\n{replay_words(found.shares)}"), soft_wrap=True)


def _split(spike: Spike) -> str:
    """Of what the change is made."""
    change = f"the change is {_seconds(spike.low_s)} to {_seconds(spike.high_s)}"
    if spike.new_share >= _NEW_SHARE_MIN:
        return (
            f"{change}; {spike.new_share:.0%} of the requests are of lengths that were not there "
            f"before, so how much of it other requests make is left to the causes"
        )
    mixed = f"other requests than before make {_seconds(spike.mix_s)} of it"
    return f"{change}; {mixed}, the rest is slowdown"


def replay_words(shares: Shares) -> str:
    """On what shares rest."""
    off = f"the replay of what happened is {shares.misfit or 0.0:.0%} off"
    if not shares.usable:
        return f"{off}: no share is told of causes that it takes a replay to weigh"
    return f"shares are from replays of {shares.replayed:,} requests without each cause; {off}"


def _print_examples(found: Diagnosis, folder: Path | None, console: Console) -> None:
    """Slow requests, the first of them with the command that shows its life."""
    if not found.examples:
        return
    where = "" if folder is None else f" --journal {shlex.quote(str(folder))}"
    console.print(Text(f"look at: sluice trace {found.examples[0]}{where}"), soft_wrap=True)
    if found.examples[1:]:
        console.print(Text(f"also: {', '.join(found.examples[1:])}"), soft_wrap=True)


def _print_phases(found: Diagnosis, console: Console) -> None:
    excess, held = found.excess, found.held
    if excess is None:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("phase")
    table.add_column("excess", justify="right")
    for name, value in sorted(excess.phases.items(), key=lambda item: -item[1]):
        if abs(value) >= EXCESS_S_MIN:
            table.add_row(name, _seconds(value))
    table.add_row("unattributed", _seconds(excess.unattributed_s))
    console.print(Text(f"\nmean excess of the {excess.requests:,} slowest by phase"))
    console.print(table)
    if held is not None:
        parts = (f"{name} {share:.0%}" for name, share in held.shares.items() if share >= 0.005)
        console.print(Text(f"while they waited their replicas did: {', '.join(parts)}"))
    if found.stages:
        told = (
            f"{name} {_seconds(each.before_s)} → {_seconds(each.after_s)}"
            for name, each in found.stages.items()
        )
        console.print(Text(f"engines elsewhere tell, per request: {', '.join(told)}"))


def _print_cause(judged: Judged, console: Console) -> None:
    share = "" if judged.share is None else f"  {share_words(judged.share)} of the change"
    console.print(
        Text.assemble(
            "\n", (f"{judged.verdict}", _STYLES[judged.verdict]), f"  {judged.name}{share}"
        ),
        soft_wrap=True,
    )
    if judged.missing:
        console.print(Text(f"  missing: {judged.missing}"), soft_wrap=True)
        return
    console.print(Text(f"  {judged.title}"), soft_wrap=True)
    for line in judged.evidence:
        console.print(Text(f"  + {line}"), soft_wrap=True)
    for line in judged.against:
        console.print(Text(f"  - {line}"), soft_wrap=True)
    if judged.next_look:
        console.print(Text(f"  next: {judged.next_look}"), soft_wrap=True)


def share_words(share: Share) -> str:
    """A share with its bounds; what a replay says beyond none and all of it means just that."""
    low, value, high = (min(1.0, max(0.0, x)) for x in (share.low, share.share, share.high))
    return f"{value:.0%} ({low:.0%} to {high:.0%})"


def _seconds(value: float) -> str:
    if abs(value) < 1.0:
        return f"{1e3 * value:,.1f} ms"
    return f"{value:,.2f} s"
