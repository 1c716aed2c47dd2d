"""The three ways to batch: whom to serve first, how large a step may be, who fits, who gives way.

``core/batching.py`` walks the waiting and the residents; every choice it makes on the way is a
method here, so the policies differ in nothing else. None of them changes any state.
"""
# ruff: noqa: ARG002 - each policy is given what any of them needs

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate
from operator import attrgetter
from typing import Protocol

from sluice.core.costmodel import Load
from sluice.core.request import TTFT_NS_DEFAULT
from sluice.core.residency import (
    PREEMPTIONS_MAX,
    Reservation,
    fits_at_peak,
    fits_for_sure,
    holdings,
    keeps_pace,
    reservation,
)
from sluice.core.roster import Roster
from sluice.core.sequence import Sequence

SLACK_NS_DEFAULT = 60_000_000_000  # slack of a sequence that has no due time
# Nanoseconds of later due time per nanosecond of work: at the least nearly earliest due time first,
# at the most nearly shortest first.
WORK_WEIGHT_MIN = 1.0
WORK_WEIGHT_MAX = 50.0
RESTS_MAX = 2  # steps in a row that a sequence may be left out of for one of a smaller class
PRESSURE_FULL = 2.0  # backlog over slack at which the weight is at its most


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


class Policy(Protocol):
    """The choices in planning a step."""

    def arrange(self, wanting: Seq[Sequence], roster: Roster, now_ns: int) -> list[Sequence]:
        """Those that want prefill, in the order in which they get it.

        Enters in each whether its first token will be ``late``; nothing else is changed.
        """

    def budget(self, decodes: Seq[Sequence], load: Load, roster: Roster, now_ns: int) -> Budget:
        """What prefill may take beside these decode rows, whose load is ``load``."""

    def fits(
        self, candidate: Sequence, roster: Roster, now_ns: int, ahead: Reservation | None
    ) -> bool:
        """Whether a waiting sequence, its cached prefix attached, may become resident.

        ``ahead`` is the reservation of an earlier one that must not be delayed.
        """

    def reserve(self, head: Sequence, roster: Roster, now_ns: int) -> Reservation | None:
        """What to keep for a head that does not fit; ``None`` if nobody may go ahead of it."""

    def victim(self, candidates: Seq[Sequence], roster: Roster, now_ns: int) -> Sequence:
        """Which resident loses its blocks; ``candidates`` is not empty."""

    def resting(
        self, others: Seq[Sequence], wanting: Seq[Sequence], roster: Roster, now_ns: int
    ) -> list[Sequence]:
        """Those of ``others`` that make way for the next of ``wanting``, which are in order."""


class FcfsPolicy:
    """Continuous batching in order of arrival with a fixed number of tokens per step.

    A prompt is admitted when its own blocks are there; output is not reserved. The last to arrive
    gives way.
    """

    def arrange(self, wanting: Seq[Sequence], roster: Roster, now_ns: int) -> list[Sequence]:
        for sequence in wanting:
            sequence.late = False  # whoever is late keeps its place like the others
        return sorted(wanting, key=attrgetter("number"))

    def budget(self, decodes: Seq[Sequence], load: Load, roster: Roster, now_ns: int) -> Budget:
        tokens = max(1, roster.limits.chunk_tokens_max - load.tokens)
        return Budget(tokens, None, Admission.AS_COMPUTED)

    def fits(
        self, candidate: Sequence, roster: Roster, now_ns: int, ahead: Reservation | None
    ) -> bool:
        concerned = (candidate, *roster.residents)
        if any(sequence.preemptions >= PREEMPTIONS_MAX for sequence in concerned):
            return _alone_or_at_peak(candidate, roster)
        return True

    def reserve(self, head: Sequence, roster: Roster, now_ns: int) -> Reservation | None:
        return None

    def victim(self, candidates: Seq[Sequence], roster: Roster, now_ns: int) -> Sequence:
        return max(candidates, key=lambda sequence: sequence.number)

    def resting(
        self, others: Seq[Sequence], wanting: Seq[Sequence], roster: Roster, now_ns: int
    ) -> list[Sequence]:
        return []


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

    def fits(
        self, candidate: Sequence, roster: Roster, now_ns: int, ahead: Reservation | None
    ) -> bool:
        if len(roster.residents) >= roster.limits.static_sequences:
            return False
        return _alone_or_at_peak(candidate, roster)


