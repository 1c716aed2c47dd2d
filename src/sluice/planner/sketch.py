"""Percentiles of a stream of positive numbers in little memory.

Counts in buckets of equal ratio, as DDSketch (Masson, Rim and Lee, VLDB 2019): a quantile is off by
at most half of ``RATIO`` - 1, whatever the distribution and however many numbers there are.
"""

from math import ceil, log

RATIO = 1.01
_LOG_RATIO = log(RATIO)
PERCENTILES = (50, 90, 95, 99)


class Sketch:
    """Adds numbers and answers quantiles."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._buckets: dict[int, int] = {}
        self._zeros = 0

    def add(self, value: float) -> None:
        """Count a number; one that is not above 0 counts as 0."""
        self.count += 1
        if value <= 0.0:
            self._zeros += 1
            return
        self.total += value
        bucket = ceil(log(value) / _LOG_RATIO)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float | None:
        """The mean, ``None`` of nothing."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The smallest value that at least ``share`` of the numbers do not exceed, ``None`` of
        nothing."""
        if not self.count:
            return None
        left = max(1, ceil(share * self.count)) - self._zeros
        if left <= 0:
            return 0.0
        bucket = 0
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                break
        return float(RATIO ** (bucket - 0.5))

    def percentiles(self) -> dict[str, float | None]:
        """The usual ones by name: ``p50``, ``p90``, ``p95``, ``p99``."""
        return {f"p{percent}": self.quantile(percent / 100) for percent in PERCENTILES}
