"""Which tenants are ahead of their share of what was computed, so that the others go first.

The virtual token counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024). Each tenant's counter grows with the tokens computed for it, divided by its weight.
Who comes back after having had no request starts at the least counter of those that have one: time
without requests earns no credit, and a counter that is ahead is not forgiven by leaving. Where
nobody is left, the counter of the last that left is the start. Two tenants that always have
requests waiting are then served within a bounded difference of each other.

Three things differ from the paper, because a tenant here has requests until they end and not only
until they start. Where ``claim`` says what a tenant's requests are predicted to take, that counts
as if it were served: of two tenants that had the same, the one that asks for more is ahead, so that
what a tenant with little to ask gets does not depend on how fast another one asks (max-min
fairness). A counter is never more than ``CREDIT_TOKENS`` behind the greatest, so that
one which keeps a single short request running for an hour cannot claim the machine for an hour
afterwards. And the answer is yes or no with a quantum, not an order by counter: within the quantum
due times decide, and a busy tenant's place does not change with every token.

Asked by the policies of a replica and by the queue of the fleet, each with counters of its own. The
order of requests is theirs; here is no queue, no time and no configuration.
"""

from dataclasses import dataclass

# How far a tenant may be ahead of the least served before the others go first, in tokens at
# weight 1: about the length of an answer.
QUANTUM_TOKENS = 256
# The most that a tenant which used less than its share can catch up afterwards.
CREDIT_TOKENS = 65_536
# Tenants without requests whose counter is remembered; the oldest are forgotten, which forgives.
DEPARTED_MAX = 1_024
# Counters are whole numbers of thousandths of a token, so that sums are equal everywhere.
UNITS = 1_000


@dataclass(slots=True)
class _Counter:
    """The service that an active tenant received, in ``UNITS`` of tokens at weight 1.

    ``claims`` are the tokens that its requests are predicted to take.
    """

    units: int
    weight: float
    requests: int = 0
    claims: int = 0

    @property
    def with_claims(self) -> int:
        """The service when all that it asks for is served."""
        return self.units + round(self.claims * UNITS / self.weight)


class FairShares:
    """Virtual counters of the tenants that have requests, and of those that left ahead of them."""

    def __init__(self, *, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum = quantum_tokens * UNITS
        self._active: dict[str, _Counter] = {}
        self._departed: dict[str, int] = {}
        # No tenant is below it; it never falls.
        self._floor = 0
        # The least counter of the active, until one of them changes.
        self._least: int | None = None
        self._least_with_claims: int | None = None

    def __len__(self) -> int:
        """Tenants that have a request here."""
        return len(self._active)

    def __contains__(self, tenant: str) -> bool:
        """Whether the tenant has a request here."""
        return tenant in self._active

    def enter(self, tenant: str, weight: float) -> None:
        """One more request of this tenant is here. ``weight`` is its share against the others'."""
        assert weight > 0.0, "a tenant's weight is positive"
        counter = self._active.get(tenant)
        if counter is None:
            units = max(self._departed.pop(tenant, 0), self._start())
            counter = self._active[tenant] = _Counter(units, weight)
            self._forget_least()
        counter.weight = weight
        counter.requests += 1

    def leave(self, tenant: str) -> None:
        """A request that entered is gone. Raises ``KeyError`` where its tenant has none here."""
        counter = self._active[tenant]
        counter.requests -= 1
        if counter.requests:
            return
        self._floor = self._start()
        del self._active[tenant]
        self._forget_least()
        if counter.units > self._floor:
            self._remember(tenant, counter.units)

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens were computed for a tenant that has a request here; for others nothing is kept."""
        counter = self._active.get(tenant)
        if counter is None:
            return
        before, known = counter.units, self._least_with_claims
        if known is not None and known == counter.with_claims:
            self._least_with_claims = None
        counter.units = max(before, self._floor) + round(tokens * UNITS / counter.weight)
        self._floor = max(self._floor, counter.units - CREDIT_TOKENS * UNITS)
        if before == self._least:
            self._least = None

    def claim(self, tenant: str, tokens: int) -> None:
        """What the requests of a tenant that has one here are predicted to take changes by this."""
        self._active[tenant].claims += tokens
        self._least_with_claims = None

    def ahead(self, tenant: str) -> bool:
        """Whether the tenant has more than a quantum beyond the active one that has least.

        What they claim counts with what they received.

        Never where no other tenant has a request.
        """
        counter = self._active.get(tenant)
        if len(self._active) - (counter is not None) == 0:
            return False
        if counter is None:
            units = max(self._departed.get(tenant, 0), self._start())
        else:
            units = counter.with_claims
        if self._least_with_claims is None:
            self._least_with_claims = min(each.with_claims for each in self._active.values())
        return units - max(self._floor, self._least_with_claims) > self._quantum

    def _forget_least(self) -> None:
        self._least = self._least_with_claims = None

    def _start(self) -> int:
        """The counter at which a tenant starts that has nothing remembered."""
        if self._least is None:
            self._least = min((counter.units for counter in self._active.values()), default=0)
        return max(self._floor, self._least)

    def _remember(self, tenant: str, units: int) -> None:
        """Keep the counter of a tenant that left ahead; one at the floor says nothing."""
        self._departed[tenant] = units
        if len(self._departed) <= DEPARTED_MAX:
            return
        kept = [(name, at) for name, at in self._departed.items() if at > self._floor]
        self._departed = dict(kept[-DEPARTED_MAX // 2 :])