class SloPolicy:
    """Serves by due time within tiers, in steps sized so that no resident's next token is late."""

    def arrange(self, wanting: Seq[Sequence], roster: Roster, now_ns: int) -> list[Sequence]:
        """By (late, tier, ahead of its tenant's share, due time + h x remaining work, arrival).

        Whoever cannot have its first token in time, even if it were next, comes after those who
        can. With h at 1 that is nearly earliest due time first. For those on time it rises while
        the backlog is more than the due times allow: some will be late then, and the shortest make
        the most of the time. The late ones keep their turns.
        """
        token_ns = 1e9 / roster.cost.prefill_tokens_per_s
        works_ns = [int(_tokens_to_compute(sequence, roster) * token_ns) for sequence in wanting]
        for sequence, work_ns in zip(wanting, works_ns, strict=True):
            sequence.late = sequence.late_after(now_ns + work_ns)
        roster.settle_shares()
        if len(wanting) == 1:
            return list(wanting)
        weight = _work_weight(zip(wanting, works_ns, strict=True), now_ns)

        def place(pair: tuple[Sequence, int]) -> tuple[bool, tuple[int, bool], float, int]:
            sequence, work_ns = pair
            due_ns = sequence.due_ns()
            if due_ns is None:
                due_ns = sequence.generation.request.arrived_ns + TTFT_NS_DEFAULT
            served_ns = due_ns + (WORK_WEIGHT_MIN if sequence.late else weight) * work_ns
            return (sequence.late, roster.rank(sequence), served_ns, sequence.number)

        return [s for s, _ in sorted(zip(wanting, works_ns, strict=True), key=place)]

    def budget(self, decodes: Seq[Sequence], load: Load, roster: Roster, now_ns: int) -> Budget:
        """The time until the first due token bounds the step, and one token's time of each row.

        What a row is ahead of its due times is kept for stalls: spent on one step it would be one
        long gap. That may happen only to tenants that are ahead of their share, for the sake of the
        others. A row that cannot get back on time by its end, even in steps without prefill, no
        longer counts: holding prefill back for it would only make others late as well.
        """
        limits, cost = roster.limits, roster.cost
        step_ns = int(limits.step_ns_max * cost.margin)  # a mean, not a worst case
        if decodes:
            least_ns = cost.step_ns(load)
            for sequence in decodes:
                tpot_ns = sequence.tpot_kept_ns(least_ns, now_ns)
                due_ns = sequence.due_ns()
                if tpot_ns is not None and due_ns is not None:
                    step_ns = min(step_ns, due_ns - now_ns)
                    # Time per token is a mean as well; only the due time is to be kept surely.
                    if not roster.shares.ahead(sequence.generation.request.tenant):
                        step_ns = min(step_ns, int(tpot_ns * cost.margin))
            step_ns = max(step_ns, int(least_ns * cost.margin))
        return Budget(limits.chunk_tokens_max, step_ns, Admission.AS_COMPUTED)

    def fits(
        self, candidate: Sequence, roster: Roster, now_ns: int, ahead: Reservation | None
    ) -> bool:
        if not roster.residents:
            return True  # alone it has the whole pool, which its output limit respects
        if roster.recovering(candidate.generation.request.tier):
            return False
        if ahead is None and fits_for_sure(candidate, roster):
            return True
        held = holdings(candidate, roster)
        return keeps_pace(candidate, held, roster, now_ns) and fits_at_peak(
            candidate, held, roster, ahead
        )

    def reserve(self, head: Sequence, roster: Roster, now_ns: int) -> Reservation | None:
        """Nobody goes ahead of one for which there is no time: more rows would take more of it."""
        if not keeps_pace(head, holdings(head, roster), roster, now_ns):
            return None
        return reservation(head, roster)

    def victim(self, candidates: Seq[Sequence], roster: Roster, now_ns: int) -> Sequence:
        """Lowest tier, late ones first, then most (blocks freed x slack) per token to recompute."""

        def worth(sequence: Sequence) -> tuple[int, bool, float, int]:
            due_ns = sequence.due_ns()
            slack_ns = SLACK_NS_DEFAULT if due_ns is None else max(1, due_ns - now_ns)
            freed = roster.ledger.private(sequence.table)
            gain = freed * slack_ns / max(1, sequence.computed)
            return (sequence.generation.request.tier, sequence.late, gain, sequence.number)

        return max(candidates, key=worth)

    def resting(
        self, others: Seq[Sequence], wanting: Seq[Sequence], roster: Roster, now_ns: int
    ) -> list[Sequence]:
        """Who is of a larger class (tier, tenant ahead of its share) than the prompt that is next.

        It makes way if its next token is not due before the end of the step after this one, and for
        ``RESTS_MAX`` steps in a row at most. Nobody makes way for a prompt that is late.
        """
        first = next((sequence for sequence in wanting if not sequence.late), None)
        if first is None:
            return []
        best = roster.rank(first)
        later_ns = now_ns + 2 * roster.limits.step_ns_max
        return [
            sequence
            for sequence in others
            if sequence.rested < RESTS_MAX
            and roster.rank(sequence) > best
            and ((due_ns := sequence.due_ns()) is None or due_ns > later_ns)
        ]


def _tokens_to_compute(sequence: Sequence, roster: Roster) -> int:
    """What is pending, without what a waiting one will find in the prefix cache."""
    if sequence.table.blocks:
        return sequence.pending
    return len(sequence.tokens) - roster.ledger.cached_tokens(sequence.tokens)


def _work_weight(works: Iterable[tuple[Sequence, int]], now_ns: int) -> float:
    """h: by how much the backlog of those that can be on time exceeds what their due times allow.

    In order of due times everyone is on time if, for each of them, the work up to and including
    its own is no more than its slack.
    """
    dues = sorted(
        (due_ns, work_ns)
        for sequence, work_ns in works
        if not sequence.late and (due_ns := sequence.due_ns()) is not None
    )
    backlogs = accumulate(work_ns for _, work_ns in dues)
    slacks = (max(1, due_ns - now_ns) for due_ns, _ in dues)
    pressure = max((b / slack for b, slack in zip(backlogs, slacks, strict=True)), default=0.0)
    share = min(1.0, max(0.0, (pressure - 1.0) / (PRESSURE_FULL - 1.0)))
    return WORK_WEIGHT_MIN + share * (WORK_WEIGHT_MAX - WORK_WEIGHT_MIN)


def _alone_or_at_peak(candidate: Sequence, roster: Roster) -> bool:
    """Alone a sequence has the whole pool, which its output limit respects."""
    return not roster.residents or fits_at_peak(
        candidate, holdings(candidate, roster), roster, None
    )
