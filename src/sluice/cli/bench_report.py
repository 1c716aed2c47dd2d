"""Results of ``sluice bench`` for readers: on the terminal and as Markdown. Nothing is computed."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from sluice.cli.bench_search_report import search_rows
from sluice.cli.console import plain_console

Json = Mapping[str, Any]
_LATENCIES = (
    ("ttft_s", "TTFT"),
    ("tpot_s", "TPOT"),
    ("itl_s", "gap between chunks"),
    ("itl_per_token_s", "gap per token"),
    ("e2e_s", "whole answer"),
)
# Where nobody looks at a terminal, lines may be as long as tables want.
_FILE_COLUMNS = 160
POINTS = ("p50", "p90", "p95", "p99", "max")
_RATES = (("planned", "planned_rps"), ("sent", "sent_rps"), ("whole", "completed_rps"),
          ("good", "good_rps"))  # fmt: skip


def trials_of(result: Json) -> Sequence[Json]:
    """The trials of a result; a result of one trial is that trial."""
    return result.get("trials") or [result]


def load_name(trial: Json) -> str:
    """A trial by its load."""
    if trial["mode"] == "open":
        return f"{trial['rate_rps']:g} requests/s"
    return f"{trial['concurrency']} client{'s' if trial['concurrency'] > 1 else ''}"


def headline(trial: Json) -> str:
    """The verdict on a trial, with its rates and how many answers were whole."""
    if not trial["valid"]:
        return f"{load_name(trial)}: void, {trial['void']['detail']}"
    share = trial["success_share"]
    whole = "no request" if share is None else f"{share:.1%} of {trial['requests']:,} answers whole"
    if trial["objectives"]:
        met = "all targets met" if trial["meets_slo"] else "targets missed"
    else:
        met = f"{trial['completed_rps']:.4g} requests/s completed"
    return f"{load_name(trial)}: {met}, {whole}"


def rows_of(trial: Json) -> list[tuple[str, str]]:
    """Further lines about a trial."""
    rates = ", ".join(
        f"{'-' if trial[key] is None else format(trial[key], '.4g')} {name}" for name, key in _RATES
    )
    found = [("requests/s", rates)]
    for each in trial["objectives"]:
        share = each["missed_share"]
        missed = "nothing to judge" if share is None else f"{share:.2%} missed it"
        limit = f"{each['missed_share_max']:.3g}"
        found.append((each["objective"], f"{missed}, {float(limit):.2%} may"))
    found += [(f"failed: {error['ending']}", _error(error)) for error in alike(trial["errors"])]
    tokens = trial["tokens"]
    if tokens["output"] is not None:
        prompt = tokens["prompt_mean"]
        parts = ["" if prompt is None else f"{prompt:.0f} in"]
        parts.append(f"{tokens['output_mean']:.0f} out on average")
        parts.append(f"{tokens['output_per_s']:.4g} out per second")
        parts.append(f"{tokens['per_chunk']:.2f} per chunk" if tokens["per_chunk"] else "")
        if tokens["cached_share"] is not None:
            parts.append(f"{tokens['cached_share']:.0%} of prompts cached")
        if tokens["reasoning"]:
            parts.append(f"{tokens['reasoning'] / tokens['output']:.0%} reasoning")
        found.append(("tokens", ", ".join(part for part in parts if part)))
    lengths = trial["lengths"]
    if lengths["compared"] and (lengths["prompt_share"] or lengths["output_share"]):
        shares = (
            f"{lengths['prompt_share']:.1%} of prompts and {lengths['output_share']:.1%} of "
            f"answers have another length than planned"
        )
        found.append(("lengths", shares))
    client = trial["client"]
    if client:
        words = (
            f"lag p99 {1e3 * client['lag_s_p99']:.3g} ms, {client['cpu_share']:.0%} of a core, "
            f"{client['in_flight_max']:,.0f} in flight at most, "
            f"{client['connections']:,.0f} connections"
        )
        found.append(("client", words))
    found += [("limited by", words) for words in trial["limited_by"]]
    return found


def alike(errors: Sequence[Json]) -> list[Json]:
    """Errors of one code together, with the first one's words: each tells other numbers."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for error in errors:
        key = (error["ending"], error["status"], error["reason"].partition(":")[0])
        known = found.setdefault(key, {**error, "count": 0, "with_retry_after": 0})
        known["count"] += error["count"]
        known["with_retry_after"] += error["with_retry_after"]
    return sorted(found.values(), key=lambda one: -one["count"])


def _error(error: Json) -> str:
    status = f"status {error['status']}, " if error["status"] else ""
    asked = ""
    if error["ending"] == "refused":
        count = error["with_retry_after"]
        asked = f"; {count:,} with Retry-After" if count else "; none with Retry-After"
    return f"{error['count']:,} times: {status}{error['reason']}{asked}"


