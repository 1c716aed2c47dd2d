"""How refused clients of one pool are told when to come back, and who of them did.

Keeps ``core/bookings.py`` bookings for each tier apart: who is booked in a lower tier takes nothing
from a higher one. Called by ``core/pools.py``, which predicts when there is room.
"""

from math import fsum
from random import Random

from sluice.core.admission import NS_PER_S, Refusal, reject
from sluice.core.bookings import AHEAD_NS_MAX, Bookings
from sluice.core.events import Reject
from sluice.core.request import Request

# Refusals for want of room or time, of which there is more later.
BOOKED = frozenset(
    {
        "queue_full",
        "queue_tokens",
        "queue_bytes",
        "no_free_place",
        "gives_way",
        "predicted_late",
        "deadline_infeasible",
        "queue_deadline",
    }
)


class Returns:
    """The bookings of one pool."""

    def __init__(self) -> None:
        self._booked: dict[int, Bookings] = {}

    def __len__(self) -> int:
        return sum(map(len, self._booked.values()))

    @property
    def share(self) -> float:
        """The share of refused clients that come back, in the tier where fewest do."""
        return min((bookings.share for bookings in self._booked.values()), default=1.0)

    def claimed(self, request: Request, now_ns: int) -> bool:
        """Whether this is a refused client that comes back as told; its booking is used up then."""
        bookings = self._booked.get(request.tier)
        return bookings.claim(_key(request), now_ns) if bookings else False

    def is_due(self, request: Request, now_ns: int) -> bool:
        """Whether a refused client comes back as told; its booking stays."""
        bookings = self._booked.get(request.tier)
        return bookings.is_due(_key(request), now_ns) if bookings else False

    def expire(self, now_ns: int) -> None:
        """Forget who did not come back as told."""
        for bookings in self._booked.values():
            bookings.expire(now_ns)

    def expected(self, tier: int, until_ns: int, now_ns: int) -> int:
        """Clients of this and of stricter tiers that are expected back until then."""
        ahead = [bookings for of, bookings in self._booked.items() if of <= tier and bookings]
        return round(fsum(bookings.expected(now_ns, until_ns) for bookings in ahead))

    def told(
        self,
        request: Request,
        refusal: Refusal,
        now_ns: int,
        chance: Random,
        *,
        spacing_ns: int,
    ) -> Reject:
        """The refusal as the client is told it; one that is worth another try books it."""
        if refusal.wait_ns is None or refusal.reason not in BOOKED:
            return reject(request.id, refusal, chance)
        bookings = self._booked.setdefault(request.tier, Bookings())
        earliest_ns = now_ns + refusal.wait_ns
        at_ns = bookings.book(_key(request), earliest_ns, spacing_ns, now_ns, chance)
        wait_ns = AHEAD_NS_MAX if at_ns is None else at_ns - now_ns
        return Reject(
            request_id=request.id,
            status=refusal.status,
            reason=refusal.reason,
            measured=refusal.measured,
            threshold=refusal.threshold,
            retry_after_s=wait_ns / NS_PER_S,
            should_retry=at_ns is not None,
        )


def _key(request: Request) -> tuple[str, int, int]:
    """What a client is recognised by that comes back with the same request."""
    if request.likeness:
        return (request.tenant, request.likeness, 0)
    return (request.tenant, hash(request.prompt), request.output_tokens_max)
