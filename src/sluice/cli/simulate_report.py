"""What a simulation found, as one JSON document and as lines for readers. Nothing is computed."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.table import Table
from rich.text import Text

from sluice.cli.console import plain_console
from sluice.planner.names import shown_s
from sluice.planner.outcome import Outcome, Tally

_GROUPS = ("classes", "tenants", "models")
_TABLE_WIDTH = 120


def _seconds(value: float | None) -> str:
    return "-" if value is None else shown_s(value)


def document(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain values."""
    whole = outcome.whole
    return {
        "requests": whole.requests,
        "attainment": outcome.attainment,
        "attainment_from_first_ask": whole.attainment_from_first,
        "attainment_half_width": outcome.attainment_half_width,
        "goodput_rps": outcome.goodput_rps,
        "offered_rps": whole.requests / outcome.arriving_s if outcome.arriving_s else 0.0,
        "refused": whole.refused,
        "refused_for": dict(sorted(outcome.reasons.items())),
        "failed": whole.failed,
        "left": whole.left,
        "retries": whole.retries,
        "degraded": whole.degraded,
        "ttft_s": whole.ttft_s.percentiles(),
        "tpot_s": whole.tpot_s.percentiles(),
        "e2e_s": whole.e2e_s.percentiles(),
        "output_tokens": whole.output_tokens,
        "replica_hours": outcome.replica_hours,
        "warm_hours": outcome.warm_hours,
        "scaling": [scaling._asdict() for scaling in outcome.scalings],
        "preemptions": outcome.preemptions,
        "simulated_s": outcome.simulated_s,
        "in_fleet": {"at_half": outcome.waiting_at_half, "at_end": outcome.waiting_at_end},
        "queue_grows": outcome.queue_grows,
        **{group: _tallies(getattr(outcome, group)) for group in _GROUPS},
    }


def _tallies(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    return {
        name: {
            "requests": tally.requests,
            "attainment": tally.attainment,
            "refused": tally.refused,
            "failed": tally.failed,
            "degraded": tally.degraded,
            "ttft_s": tally.ttft_s.percentiles(),
            "tpot_s": tally.tpot_s.percentiles(),
        }
        for name, tally in sorted(tallies.items())
    }


def print_outcome(found: Mapping[str, Any]) -> None:
    """The document for readers."""
    console = plain_console(soft_wrap=True)
    half = found["attainment_half_width"]
    rates = f"{_rate(found['goodput_rps'])} of {_rate(found['offered_rps'])} req/s"
    met = f"{found['attainment']:.1%} of {found['requests']:,} requests met their targets"
    console.print(Text.assemble((met, "bold"), f" (± {half:.1%}), {rates}"))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in found["refused_for"].items())
    for name, value in (
        ("refused", f"{found['refused']:,}{f' ({reasons})' if reasons else ''}"),
        ("failed, degraded", f"{found['failed']:,}, {found['degraded']:,}"),
        ("retries", _retries(found)),
        ("preemptions", f"{found['preemptions']:,}"),
        ("replica hours", f"{_rate(found['replica_hours'])}"),
        *([("replicas", _scalings(found))] if found["scaling"] else []),
        ("in the fleet", "{at_half} at half, {at_end} at the last arrival".format_map(
            found["in_fleet"])),
        ("time", f"{found['simulated_s']:,.0f} s simulated in {found['wall_s']:.1f} s"),
    ):  # fmt: skip
        console.print(f"  {name:<18} {value}")
    if found["queue_grows"]:
        console.print(
            "overload: more requests wait for a first token at the end than at half. There is no "
            "steady state: what is late, and how late, tells how long the run was"
        )
    # A long line that a terminal breaks is read more easily than names without their ends.
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(_table(found))


def _scalings(found: Mapping[str, Any]) -> str:
    """How many replicas served, where that followed the load."""
    numbers = [one["number"] for one in found["scaling"]]
    reasons = Counter(one["reason"].replace("_", " ") for one in found["scaling"])
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return f"{min(numbers)} to {max(numbers)}; changes by what asked for them: {why}"


def _retries(found: Mapping[str, Any]) -> str:
    if not found["retries"]:
        return "0"
    share = found["attainment_from_first_ask"]
    return f"{found['retries']:,}; {share:.1%} met their targets from when a client first asked"


def print_beside(found: Mapping[str, Mapping[str, Any]], notes: Sequence[str]) -> None:
    """Several documents side by side, with the change of the last against the one before it."""
    console = plain_console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in (*found, "change"):
        table.add_column(name, justify="right")
    for name, shown, value_of in _BESIDE:
        values = [value_of(one) for one in found.values()]
        table.add_row(name, *(shown(value) for value in values), _change(*values[-2:]))
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "-"
    if before == after:
        return "="
    return "new" if not before else f"{after / before - 1.0:+.1%}"


def _count(value: float | None) -> str:
    return f"{value or 0:,.0f}"


def _share(value: float | None) -> str:
    return f"{value or 0.0:.1%}"


def _rate(value: float | None) -> str:
    value = value or 0.0
    return f"{value:.3g}" if value < 100.0 else f"{value:,.0f}"


def _percentile(name: str, which: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda found: found[name][which]


_BESIDE: Sequence[tuple[str, Callable[[float | None], str], Callable[..., float | None]]] = (
    ("requests", _count, itemgetter("requests")),
    ("met their targets", _share, itemgetter("attainment")),
    ("goodput, req/s", _rate, itemgetter("goodput_rps")),
    ("refused", _count, itemgetter("refused")),
    ("failed", _count, itemgetter("failed")),
    ("client left", _count, itemgetter("left")),
    ("degraded", _count, itemgetter("degraded")),
    ("preemptions", _count, itemgetter("preemptions")),
    *(
        (f"{title} {which}", _seconds, _percentile(name, which))
        for title, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
        for which in ("p50", "p95", "p99")
    ),
    ("replica hours", _rate, itemgetter("replica_hours")),
)


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "requests", "met", "refused", "TTFT p50", "p95", "p99", "TPOT p50", "p95"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = {"all": found}
    for group in _GROUPS:
        if len(found[group]) > 1:
            rows |= {f"{group}: {name}": row for name, row in found[group].items()}
    for name, row in rows.items():
        ttft_s, tpot_s = row["ttft_s"], row["tpot_s"]
        table.add_row(
            name,
            f"{row['requests']:,}",
            f"{row['attainment']:.1%}",
            f"{row['refused']:,}",
            *(_seconds(ttft_s[name]) for name in ("p50", "p95", "p99")),
            *(_seconds(tpot_s[name]) for name in ("p50", "p95")),
        )
    return table
