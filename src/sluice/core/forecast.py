"""How much work will arrive: a level, a damped rise, and how wrong that was of late.

Work is counted in replica seconds, so a rate of 3 keeps three replicas busy. The base is the mean
of the last two minutes, since yesterday's curve is a poor forecast of LLM traffic. What is added
for risk is measured: by how much forecasts were exceeded, kept for two hours, gives what would have
been enough for a share of them. A wrong model so buys capacity.

Asked by ``core/scaling.py``; nothing is decided here.
"""

from bisect import bisect_left, insort
from collections import deque
from math import exp

from sluice.core.admission import NS_PER_S

PERIOD_NS = 10 * NS_PER_S
LEVEL_PERIODS = 12
RISE_NS = 180 * NS_PER_S  # a rise goes on for about so long
MISSES_MAX = 720
MISS_PERIODS = 12
# Of what is expected, while few forecasts were held against what came.
MARGIN_UNKNOWN = 0.2


class Arrivals:
    """Rates of work by periods: ``level`` is their mean of late, ``rise`` is by how much it is
    above that of as many periods before them."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=2 * LEVEL_PERIODS)
        self.level = self.rise = self.came = 0.0

    @property
    def known(self) -> bool:
        """Whether there are enough of them for a level."""
        return len(self._rates) >= LEVEL_PERIODS

    def add(self, rate: float) -> None:
        """A period is over."""
        self._rates.append(rate)
        rates = list(self._rates)
        lately, before = rates[-LEVEL_PERIODS:], rates[:-LEVEL_PERIODS]
        self.level = sum(lately) / len(lately)
        self.came = sum(rates[-MISS_PERIODS:]) / len(rates[-MISS_PERIODS:])
        if len(before) == LEVEL_PERIODS:
            self.rise = max(0.0, self.level - sum(before) / LEVEL_PERIODS)

    def expected(self, lead_ns: int) -> float:
        """The rate after ``lead_ns``, with nothing added for risk."""
        damped_ns = RISE_NS * (1.0 - exp(-lead_ns / RISE_NS))
        return self.level + self.rise * damped_ns / (LEVEL_PERIODS * PERIOD_NS)


class Forecast:
    """The rate of work at one lead, with what experience adds to it."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._due: deque[tuple[int, float]] = deque()
        self._misses: deque[float] = deque()
        self._sorted: list[float] = []

    def look(self, lead_ns: int, quantile: float, now_ns: int) -> float:
        """The rate that is not exceeded after ``lead_ns`` in this share of forecasts; a period has
        just ended. With 0 nothing is forecast: it is the rate of late."""
        if not quantile:
            return self._arrivals.level
        while self._due and self._due[0][0] <= now_ns:
            self._learn(self._arrivals.came - self._due.popleft()[1])
        expected = self._arrivals.expected(lead_ns)
        if self._arrivals.known:
            self._due.append((now_ns + lead_ns, expected))
        return expected + self._margin(quantile, expected)

    def _margin(self, quantile: float, expected: float) -> float:
        """What is added so that the share of the forecasts holds, at least nothing."""
        if len(self._sorted) < LEVEL_PERIODS:
            return MARGIN_UNKNOWN * expected
        return max(0.0, self._sorted[int(quantile * (len(self._sorted) - 1))])

    def _learn(self, miss: float) -> None:
        if len(self._misses) == MISSES_MAX:
            del self._sorted[bisect_left(self._sorted, self._misses.popleft())]
        self._misses.append(miss)
        insort(self._sorted, miss)
