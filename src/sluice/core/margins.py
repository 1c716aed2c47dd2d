"""By how much predicted times were exceeded of late.

Learned per pool from requests whose first token came, asked by ``core/pools.py`` when it makes a
promise. A window that is bounded and forgets by time: what one stall of the machine taught is gone
after ``MEMORY_NS``, however little traffic there is.
"""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

from sluice.core.admission import NS_PER_S

MEMORY_NS = 10 * NS_PER_S
KEPT = 128
KNOWN_MIN = 8  # below so many observations the first guess holds
FACTOR_FIRST = 1.2
FACTOR_MAX = 2.0
# Shorter predictions are taken to be so long: of what is over at once the ratio says nothing.
PREDICTED_NS_MIN = NS_PER_S // 20


class Margin:
    """Actual over predicted times."""

    def __init__(self) -> None:
        self._window: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []

    def observe(self, predicted_ns: int, actual_ns: int, now_ns: int) -> None:
        """Something took ``actual_ns`` that was predicted to take ``predicted_ns``."""
        ratio = min(FACTOR_MAX, max(1.0, actual_ns / max(PREDICTED_NS_MIN, predicted_ns)))
        self._window.append((now_ns, ratio))
        insort(self._sorted, ratio)
        self._forget(now_ns)

    def factor(self, quantile: float, now_ns: int) -> float:
        """What to multiply a prediction with so that this share of them holds: from 1 to 2."""
        self._forget(now_ns)
        known = len(self._sorted)
        if known < KNOWN_MIN:
            return FACTOR_FIRST
        return self._sorted[min(known, max(1, ceil(quantile * known))) - 1]

    def _forget(self, now_ns: int) -> None:
        window = self._window
        while window and (len(window) > KEPT or abs(now_ns - window[0][0]) > MEMORY_NS):
            _, ratio = window.popleft()
            del self._sorted[bisect_left(self._sorted, ratio)]
