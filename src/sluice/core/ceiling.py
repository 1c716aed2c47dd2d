"""What residents take if every one runs to its limit: no prediction about them gives more.

Kept by ``core/roster.py`` as they come and go, so that the questions of ``core/residency.py`` and
``core/seats.py`` need no look at each of them while there is room and time for all.
"""

from sluice.core.sequence import Sequence


class Ceiling:
    """Sums over sequences: tokens and blocks at their limits, and their times per token."""

    def __init__(self, block_size: int) -> None:
        self.tokens = 0
        self.blocks = 0
        self._block_size = block_size
        self._tpots: dict[int, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Count a sequence."""
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Count a sequence no more."""
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        request = sequence.generation.request
        tokens = len(request.prompt) + sequence.output_limit
        self.tokens += sign * tokens
        self.blocks += sign * -(-tokens // self._block_size)
        if request.tpot_ns is not None:
            count = self._tpots[request.tpot_ns] = self._tpots.get(request.tpot_ns, 0) + sign
            if not count:
                del self._tpots[request.tpot_ns]

    @property
    def tightest_ns(self) -> int | None:
        """The least target for the time per token, ``None`` where there is none."""
        return min(self._tpots, default=None)
