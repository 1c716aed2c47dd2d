"""What one remote replica may be given at a moment: its window, its breaker and its quota as one.

Owned by ``core/fleet_replica.py``, which asks before it lets a request board and tells how each
attempt went. A replica that refuses rests: as long as it asks for, or for a time that doubles with
each refusal in a row.
"""

from typing import assert_never

from sluice.core.admission import NS_PER_S
from sluice.core.breaker import Breaker, BreakerState
from sluice.core.events import Outcome
from sluice.core.limits import BreakerLimits
from sluice.core.quota import VendorQuota
from sluice.core.window import Window

# How long a replica rests that refused and did not say for how long.
REST_NS_MIN, REST_NS_MAX = NS_PER_S // 10, 5 * NS_PER_S


class RemoteGate:
    """The gate of one remote replica. Requests are told by ``began`` and ``ended``, once each."""

    def __init__(self, places_max: int, limits: BreakerLimits) -> None:
        self.window = Window(places_max)
        self.breaker = Breaker(limits)
        self.quota = VendorQuota()
        self._refusals = 0

    def serve(self, places_max: int) -> None:
        """It serves, perhaps again, so many at most; what was learnt of its load may be wrong."""
        self.window = Window(places_max)

    def wait_ns(self, tokens: int, now_ns: int) -> int | None:
        """Time until it may be given a request of so many tokens, if it has a place for it.

        0 is at once, ``None`` when another request ends.
        """
        closed_ns = self.breaker.wait_ns(now_ns)
        return None if closed_ns is None else max(closed_ns, self.quota.wait_ns(tokens, now_ns))

    def places(self, now_ns: int) -> int:
        """Requests that may be there at a time."""
        closed = self.breaker.state(now_ns) is BreakerState.CLOSED
        return self.window.places(now_ns) if closed else 1

    def began(self, request_id: str, tokens: int, now_ns: int) -> None:
        """A request of so many tokens at most is sent."""
        self.breaker.began(request_id)
        self.quota.began(request_id, tokens, now_ns)

    def left(self, request_id: str) -> None:
        """A request is not there any more; nothing is learnt that was not told by ``ended``."""
        self.breaker.left(request_id)

    def ended(
        self,
        request_id: str,
        outcome: Outcome,
        now_ns: int,
        *,
        places: int,
        rest_ns: int | None = None,
    ) -> None:
        """An attempt is over, with ``places`` of others on board; ``rest_ns`` is asked for."""
        match outcome:
            case Outcome.GOOD:
                self._refusals = 0
                self.breaker.succeeded(request_id, now_ns)
            case Outcome.FAULT:
                self.breaker.failed(request_id, now_ns)
            case Outcome.FULL:
                self.breaker.left(request_id)
                self.window.refused(places, now_ns)
                if rest_ns is None:
                    rest_ns = min(REST_NS_MAX, REST_NS_MIN << self._refusals)
                self._refusals = min(self._refusals + 1, 16)
            case Outcome.VOID:
                self.left(request_id)
            case _:
                assert_never(outcome)
        if rest_ns is not None:
            self.quota.rest(rest_ns, now_ns)
