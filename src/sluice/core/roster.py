"""Who waits and who is resident on one replica, within which limits.

State shared by the planning of a step (``core/batching.py``) and the policies it asks
(``core/policies.py``). A sequence is in exactly one of the two lists, or in none once it has ended.
"""

from bisect import insort
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from sluice.core.ceiling import Ceiling
from sluice.core.costmodel import CostModel
from sluice.core.events import ReplicaLimits
from sluice.core.fairness import QUANTUM_TOKENS, FairShares
from sluice.core.kv import BlockLedger
from sluice.core.lengths import OutputLengths
from sluice.core.lifecycle import SequenceState
from sluice.core.sequence import Sequence

RECOVERED_SHARE = 0.1  # of the pool is free before others of its tier join after a preemption


class BatchingPolicy(StrEnum):
    """How steps are filled; ``core/policies.py`` has one class for each."""

    STATIC = "static"
    FCFS = "fcfs"
    SLO = "slo"


@dataclass(frozen=True, slots=True)
class BatchingLimits:
    """What one replica may hold and how it batches.

    ``prefill_share``, above 0 and below 1, is the share of a step's time that prompts get where
    streams would leave them less: more of it starts answers sooner and makes all streams slower.
    ``kv_headroom`` is the share of the pool that is kept against outputs longer than predicted:
    more of it avoids preemptions and holds fewer sequences. ``static_sequences`` and
    ``static_wait_ns`` are for the static policy: a batch starts when so many wait, or the first of
    them has waited so long.
    """

    context_tokens_max: int
    block_size: int
    blocks_total: int
    sequences_max: int = 32
    chunk_tokens_max: int = 256
    step_ns_max: int = 100_000_000
    policy: BatchingPolicy = BatchingPolicy.SLO
    static_sequences: int = 8
    static_wait_ns: int = 500_000_000
    prefix_cache: bool = True
    prefill_share: float = 0.2
    kv_headroom: float = 0.02

    @property
    def replica(self) -> ReplicaLimits:
        """What the replica can hold, as the fleet knows it."""
        return ReplicaLimits(
            self.context_tokens_max, self.block_size, self.blocks_total, self.sequences_max
        )


class Roster:
    """The waiting, in the order of arrival, and the residents, in the order of their admission.

    ``version`` changes whenever either list does: what did not fit can fit only after that.
    ``shares`` counts what tenants got of prefill and output, up to the last ``settle_shares``, and
    what their residents may take, of each answer a quantum at most.
    """

    def __init__(self, limits: BatchingLimits, cost: CostModel) -> None:
        self.limits = limits
        self.cost = cost
        self.ledger = BlockLedger(
            limits.blocks_total, limits.block_size, prefix_cache=limits.prefix_cache
        )
        self.ceiling = Ceiling(limits.block_size)
        self.lengths = OutputLengths()
        self.shares = FairShares()
        self.waiting: list[Sequence] = []
        self.residents: list[Sequence] = []
        self.version = 0
        self.preemptions = 0
        self._preempted_tier: int | None = None

    def enter(self, sequence: Sequence) -> None:
        """Queue a sequence that has arrived."""
        request = sequence.generation.request
        if request.tenant not in self.shares:
            self._settle()  # a tenant starts where the least served one is
        self.shares.enter(request.tenant, request.weight)
        self.waiting.append(sequence)
        self.version += 1

    def admit(self, sequence: Sequence) -> None:
        """Make a waiting sequence resident; its table already holds its known tokens."""
        sequence.move(SequenceState.PREFILL)
        self.waiting.remove(sequence)
        self.residents.append(sequence)
        self.ceiling.add(sequence)
        sequence.charged = max(sequence.charged, sequence.computed)  # the cache's part is free
        sequence.claim = sequence.pending + min(sequence.remaining, QUANTUM_TOKENS)
        self.shares.claim(sequence.generation.request.tenant, sequence.claim)
        self.version += 1

    def preempt(self, sequence: Sequence) -> None:
        """Take a resident's blocks away; it waits again."""
        sequence.move(SequenceState.PREEMPTED)
        self._charge(sequence)
        self.residents.remove(sequence)
        self.ceiling.remove(sequence)
        self.shares.claim(sequence.generation.request.tenant, -sequence.claim)
        self.ledger.release(sequence.table)
        sequence.computed = 0
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=attrgetter("number"))
        tier = sequence.generation.request.tier
        lowest = self._preempted_tier
        self._preempted_tier = tier if lowest is None else min(tier, lowest)
        self.preemptions += 1
        self.lengths.missed()
        self.version += 1

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence for good, wherever it is."""
        resident = sequence.state in (SequenceState.PREFILL, SequenceState.DECODE)
        sequence.move(SequenceState.ENDED)
        self._charge(sequence)
        (self.residents if resident else self.waiting).remove(sequence)
        if resident:
            self.ceiling.remove(sequence)
            self.shares.claim(sequence.generation.request.tenant, -sequence.claim)
        self.shares.leave(sequence.generation.request.tenant)
        self.ledger.release(sequence.table)
        self.version += 1

    def rank(self, sequence: Sequence) -> tuple[int, bool]:
        """Its class, smaller goes first: tier, and whether its tenant is ahead of its share."""
        request = sequence.generation.request
        return (request.tier, self.shares.ahead(request.tenant))

    def recovering(self, tier: int) -> bool:
        """Whether sequences of this tier stay out after a preemption, until enough is free again.

        Only tiers stricter than all that were preempted may join before.
        """
        if self._preempted_tier is None:
            return False
        if self.ledger.available >= RECOVERED_SHARE * self.ledger.blocks_total:
            self._preempted_tier = None
            return False
        return tier >= self._preempted_tier

    def settle_shares(self) -> None:
        """Charge the tenants of all residents for what was computed since the last time.

        One that is alone is ahead of nobody; its charge can wait.
        """
        if len(self.shares) > 1:
            self._settle()

    def _settle(self) -> None:
        for sequence in self.residents:
            self._charge(sequence)

    def _charge(self, sequence: Sequence) -> None:
        """Charge for positions that were computed for the first time, not from the cache."""
        tokens = sequence.computed - sequence.charged
        if tokens > 0:
            self.shares.charge(sequence.generation.request.tenant, tokens)
            sequence.charged = sequence.computed
