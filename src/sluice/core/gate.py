"""What one remote replica may be given at a moment: its window, its breaker and its quota as one.

Owned by ``core/fleet_replica.py``, which asks before it lets a request board and tells how each
attempt went. A replica that refuses rests: as long as it asks for, or for a time that doubles with
each refusal in a row.
"""

from typing import NamedTuple, assert_never

from sluice.core.admission import NS_PER_S
from sluice.core.breaker import Breaker, BreakerState
from sluice.core.events import Outcome
from sluice.core.limits import BreakerLimits
from sluice.core.quota import VendorQuota
from sluice.core.window import Window

# How long a replica rests that refused and did not say for how long.
REST_NS_MIN, REST_NS_MAX = NS_PER_S // 10, 5 * NS_PER_S


class OpenNow(NamedTuple):
    """It may be given the request, if no more than so many places are taken with it."""

    places: int


class OpensAt(NamedTuple):
    """It gets nothing like the request until then; ``broken`` says that its breaker is open."""

    at_ns: int
    broken: bool


class AfterTrial(NamedTuple):
    """It gets nothing until the request is over that is on trial there."""


Opening = OpenNow | OpensAt | AfterTrial


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
        self.quota.end_rest()
        self._refusals = 0

    def opening(self, tokens: int, places: int, now_ns: int) -> Opening:
        """Whether it may be given a request of so many tokens, with which ``places`` are taken.

        A trial goes whatever else is there.
        """
        is_closed = self.breaker.is_closed
        broken_ns = 0 if is_closed else self.breaker.wait_ns(now_ns)
        if broken_ns is None:
            return AfterTrial()
        wait_ns = max(broken_ns, self.quota.wait_ns(tokens, now_ns))
        if wait_ns:
            return OpensAt(now_ns + wait_ns, broken=broken_ns > 0)
        return OpenNow(self.window.places(now_ns) if is_closed else places)

    def is_open(self, now_ns: int) -> bool:
        """Whether some request passes at once, if there is a place for it."""
        return self.breaker.is_closed and not self.quota.wait_ns(1, now_ns)

    def seats(self, held: int, now_ns: int) -> int:
        """Requests that may be there at a time, where ``held`` are; 1 at least."""
        match self.breaker.state(now_ns):
            case BreakerState.CLOSED:
                return self.window.places(now_ns)
            case BreakerState.HALF_OPEN if self.breaker.wait_ns(now_ns) == 0:
                return held + 1
            case _:
                return max(1, held)

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
