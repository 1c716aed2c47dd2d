"""Do some requests have far longer prompts than before, or do all prompts grow?

Other work that comes beside the usual, or in place of some of it, leaves a part of the prompts as
they were. A longer template or default context leaves none. So a length is looked for above which
there are more prompts than before, and below which nothing changed.
"""

import numpy as np

from sluice.doctor.columns import Floats, Mask

# So few beyond all that was there before are told apart even where the others changed too.
_FEW = 0.25
# How many times as many must be above as before, what share of all more, and how many standard
# deviations that is.
_ABOVE_TIMES, _ABOVE_SHARE, _DEVIATIONS = 1.5, 0.02, 3.0
# Lengths of the baseline, as shares of it, above which there may be more.
_LEVELS = (0.95, 0.9, 0.75)
_BELOW_MIN = 20
# Distance of two distributions (Kolmogorov and Smirnov) that chance makes in one of a hundred,
# times the root of what the counts give; slack for neighbours that are alike.
_DISTANCE, _SLACK = 1.63, 0.05


def bar_of(before: Floats, after: Floats) -> float:
    """The tokens above which prompts are others than before; infinite where there are none."""
    before, after = before[before > 0], after[after > 0]
    if not len(before) or not len(after):
        return np.inf
    far = max(1.3 * float(before.max()), 2.5 * float(np.quantile(before, 0.95)))
    share = float(np.mean(after > far))
    if 0.0 < share <= _FEW:
        return far
    shifted = _shifted(before, after)
    for bar in (far, *np.quantile(before, _LEVELS)):
        below = before[before <= bar], after[after <= bar]
        if not _more(before > bar, after > bar) or not _alike(*below):
            continue
        if _distance(*below) * len(below[1]) / len(after) < shifted:  # all that grew fits worse
            return float(bar)
    return np.inf


def _more(before: Mask, after: Mask) -> bool:
    """Whether the share of the chosen grew, by enough to matter and by more than chance makes."""
    was, now = float(before.mean()), float(after.mean())
    both = (before.sum() + after.sum()) / (len(before) + len(after))
    chance = np.sqrt(both * (1 - both) * (1 / len(before) + 1 / len(after)))
    return now >= _ABOVE_TIMES * was and now - was >= max(_ABOVE_SHARE, _DEVIATIONS * chance)


def _alike(before: Floats, after: Floats) -> bool:
    """Whether two samples differ by no more than chance explains."""
    counts = len(before), len(after)
    if min(counts) < _BELOW_MIN:
        return False
    chance = _DISTANCE * np.sqrt(sum(counts) / (counts[0] * counts[1]))
    return bool(_distance(before, after) <= chance + _SLACK)


def _shifted(before: Floats, after: Floats) -> float:
    """How far all prompts before, each longer by as much or by the same share, are from those
    after."""
    levels = (0.25, 0.5)
    was, now = np.quantile(before, levels), np.quantile(after, levels)
    return min(
        _distance(grown, after)
        for each, other in zip(was, now, strict=True)
        for grown in (before * (other / each), before + (other - each))
    )


def _distance(one: Floats, other: Floats) -> float:
    """The largest difference of two distributions."""
    points = np.concatenate((one, other))
    shares = [
        np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (one, other)
    ]
    return float(np.abs(shares[0] - shares[1]).max())
