"""The three ways to batch: whom to serve first, how large a step may be, who fits, who gives way.

``core/batching.py`` walks the waiting and the residents; every choice it makes on the way is a
method here, so the policies differ in nothing else. None of them changes any state.
"""
# ruff: noqa: ARG002 - each policy is given what any of them needs

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from sluice.core.costmodel import Load
from sluice.core.lengths import Holding, later, peak_blocks, steps_until_fit
from sluice.core.lifecycle import SequenceState
from sluice.core.roster import BatchingPolicy, Roster
from sluice.core.sequence import Sequence

Order = tuple[int, int, int]

TTFT_NS_DEFAULT = 1_000_000_000  # lets requests without a target be ordered among those with one
SLACK_NS_DEFAULT = 60_000_000_000  # slack of a sequence that has no due time
WORK_WEIGHT = 1  # ns of later due time per ns of work: 0 is EDF, large is shortest first
RESERVE_DIVISOR = 50  # 2 % of the pool is kept against lengths that were predicted too short
PREEMPTIONS_MAX = 2  # after these a sequence is resident only with all it can ever need reserved
PASSED_MAX = 64  # sequences that may go ahead of one that does not fit


class Admission(Enum):
    """Which of the waiting may become resident in a step."""

    NONE = auto()
    AS_COMPUTED = auto()  # those that the step computes a chunk of
    WHOLE_BATCH = auto()  # up to the batch size at once, computed later if need be


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may take beside its decode rows. ``step_ns`` is ``None`` for no bound on time."""

    tokens: int
    step_ns: int | None
    admission: Admission


@dataclass(frozen=True, slots=True)
class Reservation:
    """A sequence that does not fit yet, and in how many steps it is expected to."""

    holding: Holding
    steps: int


class Policy(Protocol):
    """The choices in planning a step."""

    def order(self, sequence: Sequence, roster: Roster) -> Order:
        """Place among those that want prefill; smallest first, unique per sequence."""

    def budget(self, decodes: Seq[Sequence], load: Load, roster: Roster, now_ns: int) -> Budget:
        """What prefill may take beside these decode rows, whose load is ``load``."""

    def fits(self, candidate: Sequence, roster: Roster, ahead: Reservation | None) -> bool:
        """Whether a waiting sequence, its cached prefix attached, may become resident.

        ``ahead`` is the reservation of an earlier one that must not be delayed.
        """

    def reserve(self, head: Sequence, roster: Roster) -> Reservation | None:
        """What to keep for a head that does not fit; ``None`` if nobody may go ahead of it."""

    def victim(self, candidates: Seq[Sequence], roster: Roster, now_ns: int) -> Sequence:
        """Which resident loses its blocks; ``candidates`` is not empty."""


class FcfsPolicy:
    """Continuous batching in order of arrival with a fixed number of tokens per step.

    A prompt is admitted when its own blocks are there; output is not reserved. The last to arrive
    gives way.
    """

    def order(self, sequence: Sequence, roster: Roster) -> Order:
        return (0, 0, sequence.number)

    def budget(self, decodes: Seq[Sequence], load: Load, roster: Roster, now_ns: int) -> Budget:
        tokens = max(1, roster.limits.chunk_tokens_max - load.tokens)
        return Budget(tokens, None, Admission.AS_COMPUTED)

    def fits(self, candidate: Sequence, roster: Roster, ahead: Reservation | None) -> bool:
        concerned = (candidate, *roster.residents)
        if any(sequence.preemptions >= PREEMPTIONS_MAX for sequence in concerned):
            return _fits_at_peak(candidate, roster, None)
        return True

    def reserve(self, head: Sequence, roster: Roster) -> Reservation | None:
        return None

    def victim(self, candidates: Seq[Sequence], roster: Roster, now_ns: int) -> Sequence:
        return max(candidates, key=lambda sequence: sequence.number)


class StaticPolicy(FcfsPolicy):
    """Waits for a batch, then runs that batch to its end before the next one starts."""

    def budget(self, decodes: Seq[Sequence], load: Load, roster: Roster, now_ns: int) -> Budget:
        tokens = max(1, roster.limits.chunk_tokens_max - load.tokens)
        ready = not roster.residents and self.batch_ready_ns(roster) <= now_ns
        return Budget(tokens, None, Admission.WHOLE_BATCH if ready else Admission.NONE)

    def batch_ready_ns(self, roster: Roster) -> int:
        """When the waiting make a batch: at once where there are enough of them."""
        if len(roster.waiting) >= roster.limits.static_sequences:
            return 0
        first_ns = min((s.generation.submitted_ns for s in roster.waiting), default=0)
        return first_ns + roster.limits.static_wait_ns

    def fits(self, candidate: Sequence, roster: Roster, ahead: Reservation | None) -> bool:
        if len(roster.residents) >= roster.limits.static_sequences:
            return False
        return _fits_at_peak(candidate, roster, None)


class SloPolicy:
    """Serves by due time within tiers, in steps sized so that no resident's next token is late."""

    def order(self, sequence: Sequence, roster: Roster) -> Order:
        """(tier, due time + remaining work, arrival)."""
        request = sequence.generation.request
        due_ns = sequence.due_ns()
        if due_ns is None:
            due_ns = request.arrived_ns + TTFT_NS_DEFAULT
        work_ns = int(sequence.pending * 1e9 / roster.cost.prefill_tokens_per_s)
        return (request.tier, due_ns + WORK_WEIGHT * work_ns, sequence.number)

    def budget(self, decodes: Seq[Sequence], load: Load, roster: Roster, now_ns: int) -> Budget:
        """The time until the first due token bounds the step.

        Otherwise ``step_ns_max`` does, or twice the decode rows' own time on a model so slow that
        they alone come near it: prefill would starve for a bound that cannot be kept anyway.

        A resident that cannot get back on time by its end, even in steps without prefill, no
        longer counts: holding prefill back for it would only make others late as well.
        """
        limits, cost = roster.limits, roster.cost
        step_ns = int(limits.step_ns_max * cost.margin)  # a mean, not a worst case
        if decodes:
            alone_ns = int(cost.step_ns(load) * cost.margin)
            step_ns = max(step_ns, 2 * alone_ns)
            for sequence in decodes:
                tpot_ns = sequence.generation.request.tpot_ns
                due_ns = sequence.due_ns()
                if tpot_ns is None or due_ns is None:
                    continue
                slack_ns = due_ns - now_ns
                if alone_ns - slack_ns <= sequence.remaining * max(0, tpot_ns - alone_ns):
                    step_ns = min(step_ns, slack_ns)
            step_ns = max(step_ns, alone_ns)
        return Budget(limits.chunk_tokens_max, step_ns, Admission.AS_COMPUTED)

    def fits(self, candidate: Sequence, roster: Roster, ahead: Reservation | None) -> bool:
        return _fits_at_peak(candidate, roster, ahead)

    def reserve(self, head: Sequence, roster: Roster) -> Reservation | None:
        if head.passed >= PASSED_MAX:
            return None
        # When it will fit is an estimate: prompts are taken to be computed at once.
        own, *held = (
            holding(sequence, roster)._replace(prefilling=False)
            for sequence in (head, *roster.residents)
        )
        ledger = roster.ledger
        steps = steps_until_fit(held, own, ledger.shared, ledger.block_size, ledger.blocks_total)
        return Reservation(own, steps)

    def victim(self, candidates: Seq[Sequence], roster: Roster, now_ns: int) -> Sequence:
        """Lowest tier, then most (blocks freed x slack) per token to recompute."""

        def worth(sequence: Sequence) -> tuple[int, float, int]:
            due_ns = sequence.due_ns()
            slack_ns = SLACK_NS_DEFAULT if due_ns is None else max(1, due_ns - now_ns)
            freed = roster.ledger.private(sequence.table)
            gain = freed * slack_ns / max(1, sequence.computed)
            return (sequence.generation.request.tier, gain, sequence.number)

        return max(candidates, key=worth)