def shown_ms(value_s: float | None) -> str:
    """A time in milliseconds, with three digits."""
    return "-" if value_s is None else f"{1e3 * value_s:,.3g}" if value_s < 1.0 else _whole(value_s)


def _whole(value_s: float) -> str:
    return f"{1e3 * value_s:,.0f}"


def print_result(result: Json) -> None:
    """All of it on the terminal."""
    console = plain_console(soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    for note in result["notes"]:
        console.print(f"note: {note}")
    trials = trials_of(result)
    if "capacity_rps" in result:
        for name, words in search_rows(result):
            console.print(f"  {name:<20} {words}")
        console.print(_overview(trials))
        return
    if len(trials) > 1:
        console.print(_overview(trials))
        return
    trial = trials[0]
    console.print(headline(trial), style="bold")
    for name, words in rows_of(trial):
        console.print(f"  {name:<20} {words}")
    console.print(_latencies(trial))
    for group in ("by_tenant", "by_class"):
        if trial[group]:
            console.print(_groups(trial[group]))


def latency_rows(trial: Json) -> list[list[str]]:
    """The percentiles of each latency, in milliseconds."""
    return [[name, *(shown_ms(trial[key][point]) for point in POINTS)] for key, name in _LATENCIES]


def _latencies(trial: Json) -> Table:
    table = _table("ms, of whole answers", *POINTS)
    for row in latency_rows(trial):
        table.add_row(*row)
    adjusted = trial["adjusted"]["ttft_s"]
    if trial["failed"]:
        name = "TTFT, failures as never"
        table.add_row(name, *(shown_ms(adjusted[point]) for point in POINTS))
    return table


def _groups(groups: Json) -> Table:
    table = _table("", "planned/s", "good/s", "whole", "TTFT p50 ms", "p95", "p99", "TPOT p50 ms")
    for name, each in groups.items():
        share = each["success_share"]
        table.add_row(
            name,
            f"{each['planned_rps']:.4g}",
            f"{each['good_rps']:.4g}",
            "-" if share is None else f"{share:.1%}",
            *(shown_ms(each["ttft_s"][point]) for point in ("p50", "p95", "p99")),
            shown_ms(each["tpot_s"]["p50"]),
        )
    return table


def _overview(trials: Sequence[Json]) -> Table:
    table = _table("load", *OVERVIEW)
    for trial in trials:
        table.add_row(*overview_row(trial))
    return table


OVERVIEW = ("planned/s", "sent/s", "whole/s", "good/s", "whole", "TTFT p50 ms", "p95", "p99",
            "TPOT p50 ms", "p95", "lag p99", "verdict")  # fmt: skip


def overview_row(trial: Json) -> list[str]:
    """One trial in one line."""
    share = trial["success_share"]
    if not trial["valid"]:
        verdict = f"void: {trial['void']['cause']}"
    else:
        verdict = "met" if trial["meets_slo"] else "missed"
    lag_s = trial["schedule_lag_p99_s"] if trial["mode"] == "open" else None
    return [
        load_name(trial),
        f"{trial['planned_rps']:.4g}",
        f"{trial['sent_rps']:.4g}",
        f"{trial['completed_rps']:.4g}",
        f"{trial['good_rps']:.4g}",
        "-" if share is None else f"{share:.1%}",
        *(shown_ms(trial["ttft_s"][point]) for point in ("p50", "p95", "p99")),
        *(shown_ms(trial["tpot_s"][point]) for point in ("p50", "p95")),
        shown_ms(lag_s),
        verdict,
    ]


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def markdown(result: Json) -> str:
    """All of it as Markdown."""
    manifest = result["manifest"]
    endpoint = manifest["endpoint"]
    lines = [f"# Load test of {endpoint['model']} at {endpoint['address']}", ""]
    lines += [f"- {note}" for note in result["notes"]]
    if "capacity_rps" in result:
        lines += [
            f"- {name}: {words}" if name else f"- {words}" for name, words in search_rows(result)
        ]
    trials = trials_of(result)
    lines += ["", *_pipes(("load", *OVERVIEW), [overview_row(trial) for trial in trials])]
    for trial in trials:
        lines += ["", f"## {headline(trial)}", ""]
        lines += [f"- {name}: {words}" for name, words in rows_of(trial)]
        lines += ["", *_pipes(("ms", *POINTS), latency_rows(trial))]
    lines += ["", manifest["chunk_rule"], ""]
    lines += [f"sluice {manifest['sluice']}, `{command_of(manifest)}`", ""]
    return "\n".join(lines)


def command_of(manifest: Json) -> str:
    """The command that a report is of, as a shell takes it."""
    return shlex.join(("sluice", *manifest["arguments"]))


def _pipes(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
