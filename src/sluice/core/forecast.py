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
# Of what is expected, while few forecasts were held against what came.
MARGIN_UNKNOWN = 0.2


class Arrivals:
    """Rates of work by periods, the last one at the end."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=2 * LEVEL_PERIODS)

    @property
    def known(self) -> bool:
        """Whether there are enough of them for a level."""
        return len(self._rates) >= LEVEL_PERIODS

    def add(self, rate: float) -> None:
        """A period is over."""
        self._rates.append(rate)

    def mean(self, periods: int, before: int = 0) -> float:
        """The mean rate of so many periods, which ended so many ``before`` now."""
        rates = list(self._rates)
        if before:
            rates = rates[:-before]
        rates = rates[-periods:]
        return sum(rates) / len(rates) if rates else 0.0

    def expected(self, lead_ns: int) -> float:
        """The rate after ``lead_ns``, with nothing added for risk."""
        level, earlier = self.mean(LEVEL_PERIODS), self.mean(LEVEL_PERIODS, LEVEL_PERIODS)
        rise = max(0.0, level - earlier) if len(self._rates) == self._rates.maxlen else 0.0
        damped_ns = RISE_NS * (1.0 - exp(-lead_ns / RISE_NS))
        return level + rise * damped_ns / (LEVEL_PERIODS * PERIOD_NS)


class Forecast:
    """The rate of work at one lead, with what experience adds to it."""

    def __init__(self, arrivals: Arrivals, quantile: float) -> None:
        self._arrivals = arrivals
        self._quantile = quantile
        self._due: deque[tuple[int, float]] = deque()
        self._misses: deque[float] = deque()
        self._sorted: list[float] = []

    def look(self, lead_ns: int, now_ns: int) -> float:
        """The rate that is not exceeded after ``lead_ns`` in the share of forecasts; a period has
        just ended."""
        came = self._arrivals.mean(LEVEL_PERIODS)
        while self._due and self._due[0][0] <= now_ns:
            self._learn(came - self._due.popleft()[1])
        expected = self._arrivals.expected(lead_ns if self._quantile else 0)
        if self._arrivals.known:
            self._due.append((now_ns + lead_ns, expected))
        return expected + self._margin(expected)

    def _margin(self, expected: float) -> float:
        """What is added so that the share of the forecasts holds, at least nothing."""
        if not self._quantile:
            return 0.0
        if len(self._sorted) < LEVEL_PERIODS:
            return MARGIN_UNKNOWN * expected
        return max(0.0, self._sorted[int(self._quantile * (len(self._sorted) - 1))])

    def _learn(self, miss: float) -> None:
        if len(self._misses) == MISSES_MAX:
            del self._sorted[bisect_left(self._sorted, self._misses.popleft())]
        self._misses.append(miss)
        insort(self._sorted, miss)
