"""Whether a waiting sequence may become resident: room for its KV, time for its tokens.

Asked by the policies of ``core/policies.py``. Both questions are about the future of the residents
with the candidate among them: the most blocks that they will hold at once, and how long a step of
all of them takes. Nothing is changed here, and who is asked first is not decided here.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from sluice.core.costmodel import Load
from sluice.core.lengths import Holding, later, peak_blocks, steps_until_fit
from sluice.core.lifecycle import SequenceState
from sluice.core.roster import BatchingPolicy, Roster
from sluice.core.sequence import Sequence

PREEMPTIONS_MAX = 2  # after these a sequence is resident only with all it can ever need reserved
PASSED_MAX = 64  # sequences that may go ahead of one that does not fit
GROWTH_TOKENS_MAX = 256  # further output of each row that its pace is predicted for


class Reservation(NamedTuple):
    """A sequence that does not fit yet, and in how many steps it is expected to."""

    holding: Holding
    steps: int


def holding(sequence: Sequence, roster: Roster) -> Holding:
    """The sequence's blocks and predicted remaining length.

    A sequence that was preempted as often as it may be counts with all it can ever need.
    """
    remaining = sequence.remaining
    if sequence.preemptions < PREEMPTIONS_MAX and roster.limits.policy is BatchingPolicy.SLO:
        slo_class = sequence.generation.request.slo_class
        remaining = roster.lengths.remaining(sequence.produced, remaining, slo_class=slo_class)
    cells, blocks = len(sequence.tokens) - 1, len(sequence.table.blocks)
    private = roster.ledger.private(sequence.table)
    prefilling = sequence.state is not SequenceState.DECODE
    return Holding(cells, remaining, private, blocks, prefilling)


def context_tokens(held: Holding) -> int:
    """Tokens that a row attends to, in the middle of what its pace is predicted for."""
    return held.cells + min(held.remaining, GROWTH_TOKENS_MAX) // 2


def reserve_blocks(sequences: int, roster: Roster) -> int:
    """Blocks kept against so many outputs that are longer than predicted."""
    return max(int(roster.ledger.blocks_total * roster.limits.kv_headroom), sequences)


def holdings(candidate: Sequence, roster: Roster) -> list[Holding]:
    """Those of the residents and, last, of the candidate."""
    return [holding(sequence, roster) for sequence in (*roster.residents, candidate)]


def fits_for_sure(candidate: Sequence, roster: Roster) -> bool:
    """Whether there is room and time whatever the outputs will be; nothing is said where not."""
    ledger, ceiling, rows = roster.ledger, roster.ceiling, len(roster.residents) + 1
    request = candidate.generation.request
    tokens = len(request.prompt) + candidate.output_limit
    blocks = ledger.shared + ceiling.blocks + ledger.blocks_for(tokens)
    if blocks > ledger.blocks_total - reserve_blocks(rows, roster):
        return False
    targets_ns = [t for t in (ceiling.tightest_ns, request.tpot_ns) if t is not None]
    if not targets_ns:
        return True
    step_ns = roster.cost.step_ns(Load(rows, rows, ceiling.tokens + tokens))
    return step_ns / (1.0 - roster.limits.prefill_share) <= min(targets_ns)


def fits_at_peak(
    candidate: Sequence, held: Seq[Holding], roster: Roster, ahead: Reservation | None
) -> bool:
    """Whether the pool holds the residents and the candidate at the worst moment to come.

    With ``ahead``, the candidate must also be gone by the time the reserved sequence starts, or
    leave room and a place for it (EASY backfill).
    """
    ledger, limits = roster.ledger, roster.limits
    size, shared = ledger.block_size, ledger.shared
    concerned = (*roster.residents, candidate)
    certain = all(h.remaining == s.remaining for h, s in zip(held, concerned, strict=True))
    reserve = 0 if certain else reserve_blocks(len(held), roster)
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


def keeps_pace(candidate: Sequence, held: Seq[Holding], roster: Roster, now_ns: int) -> bool:
    """Whether a step of all rows leaves each the time per token that it can still be given.

    ``prefill_share`` of that time is left for prompts, except where the candidate goes before one
    of the residents in the order of service. Targets that are lost already, or that a row could not
    meet even alone, hold nobody back, and those of late sequences nobody who is on time. There is
    no margin: time per token is a mean of many steps.
    """
    concerned = (*roster.residents, candidate)
    targets = [s.generation.request.tpot_ns for s in concerned]
    tightest_ns = min((t for t in targets if t is not None), default=None)
    if tightest_ns is None:
        return True
    cost, rows = roster.cost, len(held)
    contexts = [context_tokens(h) for h in held]
    share = 0.0 if _precedes_a_resident(candidate, roster) else roster.limits.prefill_share
    step_ns = cost.step_ns(Load(rows, rows, sum(contexts))) / (1.0 - share)
    if step_ns <= tightest_ns:
        return True
    before_ns = cost.step_ns(Load(rows - 1, rows - 1, sum(contexts[:-1])))
    alone_ns = cost.step_ns(Load(1, 1, contexts[-1]))
    for sequence in concerned:
        if sequence.late and not candidate.late:
            continue
        least_ns = alone_ns if sequence is candidate else before_ns
        tpot_ns = sequence.tpot_kept_ns(least_ns, now_ns)
        if tpot_ns is not None and step_ns > tpot_ns:
            return False
    return True


def _precedes_a_resident(candidate: Sequence, roster: Roster) -> bool:
    """Whether somebody of a lower tier, or further ahead of its share, got its place before it."""
    if candidate.late:
        return False
    own = roster.rank(candidate)
    return any(roster.rank(resident) > own for resident in roster.residents)


def reservation(head: Sequence, roster: Roster) -> Reservation | None:
    """What to keep for a head that does not fit; ``None`` if nobody may go ahead of it any more."""
    if head.passed >= PASSED_MAX:
        return None
    # When it will fit is an estimate: prompts are taken to be computed at once.
    *held, own = (h._replace(prefilling=False) for h in holdings(head, roster))
    ledger = roster.ledger
    steps = steps_until_fit(held, own, ledger.shared, ledger.block_size, ledger.blocks_total)
    return Reservation(own, steps)
