"""When a running step is given up for a request that has just come.

A step cannot be stopped half way and kept: what it computed is lost and computed again. So it is
given up only for a request of a smaller class than most of what it computes, while more of it is
still to come than was spent, and for ``LOST_SHARE`` of all step time at most. Asked by
``core/replica.py``; who makes way in the next step is the policy's choice.
"""

from sluice.core.batch import Batch
from sluice.core.roster import Roster
from sluice.core.sequence import Sequence

# Of the time of all steps at most this part is lost to steps that were given up.
LOST_SHARE = 0.1
# What may be lost at once after a time without losses: about two full steps.
LOST_NS_MAX = 150_000_000
# It takes a few milliseconds until a step is given up: less is not worth it.
LEFT_NS_MIN = 8_000_000


class Interruption:
    """Judges running steps, and keeps account of the time that was lost."""

    def __init__(self) -> None:
        self._credit_ns = 0.0

    def took(self, duration_ns: int) -> None:
        """A step ran to its end."""
        if self._credit_ns < LOST_NS_MAX:
            self._credit_ns = min(LOST_NS_MAX, self._credit_ns + LOST_SHARE * duration_ns)

    def lost(self, duration_ns: int) -> None:
        """A step was given up after so long."""
        self._credit_ns -= duration_ns

    def pays(
        self, newcomer: Sequence, batch: Batch, roster: Roster, *, spent_ns: int, left_ns: int
    ) -> bool:
        """Whether the step is to be given up ``spent_ns`` after its start for the newcomer."""
        if left_ns < max(LEFT_NS_MIN, spent_ns) or spent_ns > self._credit_ns:
            return False
        roster.settle_shares()
        rank = roster.rank(newcomer)
        if any(roster.rank(sequence) <= rank for sequence, _ in batch.chunks):
            return False
        larger = sum(roster.rank(sequence) > rank for sequence in batch.decodes)
        return 2 * larger >= len(batch.decodes)
