"""What must hold for sluice's ``slo`` policy, beside what was measured, from the other tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.load.store import Share, Table
from benchmarks.load.tables import (
    LABELS,
    Source,
    agree_tables,
    fairness_tables,
    goodput_tables,
    long_tables,
    retry_tables,
)

Row = Mapping[str, Any]
OVERLOADS = ("1.5×", "2×", "4×")


def summary_tables(source: Source) -> list[Table]:
    """One line for each bound of which something was measured."""
    lines = [*_goodput(source), *_others(source)]
    rows = tuple(
        (what, value, f"{'≥' if at_least else '≤'} {bound:g}", "yes" if holds else "no")
        for what, value, bound, at_least in lines
        for holds in [value >= bound if at_least else value <= bound]
    )
    columns = ("what", "measured", "must be", "holds")
    return [Table(f"What must hold ({source.world})", columns, rows)] if rows else []


def _rows(tables: list[Table]) -> Iterator[Row]:
    """The rows of sluice under ``slo``."""
    for table in tables:
        for row in table.to_json()["rows"]:
            if row.get("engine", LABELS["slo"]) == LABELS["slo"]:
                yield {"title": table.title, **row}


def _goodput(source: Source) -> Iterator[tuple[str, float, float, bool]]:
    for row in _rows(goodput_tables(source)):
        mix = "azure" if "azure" in row["title"] else "poisson"
        where = f"{mix} {row['load']}"
        if row["load"] in OVERLOADS:
            yield f"goodput of own peak, {where}", Share(row["of own peak"]), 0.95, True
            yield f"preemptions, {where}", row["preemptions"], 0, False
        if row["load"] == "2×":
            yield f"met of admitted, {where}", Share(row["met of admitted"]), 0.99, True
            for name in ("refusal at the door p99, ms: client", "server"):
                if row[name] is not None:
                    yield f"refusal p99, ms, {name[-6:]}, {where}", row[name], 5.0, False


def _others(source: Source) -> Iterator[tuple[str, float, float, bool]]:
    for row in _rows(long_tables(source)):
        if row["ratio"] is not None:
            yield "chat ITL p99 beside long prompts over alone", row["ratio"], 2.0, False
            yield "TTFT of long prompts over what is allowed", row["ratio to allowed"], 1.3, False
    for row in _rows(fairness_tables(source)):
        if row["p99 ratio"] is not None:
            yield "TTFT p99 beside the greedy tenant over alone", row["p99 ratio"], 1.2, False
    for row in _rows(retry_tables(source)):
        yield "served at first retry", Share(row["served at first retry"]), 0.9, True
        yield "retries, peak over mean of 1 s", row["peak/mean, 1 s"], 1.5, False
    for row in _rows(agree_tables(source)):
        if row["virtual/live"] is not None:
            what = f"goodput in virtual time over live, off by, {row['mix']} {row['load']}"
            yield what, abs(row["virtual/live"] - 1), 0.1, False
