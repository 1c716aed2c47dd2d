"""When a running step is given up for a request that has just come.

A step cannot be stopped half way and kept: what it computed is lost and computed again. So it is
given up only for a request of a smaller class than most of what it computes, while more of it is
still to come than was spent, and for ``LOST_SHARE`` of all step time at most. Asked by
``core/replica.py``; who makes way in the next step is the policy's choice.
"""

from sluice.core.batch import Batch
from sluice.core.events import Interrupt
from sluice.core.roster import BatchingPolicy, Roster
from sluice.core.sequence import Sequence
from sluice.core.step import Plan

# Of the time of all steps at most this part is lost to steps that were given up.
LOST_SHARE = 0.1
# What may be lost at once after a time without losses: about two full steps.
LOST_NS_MAX = 150_000_000
# It takes a few milliseconds until a step is given up: less is not worth it.
LEFT_NS_MIN = 8_000_000


class Interruption:
    """Judges running steps, and keeps account of the time that was lost.

    Only the ``slo`` policy knows classes: under others every step runs to its end.
    """

    def __init__(self, policy: BatchingPolicy) -> None:
        self._asks = policy is BatchingPolicy.SLO
        self._began_ns = 0
        self._credit_ns = 0.0

    def began(self, now_ns: int) -> None:
        """A step begins."""
        self._began_ns = now_ns

    def took(self, duration_ns: int) -> None:
        """The step ran to its end; another one may have begun then."""
        self._began_ns += duration_ns
        self._credit_ns = min(LOST_NS_MAX, self._credit_ns + LOST_SHARE * duration_ns)

    def lost(self, duration_ns: int) -> None:
        """The step was given up after so long."""
        self._credit_ns -= duration_ns

    def for_newcomer(
        self, newcomer: Sequence, running: tuple[Plan, Batch] | None, roster: Roster, now_ns: int
    ) -> list[Interrupt]:
        """Ask for the running step to be given up, where that pays for a request that came now."""
        if running is None or not self._asks:
            return []
        plan, batch = running
        spent_ns = now_ns - self._began_ns
        left_ns = plan.predicted_ns - spent_ns
        if left_ns < max(LEFT_NS_MIN, spent_ns) or spent_ns > self._credit_ns:
            return []
        roster.settle_shares()
        rank = roster.rank(newcomer)
        if any(roster.rank(sequence) <= rank for sequence, _ in batch.chunks):
            return []
        larger = sum(roster.rank(sequence) > rank for sequence in batch.decodes)
        return [Interrupt(plan.step)] if 2 * larger >= len(batch.decodes) else []
