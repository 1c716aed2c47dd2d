"""Whether a remote replica is given requests at all, from how those before them fared.

One per remote replica, asked and told by ``core/fleet_replica.py``. Closed, it lets everything
through; open, nothing; half open, one request as a trial, whose outcome closes or opens it again
(Nygard, Release It!, 2007). What is a fault of the replica is decided by whoever tells: a request
that the engine finds wrong, and an engine that says it is full, are none.

A health route that answers is no proof that the engine works, so it closes nothing.
"""

from collections import deque
from enum import StrEnum

from sluice.core.limits import BreakerLimits


class BreakerState(StrEnum):
    """Whether requests go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The breaker of one replica; all requests go through while it ``is_closed``."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._outcomes: deque[tuple[int, bool]] = deque()  # when, and whether it was a fault
        self._faults = 0
        self._in_a_row = 0
        self._open_until_ns: int | None = None
        self.is_closed = True
        self._open_ns = limits.open_ns_min
        self._trial: str | None = None

    def state(self, now_ns: int) -> BreakerState:
        """Where it stands."""
        if self._open_until_ns is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_ns < self._open_until_ns else BreakerState.HALF_OPEN

    def wait_ns(self, now_ns: int) -> int | None:
        """Time until a request may go through: 0 at once, ``None`` while a trial is under way."""
        if self._open_until_ns is None:
            return 0
        return None if self._trial is not None else max(0, self._open_until_ns - now_ns)

    def began(self, request_id: str) -> None:
        """A request goes to the replica; where that is not closed, it is the trial."""
        if self._open_until_ns is not None:
            self._trial = request_id

    def left(self, request_id: str) -> None:
        """A request is over without an outcome: cancelled, or the client's fault."""
        if self._trial == request_id:
            self._trial = None

    def succeeded(self, request_id: str, now_ns: int) -> None:
        """The replica answered. That of a request from before it opened does not close it."""
        self._note(now_ns, fault=False)
        self._in_a_row = 0
        if self._trial == request_id:
            self._trial = self._open_until_ns = None
            self.is_closed = True
            self._open_ns = self._limits.open_ns_min
            self._outcomes.clear()
            self._faults = 0

    def failed(self, request_id: str, now_ns: int) -> None:
        """The replica did not answer as it should."""
        limits = self._limits
        self._note(now_ns, fault=True)
        self._in_a_row += 1
        if self._open_until_ns is not None:
            if self._trial == request_id:
                self._trial = None
                self._open_ns = min(limits.open_ns_max, 2 * self._open_ns)
                self._open_until_ns = now_ns + self._open_ns
            return
        known = len(self._outcomes)
        frequent = known >= limits.outcomes_min and self._faults >= limits.share * known
        if frequent or self._in_a_row >= limits.in_a_row:
            self._open_until_ns = now_ns + self._open_ns
            self.is_closed = False

    def _note(self, now_ns: int, *, fault: bool) -> None:
        outcomes, limits = self._outcomes, self._limits
        outcomes.append((now_ns, fault))
        self._faults += fault
        while len(outcomes) > limits.outcomes_max or now_ns - outcomes[0][0] > limits.window_ns:
            self._faults -= outcomes.popleft()[1]
