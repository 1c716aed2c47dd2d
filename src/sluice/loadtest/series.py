"""Statistics of a series in time whose neighbours depend on each other.

Requests that miss a limit come together, in the same busy period; to count them as independent is
to believe a trial far too much. Pure functions of numbers, for ``sample.py`` and ``drift.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

# Newey and West's window as a part of the series, and the critical values that belong to it: with
# a window of a fixed part, the error of the slope is itself uncertain (Kiefer and Vogelsang 2005,
# Bartlett kernel, one-sided).
WINDOW = 0.2
CRITICAL_95 = 1.6449 + 2.1859 * WINDOW + 0.3142 * WINDOW**2 - 0.3427 * WINDOW**3
CRITICAL_99 = 2.3263 + 4.1618 * WINDOW + 0.5368 * WINDOW**2 - 0.9060 * WINDOW**3
# Batches of five for the truncation of a transient.
MSER_BATCH = 5


@dataclass(frozen=True, slots=True)
class Slope:
    """A trend per second with its standard error, which ``CRITICAL_95`` and ``CRITICAL_99`` belong
    to."""

    estimate: float
    error: float


def level(
    starts_s: Series, ends_s: Series, times_s: Series, weights: Series | None = None
) -> Series:
    """How much is under way at each time: what has started and not ended, by weight."""
    if weights is None:
        weights = np.ones_like(starts_s)
    come = np.concatenate(([0.0], np.cumsum(weights[np.argsort(starts_s)])))
    gone = np.concatenate(([0.0], np.cumsum(weights[np.argsort(ends_s)])))
    started = np.searchsorted(np.sort(starts_s), times_s, side="right")
    ended = np.searchsorted(np.sort(ends_s), times_s, side="right")
    return np.asarray(come[started] - gone[ended], dtype=np.float64)


def memory_steps(series: Series) -> float:
    """The sum of autocorrelations on both sides, in steps: that many neighbours say as much as one
    independent value. Cut where two neighbouring correlations first sum to less than 0 (Geyer's
    initial positive sequence)."""
    values = series - series.mean()
    variance = float(values @ values)
    if variance <= 0.0:
        return 1.0
    padded = np.fft.rfft(values, 2 * len(values))
    correlation = np.fft.irfft(padded * padded.conjugate())[: len(values)] / variance
    total = -1.0
    for at in range(0, len(values) - 1, 2):
        pair = float(correlation[at] + correlation[at + 1])
        if pair <= 0.0:
            break
        total += 2.0 * pair
    return max(1.0, total)


def slope_of(series: Series, step_s: float) -> Slope:
    """The trend of the series, by least squares with errors that autocorrelation does not
    deceive."""
    count = len(series)
    times = (np.arange(count) - (count - 1) / 2.0) * step_s
    spread = float(times @ times)
    estimate = float(times @ series) / spread
    scores = times * (series - series.mean() - estimate * times)
    window = max(1, int(WINDOW * count))
    variance = float(scores @ scores)
    for lag in range(1, window):
        variance += 2.0 * (1.0 - lag / window) * float(scores[lag:] @ scores[:-lag])
    return Slope(estimate, sqrt(max(0.0, variance)) / spread)


def settled_from(series: Series) -> int:
    """Where a transient at the start is over: the cut that leaves the mean of the rest with the
    least standard error (MSER-5, White 1997), within the first half."""
    batches = series[: len(series) // MSER_BATCH * MSER_BATCH].reshape(-1, MSER_BATCH).mean(axis=1)
    if len(batches) < 2:
        return 0
    errors = [
        float(batches[cut:].var()) / (len(batches) - cut) for cut in range(len(batches) // 2 + 1)
    ]
    return int(np.argmin(errors)) * MSER_BATCH


def mean_with_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of batch means."""
    found = np.asarray(values, dtype=np.float64)
    if len(found) < 2:
        return float(found.mean()) if len(found) else 0.0, float("inf")
    return float(found.mean()), float(found.std(ddof=1)) / sqrt(len(found))
