"""Who waits and who is resident on one replica, within which limits.

State shared by the planning of a step (``core/batching.py``) and the policies it asks
(``core/policies.py``). A sequence is in exactly one of the two lists, or in none once it has ended.
"""

from bisect import insort
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from sluice.core.costmodel import CostModel
from sluice.core.events import ReplicaLimits
from sluice.core.kv import BlockLedger
from sluice.core.lengths import OutputLengths
from sluice.core.lifecycle import SequenceState
from sluice.core.sequence import Sequence


class BatchingPolicy(StrEnum):
    """How steps are filled; ``core/policies.py`` has one class for each."""

    STATIC = "static"
    FCFS = "fcfs"
    SLO = "slo"


@dataclass(frozen=True, slots=True)
class BatchingLimits:
    """What one replica may hold and how it batches.

    ``static_sequences`` and ``static_wait_ns`` are for the static policy: a batch starts when so
    many wait, or the first of them has waited so long.
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

    @property
    def replica(self) -> ReplicaLimits:
        """What the replica can hold, as the fleet knows it."""
        return ReplicaLimits(
            self.context_tokens_max, self.block_size, self.blocks_total, self.sequences_max
        )


class Roster:
    """The waiting, in the policy's order, and the residents, in the order of their admission.

    ``version`` changes whenever either list does: what did not fit can fit only after that.
    """

    def __init__(self, limits: BatchingLimits, cost: CostModel) -> None:
        self.limits = limits
        self.cost = cost
        self.ledger = BlockLedger(
            limits.blocks_total, limits.block_size, prefix_cache=limits.prefix_cache
        )
        self.lengths = OutputLengths()
        self.waiting: list[Sequence] = []
        self.residents: list[Sequence] = []
        self.version = 0
        self.preemptions = 0

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence at the place its ``order`` gives it."""
        insort(self.waiting, sequence, key=attrgetter("order"))
        self.version += 1

    def admit(self, sequence: Sequence) -> None:
        """Make a waiting sequence resident; its table already holds its known tokens."""
        sequence.move(SequenceState.PREFILL)
        self.waiting.remove(sequence)
        self.residents.append(sequence)
        self.version += 1

    def preempt(self, sequence: Sequence) -> None:
        """Take a resident's blocks away. The caller queues it again."""
        sequence.move(SequenceState.PREEMPTED)
        self.residents.remove(sequence)
        self.ledger.release(sequence.table)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.lengths.missed()
        self.version += 1

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence for good, wherever it is."""
        resident = sequence.state in (SequenceState.PREFILL, SequenceState.DECODE)
        sequence.move(SequenceState.ENDED)
        (self.residents if resident else self.waiting).remove(sequence)
        self.ledger.release(sequence.table)
        self.version += 1
