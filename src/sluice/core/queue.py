"""The requests of one model that wait for a replica, and which of them goes next.

Service order: tier, tenants within their share before those ahead of it, clients that came back
when they were told to before newcomers, due time plus own work, arrival. Called by
``core/pools.py``; nothing is judged here, and nobody is refused.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

from sluice.core.accepted import Accepted
from sluice.core.fairness import FairShares

_ORDER = attrgetter("order")


class Queue:
    """Those who wait, with the places, prompt tokens and bytes that they take.

    ``timed`` counts those that can be late.
    """

    def __init__(self) -> None:
        self.places = 0
        self.tokens = 0
        self.bytes = 0
        self.timed = 0
        self._waiting: list[Accepted] = []
        self._tenants: dict[str, int] = {}
        self._due: list[tuple[int, int, Accepted]] = []
        self._waits = 0
        self._overtaken = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Accepted]:
        return iter(self._waiting)

    def add(self, accepted: Accepted) -> None:
        """Let a request wait until its ``due_ns``."""
        self._waits += 1
        accepted.wait = self._waits
        insort(self._waiting, accepted, key=_ORDER)
        tenant = accepted.request.tenant
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        self._count(accepted, 1)
        heappush(self._due, (accepted.due_ns, self._waits, accepted))

    def remove(self, accepted: Accepted) -> None:
        """Take a request out of the wait."""
        accepted.wait = None
        del self._waiting[bisect_left(self._waiting, accepted.order, key=_ORDER)]
        tenant = accepted.request.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self._count(accepted, -1)
        # Times of waits that are over stay in the heap; they go when they are most of it.
        if len(self._due) > 2 * len(self._waiting) + 16:
            self._due = [due for due in self._due if due[2].wait == due[1]]
            heapify(self._due)

    def _count(self, accepted: Accepted, sign: int) -> None:
        request = accepted.request
        self.places += sign * request.choices
        self.tokens += sign * request.prompt_tokens
        self.bytes += sign * request.body_bytes
        self.timed += sign * accepted.timed

    def next_due_ns(self) -> int | None:
        """When the next wait runs out."""
        while self._due and self._due[0][2].wait != self._due[0][1]:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def overdue(self, now_ns: int) -> list[Accepted]:
        """The requests whose wait has run out, in queue order."""
        due_ns = self.next_due_ns()
        if due_ns is None or due_ns > now_ns:
            return []
        return [accepted for accepted in self._waiting if accepted.due_ns <= now_ns]

    # ------------------------------------------------------------------------------------- order

    def in_order(self, shares: FairShares) -> Sequence[Accepted]:
        """All who wait, in the order in which they go; not to be kept or changed."""
        over = [tenant for tenant in self._tenants if shares.ahead(tenant)]
        if not over or len(over) == len(self._tenants):
            return self._waiting
        return sorted(
            self._waiting, key=lambda a: (a.order.tier, a.request.tenant in over, a.order)
        )

    def head(
        self,
        shares: FairShares,
        now_ns: int,
        gap_ns: Callable[[], int],
        *,
        aging_ns: int | None,
        strictest: int,
    ) -> Accepted:
        """The request that goes next. Raises ``IndexError`` where none waits.

        ``strictest`` is the strictest tier that is in use, of those that wait or another one.

        A tier in which someone is predicted to wait for ``aging_ns`` or longer gets every second
        turn: half of the pool's places, one of which comes free every ``gap_ns()``. So it gets no
        turn of a stricter request that comes alone, and a long queue of it cannot lock out others.
        """
        ordered = self.in_order(shares)
        first = ordered[0]
        if aging_ns is None or not self._overtaken:
            return first
        lower = [a for a in ordered if a.order.tier > min(strictest, first.order.tier)]
        aged = self._aged(lower, now_ns, 2 * gap_ns(), aging_ns) if lower else None
        if aged is None:
            return first
        aged.aged = True
        return aged

    def took_turn(self, accepted: Accepted) -> None:
        """The request is dispatched before those that wait: note whether it passes a lower tier."""
        tiers = (accepted.order.tier, self._waiting[0].order.tier, self._waiting[-1].order.tier)
        self._overtaken = accepted.order.tier == min(tiers) != max(tiers)

    def _aged(
        self, lower: Sequence[Accepted], now_ns: int, gap_ns: int, aging_ns: int
    ) -> Accepted | None:
        """The head of the tier with the longest predicted wait that is over the bound."""
        best: Accepted | None = None
        head: Accepted | None = None
        place, longest_ns = 0, aging_ns - 1
        for accepted in lower:
            if head is None or accepted.order.tier != head.order.tier:
                head, place = accepted, 0
            place += accepted.request.choices
            wait_ns = now_ns - accepted.accepted_ns + place * gap_ns
            if wait_ns > longest_ns:
                best, longest_ns = head, wait_ns
        return best

    def longest_wait_ns(self, now_ns: int) -> tuple[tuple[int, int], ...]:
        """For each tier of which some wait, the longest wait so far."""
        longest: dict[int, int] = {}
        for accepted in self._waiting:
            waited_ns = now_ns - accepted.accepted_ns
            tier = accepted.order.tier
            longest[tier] = max(longest.get(tier, 0), waited_ns)
        return tuple(longest.items())
