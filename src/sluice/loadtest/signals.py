"""What the server tells of itself while a trial runs: its Prometheus page, read once a second.

Which engine it is shows in the names on the page (``executors/dialects.py``, and sluice's own
here). Means and peaks of gauges, growth of counters, by name; what is not told is
not there.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from sluice.executors.dialects import LLAMA_SERVER, SGLANG, TGI, VLLM, Dialect, MetricNames
from sluice.executors.scrape import read_gauges
from sluice.executors.stream import Gauges
from sluice.loadtest.asking import ask
from sluice.loadtest.trial import CannotMeasure
from sluice.loadtest.wire import Target

_EVERY_S = 1.0
_TIMEOUT_S = 2.0
SLUICE = Dialect(
    name="sluice",
    health_path="/health",
    metrics_path="/metrics",
    metrics=MetricNames(
        waiting=("sluice_requests_waiting",),
        running=("sluice_requests_running",),
        kv_use=("sluice_kv_usage_ratio",),
        counters={
            "preemptions": ("sluice_preemptions_total",),
            "prompt_tokens": ("sluice_prompt_tokens_total",),
            "completion_tokens": ("sluice_generated_tokens_total",),
            "prefix_queries": ("sluice_prefix_query_tokens_total",),
            "prefix_hits": ("sluice_prefix_hit_tokens_total",),
        },
    ),
)
# Counters of sluice that say which of its mechanisms held requests back, by their label.
_OUR_COUNTERS = {
    "sluice_refusals_total": ("refused", "reason"),
    "sluice_degradations_total": ("degraded", "rung"),
    "sluice_phase_seconds_total": ("phase_s", "phase"),
}


@dataclass(frozen=True, slots=True)
class _Look:
    gauges: Gauges
    counters: Mapping[str, float]


class Seen:
    """What was seen during one trial."""

    def __init__(self) -> None:
        self.looks: list[_Look] = []

    def figures(self) -> Mapping[str, float]:
        """The looks as figures by name; empty where nothing was told."""
        if not self.looks:
            return {}
        found: dict[str, float] = {}
        for name in ("waiting", "running", "kv_use"):
            values = [
                value for look in self.looks if (value := getattr(look.gauges, name)) is not None
            ]
            if values:
                found[f"{name}_mean"] = sum(values) / len(values)
                found[f"{name}_max"] = max(values)
        counters = [{**look.gauges.counters, **look.counters} for look in self.looks]
        for name in counters[-1]:
            found[name] = _growth([look.get(name, 0.0) for look in counters])
        return found


def _growth(values: Sequence[float]) -> float:
    """By how much a counter grew. One that goes back begins anew: its server was started again."""
    return sum(after - before if after >= before else after for before, after in pairwise(values))


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics page of a server."""

    target: Target
    dialect: Dialect
    path: str


@contextmanager
def watched(page: Page | None) -> Iterator[Seen]:
    """Watch a page while the context is open; nothing is seen where there is none."""
    seen, over = Seen(), threading.Event()
    if page is None:
        yield seen
        return

    def watch() -> None:
        while True:
            _look(page, seen)
            if over.wait(_EVERY_S):
                _look(page, seen)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(timeout=2 * _TIMEOUT_S)


def _look(page: Page, seen: Seen) -> None:
    try:
        reply = ask(page.target, page.path, timeout_s=_TIMEOUT_S)
    except CannotMeasure:
        return  # a server under overload may have no time for this
    if reply.status == 200:
        text = reply.body.decode("utf-8", "replace")
        seen.looks.append(_Look(read_gauges(page.dialect, text), _our_counters(text)))


def page_of(target: Target, path: str = "/metrics") -> Page | None:
    """The metrics page of a server, where it has one with names that are known."""
    try:
        reply = ask(target, path, timeout_s=_TIMEOUT_S)
    except CannotMeasure:
        return None
    text = reply.body.decode("utf-8", "replace") if reply.status == 200 else ""
    for dialect in (SLUICE, VLLM, SGLANG, LLAMA_SERVER, TGI):
        gauges = read_gauges(dialect, text)
        if gauges.waiting is not None or gauges.running is not None:
            return Page(target, dialect, path)
    return None


def _our_counters(text: str) -> dict[str, float]:
    if not any(name in text for name in _OUR_COUNTERS):
        return {}
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _OUR_COUNTERS and isfinite(sample.value):
                    prefix, label = _OUR_COUNTERS[sample.name]
                    name = f"{prefix}.{sample.labels.get(label, '')}"
                    found[name] = found.get(name, 0.0) + sample.value
    except (ValueError, LookupError):
        return {}
    return found
