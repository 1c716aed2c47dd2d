"""The protocol by which computed steps enter the product, and its values.

A ``StepExecutor`` computes what it is told; it plans nothing, queues nothing, knows no client and
no text. It is driven by one thread. Batching policy lives in ``core``; stop strings, grammars and
detokenising live in ``runtime``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import SampledLogprobs, Sampling
from sluice.core.step import Plan, Sampled


class TokenMask(Protocol):
    """Which tokens may come next in one sequence (a grammar's state, owned by the runtime)."""

    def fill(self, words: memoryview) -> None:
        """Write the allowed set as a bit mask: ``ceil(vocab/32)`` little-endian uint32 words."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave: one ``Sampled`` per sampling row, in row order.

    ``logprobs`` holds an entry for the sequences that asked. ``duration_ns`` is the wall time of
    ``run``, of which ``sampling_ns`` went to choosing tokens.
    """

    sampled: tuple[Sampled, ...]
    duration_ns: int
    sampling_ns: int = 0
    logprobs: Mapping[SequenceId, SampledLogprobs] = field(default_factory=dict)


class StepError(Exception):
    """A plan could not be computed. ``blamed`` is empty when no single sequence is at fault."""

    def __init__(self, message: str, blamed: tuple[SequenceId, ...] = ()) -> None:
        super().__init__(message)
        self.blamed = blamed


def check_plan(plan: Plan, limits: ReplicaLimits) -> None:
    """Refuse what no executor can compute: rows without tokens, or over cells they do not own.

    Raises ``StepError`` that blames the first such row's sequence. Whether a row's sequence is
    open and its token ids are known is for the executor to say.
    """
    size, written = limits.block_size, set[int]()
    for row in plan.rows:
        blamed, blocks = (row.sequence,), row.blocks
        cells = row.past_tokens + len(row.tokens)
        if not row.tokens:
            raise StepError("a row has no token", blamed)
        if len(blocks) * size < cells:
            raise StepError(f"{len(blocks)} blocks cannot hold {cells} tokens", blamed)
        if min(blocks) < 0 or max(blocks) >= limits.blocks_total:
            raise StepError(f"a block is outside the pool of {limits.blocks_total}", blamed)
        own = blocks[row.past_tokens // size : -(-cells // size)]
        if not written.isdisjoint(own):
            raise StepError("two rows write to one block", blamed)
        written.update(own)


class StepExecutor(Protocol):
    """Computes plans over a KV pool of its own."""

    def load(self) -> ReplicaLimits:
        """Load the model and allocate the KV pool; blocks until ready.

        Raises ``ModelLoadError`` (a model that cannot be read) or ``MemoryShort`` (a pool that does
        not fit), both from ``sluice.core.errors``.
        """
        ...

    def open_sequence(
        self,
        sequence: SequenceId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        mask: TokenMask | None = None,
    ) -> None:
        """Register how a sequence is sampled, before its first row. Raises ``ValueError``."""
        ...

    def end_sequence(self, sequence: SequenceId) -> None:
        """Forget a sequence. Unknown ones are ignored."""
        ...

    def run(self, plan: Plan) -> Outcome:
        """Compute a plan. Raises ``StepError``."""
        ...

    def close(self) -> None:
        """Release memory; safe to call twice."""
        ...