def holding(sequence: Sequence, roster: Roster) -> Holding:
    """The sequence's blocks and predicted remaining length.

    A sequence that was preempted as often as it may be counts with all it can ever need.
    """
    remaining = sequence.remaining
    if sequence.preemptions < PREEMPTIONS_MAX and roster.limits.policy is BatchingPolicy.SLO:
        remaining = roster.lengths.remaining(sequence.produced, remaining)
    cells, blocks = len(sequence.tokens) - 1, len(sequence.table.blocks)
    private = roster.ledger.private(sequence.table)
    prefilling = sequence.state is not SequenceState.DECODE
    return Holding(cells, remaining, private, blocks, prefilling)


def _fits_at_peak(candidate: Sequence, roster: Roster, ahead: Reservation | None) -> bool:
    """Whether the pool holds the residents and the candidate at the worst moment to come.

    With ``ahead``, the candidate must also be gone by the time the reserved sequence starts, or
    leave room and a place for it (EASY backfill).
    """
    if not roster.residents:
        return True  # alone it has the whole pool, which its output limit respects
    ledger, limits = roster.ledger, roster.limits
    size, shared = ledger.block_size, ledger.shared
    concerned = [*roster.residents, candidate]
    held = [holding(sequence, roster) for sequence in concerned]
    certain = all(h.remaining == s.remaining for h, s in zip(held, concerned, strict=True))
    reserve = 0 if certain else max(ledger.blocks_total // RESERVE_DIVISOR, len(held))
    room = ledger.blocks_total - reserve
    if peak_blocks(held, shared, size) > room:
        return False
    if ahead is None:
        return True
    chunks = -(-candidate.pending // limits.chunk_tokens_max)
    if held[-1].remaining + chunks <= ahead.steps:
        return True
    if len(roster.residents) + 2 > limits.sequences_max:
        return False
    left = later(held, ahead.steps, size)
    return peak_blocks([*left, ahead.holding], shared, size) <= room
