"""Prometheus text to gauges, and what is known of an upstream's load at a given moment.

A scrape is a view with an age. One that failed or is too old is said and no longer used: the last
figures of an engine that has stopped answering must neither attract work nor repel it for ever.
Text in the format 0.0.4 and OpenMetrics is read, for the dialect's names only.
"""

import functools
import math
import re

from sluice.executors.dialects import Dialect
from sluice.executors.stream import Gauges, Health, Probe

# Labels, whose values may hold any character but a bare quote.
_LABELS = r'(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?'


@functools.cache
def _samples_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Lines that begin with one of the names; pages are long, and most lines are others."""
    accepted = "|".join(re.escape(name) for name in names)
    return re.compile(rf"^({accepted}){_LABELS}[ \t]+(\S+)", re.MULTILINE)


def read_gauges(dialect: Dialect, text: str) -> Gauges:
    """The dialect's gauges and counters in a page. Samples that are no number count as absent."""
    names = dialect.metrics
    counted = [name for accepted in names.counters.values() for name in accepted]
    wanted = (*names.waiting, *names.running, *names.kv_use, *counted)
    samples: dict[str, list[float]] = {}
    if wanted:
        for found in _samples_of(wanted).finditer(text):
            if (value := _number(found[2])) is not None:
                samples.setdefault(found[1], []).append(value)
    counters = {
        meaning: math.fsum(values)
        for meaning, accepted in names.counters.items()
        if (values := _first(samples, accepted))
    }
    waiting, running = _first(samples, names.waiting), _first(samples, names.running)
    kv_use = _first(samples, names.kv_use)
    return Gauges(
        waiting=math.fsum(waiting) if waiting else None,
        running=math.fsum(running) if running else None,
        kv_use=max(kv_use) if kv_use else None,
        counters=counters,
    )


def _first(samples: dict[str, list[float]], accepted: tuple[str, ...]) -> list[float]:
    return next((samples[name] for name in accepted if name in samples), [])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class LoadView:
    """The last probes of one upstream; gauges older than ``stale_ns_max`` are unknown."""

    def __init__(self, stale_ns_max: int) -> None:
        self._stale_ns_max = stale_ns_max
        self._last: Probe | None = None
        self._gauges: Gauges | None = None
        self._gauges_ns: int | None = None
        self.failures = 0

    def note(self, probe: Probe) -> None:
        """Take a probe in; one that is older than the last is ignored."""
        if self._last is not None and probe.at_ns < self._last.at_ns:
            return
        self._last = probe
        if probe.gauges is None:
            self.failures += probe.fault is not None
            return
        self.failures = 0
        self._gauges, self._gauges_ns = probe.gauges, probe.at_ns

    def gauges(self, now_ns: int) -> Gauges | None:
        """The gauges, if they are young enough to be believed."""
        age_ns = self.age_ns(now_ns)
        return self._gauges if age_ns is not None and age_ns <= self._stale_ns_max else None

    def age_ns(self, now_ns: int) -> int | None:
        """Age of the last gauges that could be read; ``None`` before the first."""
        return None if self._gauges_ns is None else now_ns - self._gauges_ns

    def health(self, now_ns: int) -> Health | None:
        """What the last probe found; ``None`` before the first and when it is too old."""
        if self._last is None or now_ns - self._last.at_ns > self._stale_ns_max:
            return None
        return self._last.health

    def fault(self, now_ns: int) -> str:
        """Why gauges or health are not known, in words for the operator; empty if they are."""
        if self._last is None:
            return "not probed yet"
        age_s = (now_ns - self._last.at_ns) / 1e9
        if now_ns - self._last.at_ns > self._stale_ns_max:
            return f"the last probe is {age_s:.0f} s old"
        return self._last.fault
