"""How much longer sequences will run, and how many blocks that will take at the worst moment.

Pure arithmetic for the admission check of ``core/policies.py``: a window of observed output
lengths, and the peak of KV use over the future of a set of sequences that decode in lock step.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul
from typing import NamedTuple

KEPT = 512
HISTORY_MIN = 50  # fewer observations say too little about a tail
TAIL_MIN = 5
CLASSES_MAX = 16  # SLO classes with a history of their own; further ones share the common one
ROUNDING = 1e-9  # far more than what hundreds of factors lose, far less than one observation
QUANTILE_MIN = 0.9
QUANTILE_MAX = 0.99
QUANTILE_UP = 0.05  # after each preemption: the predictions were too short
QUANTILE_DOWN = 0.001  # after each ending


# Of so many the share that is left after one of them ended, for ``KEPT`` down to 1.
_LEFT = tuple((count - 1) / count for count in range(KEPT, 0, -1))


class OutputLengths:
    """Observed output lengths per SLO class, and predictions from them.

    A prediction is conditional on what was produced already. It comes from the class's own history,
    from that of all classes together where the class has too little, and is the limit where both
    have. ``quantile`` is the one used where the caller names none; it rises with each preemption.
    """

    def __init__(self) -> None:
        self._all = _History()
        self._of_class: dict[str, _History] = {}
        self.quantile = QUANTILE_MIN

    def observe(self, tokens: int, slo_class: str = "", *, cut: bool = False) -> None:
        """A sequence ended after this many tokens; ``cut`` if its limit ended it."""
        own = self._of_class.get(slo_class)
        if own is None and len(self._of_class) < CLASSES_MAX:
            own = self._of_class[slo_class] = _History()
        if own is not None:
            own.observe(tokens, cut=cut)
        self._all.observe(tokens, cut=cut)
        self.quantile = max(QUANTILE_MIN, self.quantile - QUANTILE_DOWN)

    def missed(self) -> None:
        """A preemption showed that predictions were too short."""
        self.quantile = min(QUANTILE_MAX, self.quantile + QUANTILE_UP)

    def remaining(
        self,
        produced: int,
        remaining_max: int,
        quantile: float | None = None,
        slo_class: str = "",
    ) -> int:
        """Predicted further tokens of a sequence that produced some: at least 1, at most the limit.

        With ``quantile`` 0.5 half of such sequences need no more than that.
        """
        share = self.quantile if quantile is None else quantile
        length = self.length(produced, share, slo_class)
        if length is None:
            return remaining_max
        return max(1, min(length - produced, remaining_max))

    def length(self, produced: int, quantile: float, slo_class: str = "") -> int | None:
        """Whole length that so many of the sequences longer than ``produced`` do not exceed.

        ``None`` where too few are known to say.
        """
        own = self._of_class.get(slo_class)
        length = None if own is None else own.length(produced, quantile)
        return self._all.length(produced, quantile) if length is None else length


class _History:
    """The last lengths of one kind, those that were cut by their limit among them.

    A cut sequence says only that it would have been longer. The share that outlives each length is
    therefore the Kaplan-Meier estimate: of those still running at a length, the share that ended
    there by themselves.
    """

    def __init__(self) -> None:
        # Twice the length, and one more for a cut one: one number is compared faster than two.
        self._window: deque[int] = deque(maxlen=KEPT)
        self._sorted: list[int] = []
        # Share of sequences beyond each of the sorted lengths, negative: so it can be searched.
        self._outlived: list[float] = []

    def observe(self, tokens: int, *, cut: bool) -> None:
        if len(self._window) == KEPT:
            del self._sorted[bisect_left(self._sorted, self._window[0])]
        self._window.append(2 * tokens + cut)
        insort(self._sorted, 2 * tokens + cut)
        self._outlived = []

    def length(self, produced: int, share: float) -> int | None:
        """Length that this share of the sequences longer than ``produced`` do not exceed.

        ``None`` where too few are known to say.
        """
        count = len(self._sorted)
        first = bisect_right(self._sorted, 2 * produced + 1)
        if count < HISTORY_MIN or count - first < TAIL_MIN:
            return None
        outlived = self._outlived or self._estimate()
        longer = outlived[first - 1] if first else -1.0
        place = bisect_left(outlived, (1.0 - share) * longer - ROUNDING, lo=first)
        return self._sorted[place] // 2 if place < count else None

    def _estimate(self) -> list[float]:
        ratios = _LEFT[KEPT - len(self._sorted) :]
        kept = [1.0 if length & 1 else r for length, r in zip(self._sorted, ratios, strict=True)]
        self._outlived = list(accumulate(kept, mul, initial=-1.0))[1:]
        return self._outlived


class Holding(NamedTuple):
    """One sequence's blocks, for looking ahead.

    Its cells after ``t`` further tokens are ``cells + t``; ``private`` blocks come back when it
    ends and ``blocks`` is the length of its whole table. While it is ``prefilling`` nobody knows
    when it begins to decode, so at any later time it may be there still, however short it is.
    """

    cells: int
    remaining: int
    private: int
    blocks: int
    prefilling: bool = False

    def after(self, tokens: int, block_size: int) -> "Holding":
        """The same sequence once it has produced that many more tokens, or all it will."""
        tokens = min(tokens, self.remaining)
        cells, remaining = self.cells + tokens, self.remaining - tokens
        grown = max(0, -(-cells // block_size) - self.blocks)
        return Holding(cells, remaining, self.private + grown, self.blocks + grown, self.prefilling)


def peak_blocks(holdings: Seq[Holding], shared: int, block_size: int) -> int:
    """Most blocks in use at once if each sequence decodes its remaining tokens, one per step.

    Use grows between endings, so it peaks at one of them: with the sequences sorted by remaining
    length, longest first, the i-th ending happens when the first i are all still there (the formula
    of LightLLM's router, in blocks). What is prefilling may lag behind by any number of steps:
    it counts at every ending, as long as it can be by then. ``shared`` blocks are counted as held
    throughout.
    """
    ordered = sorted(holdings, key=lambda holding: -holding.remaining)
    lagging = sum(h.after(h.remaining, block_size).private for h in ordered if h.prefilling)
    peak, held, snug = 0, 0, True
    filled: list[int] = []  # cells of each in its last block, less one; sorted
    for count, last in enumerate(ordered, 1):
        cells, steps, private, blocks, prefilling = last
        if prefilling:
            lagging -= last.after(steps, block_size).private
        full, rest = divmod(cells + block_size - 1, block_size)
        held += private + full - blocks
        insort(filled, rest)
        snug = snug and blocks <= (cells + block_size) // block_size
        if snug and steps:  # each grows by whole blocks of the steps, and one if it crosses another
            further, part = divmod(steps, block_size)
            crossing = count - bisect_left(filled, block_size - part)
            peak = max(peak, lagging + held + count * further + crossing)
        else:
            growths = (-(-(h.cells + steps) // block_size) - h.blocks for h in ordered[:count])
            grown = sum(growth for growth in growths if growth > 0)
            peak = max(peak, lagging + sum(h.private for h in ordered[:count]) + grown)
    return shared + peak


def later(holdings: Seq[Holding], steps: int, block_size: int) -> list[Holding]:
    """The sequences that may be left after that many steps."""
    left = [holding for holding in holdings if holding.remaining > steps or holding.prefilling]
    return [holding.after(steps, block_size) for holding in left]


def steps_until_fit(
    holdings: Seq[Holding], candidate: Holding, shared: int, block_size: int, blocks: int
) -> int:
    """Steps after which enough of ``holdings`` have ended for the candidate to fit."""

    def fits(steps: int) -> bool:
        left = later(holdings, steps, block_size)
        return peak_blocks([*left, candidate], shared, block_size) <= blocks

    endings = sorted({holding.remaining for holding in holdings})
    if not endings:
        return 0
    return endings[bisect_left(endings, x=True, hi=len(endings) - 1, key=fits)]
