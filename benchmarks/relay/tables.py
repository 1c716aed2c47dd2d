"""Tables of the figures: medians of the rounds, their spread, what is added, what must hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.relay.scenarios import Figures

DIRECT, OURS = "direct", "sluice"
# Of a scenario, for each system, the figures of its rounds.
Rounds = Mapping[str, Sequence[Figures]]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a scenario; ``added`` tells the difference to the run without a gateway."""

    title: str
    figure: str
    added: bool = False
    digits: int = 0


COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "one": (
        Column("whole µs added", "whole_us", added=True),
        Column("its p99 µs", "whole_us_p99"),
        Column("first token µs added", "first_us", added=True),
        Column("400 KB µs added", "large_us", added=True),
        Column("CPU µs a request", "cpu_us"),
    ),
    "load": (
        Column("requests/s", "requests_per_s"),
        Column("CPU µs a request", "cpu_us"),
        Column("p50 ms", "whole_ms", digits=1),
        Column("p99 ms", "whole_ms_p99", digits=1),
    ),
    "paced": (
        Column("events/s", "events_per_s"),
        Column("share of the core", "share", digits=2),
        Column("events/s per core", "events_per_core_s"),
        Column("delay p50 ms added", "event_ms", added=True, digits=1),
        Column("delay p99 ms added", "event_ms_p99", added=True, digits=1),
        Column("longest delay ms", "event_ms_max", digits=1),
        Column("longest gap ms", "gap_ms_max", digits=1),
    ),
    "large": (
        Column("requests/s", "requests_per_s"),
        Column("CPU µs a request", "cpu_us"),
        Column("small p99 ms alone", "small_ms_p99", digits=1),
        Column("beside", "beside_ms_p99", digits=1),
        Column("raised by", "raised_ms", digits=1),
    ),
    "memory": (
        Column("at rest MB", "ready_mb"),
        Column("1,000 streams MB", "streams_mb"),
        Column("after 20,000 requests MB", "early_mb"),
        Column("after 100,000 MB", "late_mb"),
    ),
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a column of ours must not pass; at least it where ``least``."""

    scenario: str
    title: str
    bound: float
    least: bool = False


TARGETS = (
    Target("one", "whole µs added", 400),
    Target("one", "first token µs added", 450),
    Target("one", "400 KB µs added", 2500),
    Target("load", "requests/s", 5000, least=True),
    Target("paced", "events/s per core", 25_000, least=True),
    Target("paced", "delay p99 ms added", 10),
    Target("paced", "longest delay ms", 50),
    Target("large", "requests/s", 600, least=True),
    Target("large", "raised by", 5),
    Target("memory", "1,000 streams MB", 150),
)


def values(rounds: Rounds, system: str, column: Column) -> list[float]:
    """The column of each round in which it was measured."""
    found = []
    for number, figures in enumerate(rounds[system]):
        value = figures.get(column.figure)
        if value is not None and column.added:
            base = None if system == DIRECT else rounds[DIRECT][number].get(column.figure)
            value = None if base is None else value - base
        if value is not None:
            found.append(value)
    return found


def table(scenario: str, rounds: Rounds) -> str:
    """A row for each system. In columns of what is added, direct shows what it takes itself."""
    columns = COLUMNS[scenario]
    lines = [f"| {scenario} | " + " | ".join(column.title for column in columns) + " |"]
    lines.append("|---|" + "--:|" * len(columns))
    for system in rounds:
        plain = [Column(c.title, c.figure, digits=c.digits) for c in columns]
        shown = plain if system == DIRECT else columns
        cells = [_cell(values(rounds, system, column), column.digits) for column in shown]
        if any(cells):
            lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: Sequence[float], digits: int) -> str:
    if not found:
        return ""
    middle = f"{median(found):,.{digits}f}"
    if len(found) == 1:
        return middle
    return f"{middle} ({min(found):,.{digits}f}–{max(found):,.{digits}f})"


def targets(results: Mapping[str, Rounds]) -> str:
    """What sluice must reach beside its medians."""
    lines = ["| must hold | bound | measured | |", "|---|--:|--:|---|"]
    for target in TARGETS:
        rounds = results.get(target.scenario)
        if rounds is None or OURS not in rounds:
            continue
        column = next(c for c in COLUMNS[target.scenario] if c.title == target.title)
        if not (found := values(rounds, OURS, column)):
            continue
        middle = median(found)
        holds = middle >= target.bound if target.least else middle <= target.bound
        sign = "≥" if target.least else "≤"
        bound, verdict = f"{sign} {target.bound:,g}", "yes" if holds else "no"
        name = f"{target.scenario}: {target.title}"
        lines.append(f"| {name} | {bound} | {_cell([middle], column.digits)} | {verdict} |")
    return "\n".join(lines)
