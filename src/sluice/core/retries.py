"""How many requests may be sent a second time, so that an outage is not multiplied.

One ``RetryBudget`` per model, kept by ``core/pools.py``. Each accepted request adds a tenth of a
retry: over any stretch of traffic retries are at most a tenth of the requests, plus what had been
saved up (the retry budget of Finagle). Which attempts may be repeated, and where, is decided by
``core/fleet.py``.
"""

from random import Random

from sluice.core.limits import RetryLimits


class RetryBudget:
    """The retries that one model's requests have left together."""

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self._requests = self._full = limits.saved_max * limits.requests_per_retry

    def asked(self) -> None:
        """A request was accepted."""
        self._requests = min(self._full, self._requests + 1)

    def take(self, retries: int) -> bool:
        """Take one retry for a request that has had so many; false where none is left for it."""
        cost = self.limits.requests_per_retry
        if retries >= self.limits.per_request or self._requests < cost:
            return False
        self._requests -= cost
        return True

    @property
    def left(self) -> float:
        """Retries that could be taken at this moment."""
        return self._requests / self.limits.requests_per_retry

    def wait_ns(self, retries: int, chance: Random) -> int:
        """Wait before the same replica is asked again after so many retries: at random between
        half and all of a time that doubles, so that failed requests do not come back together."""
        limits = self.limits
        most_ns = min(limits.wait_ns_max, limits.wait_ns_min << retries)
        return most_ns - int(chance.random() * (most_ns // 2))
