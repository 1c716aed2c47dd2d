"""What ``sluice top`` shows, from the document that the dashboard reads. Pure: no clock, no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Document = Mapping[str, Any]
Sample = Mapping[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
_NOW_SAMPLES = 5
_SLOWEST_SHOWN = 6
_STYLES = {
    "retrieval": "magenta", "admission": "cyan", "queue": "yellow", "prefill": "blue",
    "decode": "green", "preempted": "red",
}  # fmt: skip
# Those that are not here are troubles.
_STATES = {
    "ready": "green", "starting": "yellow", "draining": "yellow", "warm": "cyan", "stopped": "dim",
}  # fmt: skip
_STRIP_WIDTH = 20


def view(document: Document, samples: Sequence[Sample], width: int) -> RenderableType:
    """One screen: how things stand, the last minutes as lines, replicas, refusals, the slowest."""
    return Group(
        _headline(document, samples),
        _now(document, samples),
        _lines(samples, max(10, width - 44)),
        _classes(document, samples),
        _replicas(document),
        _reasons(samples),
        _slowest(document),
    )


def _headline(document: Document, samples: Sequence[Sample]) -> Text:
    shown = document["model"] or "all models"
    span_s = sum(one["interval_s"] for one in samples)
    return Text.assemble(
        ("sluice ", "bold"), document["version"], f"  {shown}, last {span_s / 60:.1f} min"
    )


def _now(document: Document, samples: Sequence[Sample]) -> Table:
    latest = samples[-_NOW_SAMPLES:]
    last: Sample = latest[-1] if latest else {}
    spent_s = sum(one["interval_s"] for one in latest) or 1.0
    met, missed, refused = (_total(latest, name) for name in ("met", "missed", "refused"))
    judged = met + missed + refused
    objective = min((one["objective"] for one in document["classes"]), default=0.95)
    attained = met / judged if judged else None
    targets = {name: _targets(document, name) for name in ("ttft", "tpot")}
    kv = last["kv_used"] / last["kv_max"] if last.get("kv_max") and "kv_used" in last else 0.0
    cells = (
        ("goodput", f"{met / spent_s:.1f} req/s", ""),
        (
            "in target",
            "–" if attained is None else f"{100 * attained:.1f} %",
            "" if attained is None else "green" if attained >= objective else "red",
        ),
        ("first token p95", *_judged(_worst(latest, "ttft"), targets["ttft"])),
        ("per token p95", *_judged(_worst(latest, "tpot"), targets["tpot"])),
        ("refused", f"{refused / spent_s:.1f} req/s", "red" if refused else ""),
        ("waiting", str(last.get("waiting", 0)), "yellow" if last.get("waiting") else ""),
        ("KV", f"{100 * kv:.0f} %", "red" if kv > 0.95 else ""),
        ("tokens", f"{_total(latest, 'generated_tokens') / spent_s:,.0f}/s", ""),
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for name, _, _ in cells:
        table.add_column(name, no_wrap=True)
    table.add_row(*(Text(value, style=f"bold {style}".strip()) for _, value, style in cells))
    return table


def _lines(samples: Sequence[Sample], width: int) -> Panel:
    """A line of bars for each quantity over time, with its latest and largest value."""
    rows = (
        ("met /s", _rates(samples, "met"), "green", _plain),
        ("refused /s", _rates(samples, "refused"), "red", _plain),
        ("first token p95", [_rank(one, "ttft") for one in samples], "blue", seconds),
        ("per token p95", [_rank(one, "tpot") for one in samples], "blue", seconds),
        ("running", [_total([one], "decoding", "prefilling") for one in samples], "green", _plain),
        ("waiting", [one.get("waiting", 0) for one in samples], "yellow", _plain),
        ("generated tok/s", _rates(samples, "generated_tokens"), "cyan", _plain),
        ("replicas ready", [_ready(one) for one in samples], "green", _plain),
    )
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    for justify in ("left", "left", "right", "right"):
        table.add_column(no_wrap=True, justify=justify)
    for name, values, style, show in rows:
        known = [one for one in values if one is not None]
        latest = show(known[-1]) if known else "–"
        most = f"max {show(max(known))}" if known else ""
        table.add_row(
            name, Text(spark(values, width), style=style), latest, Text(most, style="dim")
        )
    return Panel(table, title="over time", title_align="left", border_style="dim")


def spark(values: Sequence[float | None], width: int) -> str:
    """Values as bars of eighths, the latest at the right; several share a bar by their largest."""
    per_bar = -(-len(values) // width) if values else 1
    groups = [values[at : at + per_bar] for at in range(0, len(values), per_bar)]
    tops = [max((one for one in group if one is not None), default=None) for group in groups]
    most = max((one for one in tops if one is not None), default=0.0)
    bars = (
        " " if one is None else _BARS[min(7, int(8 * one / most))] if most else _BARS[0]
        for one in tops
    )
    return "".join(bars).rjust(width)


def _classes(document: Document, samples: Sequence[Sample]) -> Text:
    sums: dict[str, list[int]] = {}
    for one in samples:
        for name, counts in one.get("classes", {}).items():
            known = sums.setdefault(name, [0, 0, 0])
            sums[name] = [a + b for a, b in zip(known, counts, strict=True)]
    goals = {one["slo_class"]: one["objective"] for one in document["classes"]}
    text = Text()
    for name, (met, missed, refused) in sorted(sums.items()):
        share = met / max(1, met + missed + refused)
        goal = goals.get(name)
        style = "" if goal is None else "green" if share >= goal else "red"
        promised = "" if goal is None else f" of {100 * goal:g} %"
        text.append(f"{name} ", "bold").append(f"{100 * share:.1f} %", style)
        text.append(f"{promised}: {met:,} met, {missed:,} missed, {refused:,} refused   ")
    return text


def _replicas(document: Document) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("replica", "model", "state", "places", "running", "waiting", "KV", "step", ""):
        table.add_column(title, no_wrap=title != "")
    for one in document["replicas"]:
        state = "breaker open" if one["breaker_open"] else one["state"].replace("_", " ")
        kv = f"{100 * one['kv_used'] / one['kv_max']:.0f} %" if one.get("kv_max") else "–"
        table.add_row(
            one["id"],
            one["model"],
            Text(state, style=_STATES.get(state, "red")),
            f"{one['places']} of {one['seats'] or '–'}",
            str(one.get("running", "–")),
            str(one.get("waiting", "–")),
            kv,
            seconds(one["step_s"]) if one.get("step_s") else "–",
            one["error"],
        )
    return table


def _reasons(samples: Sequence[Sample]) -> Text:
    text = Text()
    for name, style in (("refusals", "red"), ("degradations", "yellow")):
        sums: dict[str, int] = {}
        for one in samples:
            for reason, count in one.get(name, {}).items():
                sums[reason] = sums.get(reason, 0) + count
        for reason, count in sorted(sums.items(), key=lambda item: (-item[1], item[0])):
            text.append(f"{reason.replace('_', ' ')} ", style).append(f"{count:,}   ")
    return text if text.plain else Text("no request was refused or degraded", style="dim")


def _slowest(document: Document) -> RenderableType:
    if not document["slowest"]["e2e"]:
        return Text("no request has ended of late", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title_justify="left")
    for title in ("slowest", "model", "class", "whole", "first token", "tokens", "ended", "phases"):
        table.add_column(title, no_wrap=True)
    for one in document["slowest"]["e2e"][:_SLOWEST_SHOWN]:
        table.add_row(
            one["client_id"] or one["id"],
            one["model"],
            one["slo_class"] or "–",
            seconds(one["e2e_s"]),
            "–" if one["ttft_s"] is None else seconds(one["ttft_s"]),
            f"{one['prompt_tokens']:,} + {one['completion_tokens']:,}",
            one["reason"],
            _strip(one["phases"], one["e2e_s"]),
        )
    return table


def _strip(phases: Mapping[str, float], whole_s: float) -> Text:
    """The phases as one bar in their colours."""
    text, spent_s = Text(), 0.0
    if whole_s <= 0:
        return text
    for name, duration_s in phases.items():
        begun = round(_STRIP_WIDTH * spent_s / whole_s)
        spent_s += duration_s
        until = round(_STRIP_WIDTH * spent_s / whole_s)
        text.append("█" * (until - begun), _STYLES[name])
    return text


def seconds(value: float) -> str:
    """A duration in its own unit."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.1f} ms"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _total(samples: Sequence[Sample], *names: str) -> int:
    return sum(one.get(name, 0) for one in samples for name in names)


def _rates(samples: Sequence[Sample], name: str) -> list[float | None]:
    return [one.get(name, 0) / one["interval_s"] for one in samples]


def _ready(sample: Sample) -> int:
    """Replicas that serve."""
    return int(sample.get("replicas", {}).get("ready", 0))


def _rank(sample: Sample, name: str) -> float | None:
    """The 95th percentile of a sample."""
    found = sample.get(name)
    return None if found is None else float(found[1])


def _worst(samples: Sequence[Sample], name: str) -> float | None:
    return max((one for one in (_rank(s, name) for s in samples) if one is not None), default=None)


def _targets(document: Document, name: str) -> list[float]:
    return [one["seconds"][name] for one in document["classes"] if name in one["seconds"]]


def _judged(value: float | None, targets: Sequence[float]) -> tuple[str, str]:
    if value is None:
        return "–", ""
    late = bool(targets) and value > max(targets)
    return seconds(value), "red" if late else "green" if targets else ""
