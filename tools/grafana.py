"""Writes docs/monitoring/grafana-dashboard.json: the panels below, laid out in rows.

``python -m tools.grafana``; a test compares the file with what is made here. Every expression goes
by the labels of the metrics, so that any model, class and replica is shown, and gives nothing
instead of NaN where nothing happened.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = Path("docs/monitoring/grafana-dashboard.json")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_MODEL = 'model=~"$model"'
_CLASS = f'{_MODEL}, slo_class=~"$slo_class"'
_WINDOW = "[$__rate_interval]"
_WIDTH, _HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """One panel: expressions with the names of their lines."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str
    meaning: str
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def _rate(name: str, labels: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}{{{labels}}}{_WINDOW}))"


def _quantiles(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = ", ".join(filter(None, ("le", by)))
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, {_rate(f'{name}_bucket', _CLASS, labels)}) >= 0",
            f"p{round(100 * q)}{legend}",
        )
        for q in (0.5, 0.95, 0.99)
    )


_MET = _rate("sluice_class_requests_total", f'{_CLASS}, outcome="met"', "model, slo_class")
_JUDGED = _rate(
    "sluice_class_requests_total", f'{_CLASS}, outcome=~"met|missed|refused"', "model, slo_class"
)

_PLACES = (
    f"max by (model) (sluice_queue_places{{{_MODEL}}} / (sluice_queue_places_max{{{_MODEL}}} > 0))"
)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Are users inside their targets",
        (
            Panel(
                "Goodput",
                ((f"sum({_MET})", "met"),),
                "reqps",
                "Requests per second that met all targets of their class.",
                "stat",
                4,
            ),
            Panel(
                "Attainment",
                ((f"{_MET} / ({_JUDGED} > 0)", "{{model}} {{slo_class}}"),),
                "percentunit",
                "Share of requests that met their targets; refused ones did not. Empty: none came.",
                "stat",
                8,
            ),
            Panel(
                "Requests by outcome",
                ((_rate("sluice_class_requests_total", _CLASS, "outcome"), "{{outcome}}"),),
                "reqps",
                "What became of requests against their targets.",
                width=12,
                stacked=True,
            ),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", _quantiles("sluice_ttft_seconds"), "s",
                  "From arrival, the queue included."),
            Panel("Time per output token", _quantiles("sluice_tpot_seconds"), "s",
                  "Mean of each request after its first chunk."),
            Panel("Gap between chunks", _quantiles("sluice_itl_seconds"), "s",
                  "Between two chunks of a stream."),
            Panel("p95 of the time in queue, by class",
                  (_quantiles("sluice_queue_seconds", "slo_class")[1],), "s",
                  "Before prefill began."),
            Panel("Predicted and actual wait, p95",
                  tuple(
                      (
                          "histogram_quantile(0.95, "
                          + _rate(f"sluice_wait_{which}_seconds_bucket", _MODEL, "le") + ") >= 0",
                          which,
                      )
                      for which in ("predicted", "actual")
                  ), "s", "Of requests that had to wait for a replica."),
            Panel("Whole request", _quantiles("sluice_e2e_seconds"), "s", "Arrival to ending."),
        ),
    ),
    (
        "Where the time goes",
        (
            Panel("Time by phase",
                  ((_rate("sluice_phase_seconds_total", _MODEL, "phase"), "{{phase}}"),), "s",
                  "Seconds per second that requests which ended spent in each phase.",
                  stacked=True),
            Panel("Tokens",
                  tuple(
                      (f"sum(rate(sluice_{kind}_tokens_total{{{_MODEL}}}{_WINDOW}))", kind)
                      for kind in ("prompt", "cached", "generated")
                  ), "short", "Per second."),
            Panel("Running and waiting",
                  (
                      *(
                          (
                              f"sum by (model) (sluice_requests_{what}{{{_MODEL}}})",
                              f"{{{{model}}}} {what}",
                          )
                          for what in ("running", "waiting")
                      ),
                  ), "short", "Sequences."),
        ),
    ),
    (
        "Decisions",
        (
            Panel("Refusals by reason",
                  ((_rate("sluice_refusals_total", 'model=~"$model|other"', "reason") + " > 0",
                    "{{reason}}"),), "reqps", "Admission, and what came before it.", stacked=True),
            Panel("Degradations by rung",
                  ((_rate("sluice_degradations_total", _MODEL, "rung"), "{{rung}}"),), "reqps",
                  "Answers that were shortened or came from another model.", stacked=True),
            Panel("Wait predicted for a newcomer",
                  ((f"max by (model) (sluice_wait_newcomer_seconds{{{_MODEL}}})", "{{model}}"),),
                  "s", "What admission goes by."),
        ),
    ),
    (
        "Memory and replicas",
        (
            Panel("KV memory in use",
                  ((f"max by (model) (sluice_kv_usage_ratio{{{_MODEL}}})", "{{model}}"),),
                  "percentunit", "Share of the blocks."),
            Panel("Preemptions",
                  ((_rate("sluice_preemptions_total", _MODEL, "model"), "{{model}}"),), "ops",
                  "Sequences that lost their blocks and are computed again."),
            Panel("Replicas by state",
                  ((f"sum by (state) (sluice_replica_state{{{_MODEL}}})", "{{state}}"),), "short",
                  "Replicas in each state.", stacked=True),
            Panel("Queue places in use",
                  ((_PLACES, "{{model}}"),), "percentunit",
                  "At 100 % further requests are refused."),
            Panel("Step time, p95",
                  (("histogram_quantile(0.95, "
                    + _rate("sluice_step_seconds_bucket", _MODEL, "le, model") + ") >= 0",
                    "{{model}}"),), "s", "Forward passes of replicas."),
            Panel("Records and spans dropped",
                  (
                      (f"sum(rate(sluice_journal_dropped_total{_WINDOW}))", "journal"),
                      (f"sum(rate(sluice_spans_dropped_total{_WINDOW}))", "spans"),
                  ), "ops", "What observing lost."),
        ),
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "sluice",
        "uid": "sluice",
        "description": "Goodput, latency, decisions, memory and replicas of sluice servers.",
        "tags": ["llm", "sluice"],
        "timezone": "browser",
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "annotations": {"list": []},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    for name, query in (
        ("model", "label_values(sluice_requests_in_flight, model)"),
        ("slo_class", 'label_values(sluice_class_requests_total{model=~"$model"}, slo_class)'),
    ):
        yield {
            "name": name,
            "label": name.replace("_", " "),
            "type": "query",
            "datasource": _SOURCE,
            "query": query,
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in ROWS:
        number += 1
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place}
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > _WIDTH:
                x, y = 0, y + _HEIGHT
            number += 1
            yield _panel(panel, number, {"h": _HEIGHT, "w": panel.width, "x": x, "y": y})
            x += panel.width
        y += _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "noValue": "no requests"}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend,
             "datasource": _SOURCE}
            for n, (expression, legend) in enumerate(panel.lines)
        ],
    }  # fmt: skip


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
