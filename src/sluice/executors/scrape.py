"""Prometheus text to gauges, for ``remote.py``, which probes an engine.

How old a view may get is the fleet's decision. Text in the format 0.0.4 and OpenMetrics is read,
for the dialect's names only.
"""

import functools
import math
import re

from sluice.executors.dialects import Dialect
from sluice.executors.stream import Gauges

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
