"""Timing and dose: whether a mechanism moved when the latency did, and where more of it is worse.

Called by ``diagnosis`` for causes whose check gives a number for each request. What is found speaks
for or against a cause; shares and verdicts rest on replays.
"""

import numpy as np

from sluice.doctor.columns import Floats
from sluice.doctor.scene import Scene

_SLICES = 12
_REQUESTS_MIN = 5 * _SLICES
_DOSE_MIN = 0.3
_LATE_SHARE = 0.2


def course_of(scene: Scene, series: Floats) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for and against a cause with this number for each request."""
    known = ~np.isnan(series) & ~np.isnan(scene.latency_s)
    rows = scene.after[known[scene.after]]
    before = series[scene.before[known[scene.before]]]
    if len(rows) < _REQUESTS_MIN or not len(before):
        return (), ()
    against: tuple[str, ...] = ()
    moved = series[rows].mean() - before.mean()
    first = series[rows[: len(rows) // 3]].mean() - before.mean()
    if moved > 0 and first < _LATE_SHARE * moved:
        against = ("it moved later than the latency did",)
    parts = np.array_split(rows, _SLICES)
    dose = _rank_correlation(
        np.array([series[part].mean() for part in parts]),
        np.array([np.quantile(scene.latency_s[part], 0.9) for part in parts]),
    )
    if dose >= _DOSE_MIN:
        words = f"slices of the window with more of it are slower (rank correlation {dose:.1f})"
        return (words,), against
    return (), against


def _rank_correlation(one: Floats, other: Floats) -> float:
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
