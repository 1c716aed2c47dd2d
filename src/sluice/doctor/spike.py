"""Is there a spike? A percentile in two windows, with an interval from a block bootstrap.

Slow requests come in busy periods, so that neighbours tell the same: whole blocks of neighbours are
drawn, not single requests. Also splits the difference into what other requests would have made
(mix) and what the same requests suffer (slowdown).
"""

from dataclasses import dataclass

import numpy as np

from sluice.doctor.columns import Floats, Ints, Mask, Requests

METRICS = ("ttft", "tpot", "e2e")
DRAWS = 300
BLOCKS_MIN, BLOCK_MAX = 12, 2000
# What a difference must be to matter to anyone, as a share of what was before and in seconds.
CHANGE_SHARE_MIN = 0.10
CHANGE_S_MIN = {"ttft": 2e-3, "tpot": 2e-4, "e2e": 5e-3}
# Chance of a false alarm that each of the metrics may have.
ALARM = 0.01
_LEVEL_LATE = 0.95
_PLACES = 4000


@dataclass(frozen=True, slots=True)
class Spike:
    """A percentile before and in the incident; ``low_s`` and ``high_s`` bound the difference.

    ``mix_s`` of it comes with other lengths of prompts and answers, the rest is slowdown, as far as
    lengths were there before: ``new_share`` of the requests have others.
    ``before_s`` and ``after_s`` are ``None`` where too few were answered to tell; then ``why`` says
    so.
    """

    metric: str
    percentile: float
    before_s: float | None
    after_s: float | None
    low_s: float
    high_s: float
    confirmed: bool
    mix_s: float
    new_share: float
    requests: tuple[int, int]
    why: str

    @property
    def change_s(self) -> float:
        """By how much it moved."""
        return (self.after_s or 0.0) - (self.before_s or 0.0)


def latency_of(requests: Requests, metric: str) -> Floats:
    """Seconds of one metric by request; NaN where there is none."""
    if metric == "ttft":
        return requests["ttft_ns"] / 1e9
    if metric == "tpot":
        return requests["tpot_ns"] / 1e9
    lasted = (requests["ended_ns"] - requests["arrived_ns"]) / 1e9
    return np.where(requests["cancelled"] > 0, np.nan, lasted)


def spike_of(
    requests: Requests, masks: tuple[Mask, Mask], metric: str, percentile: float, seed: int
) -> Spike:
    """The spike of one metric. ``masks`` are the requests of baseline and incident."""
    latency_s = latency_of(requests, metric)
    rows = [np.flatnonzero(mask & ~np.isnan(latency_s)) for mask in masks]
    counts = len(rows[0]), len(rows[1])
    if min(counts) < 2:
        which = "the baseline" if counts[0] < counts[1] else "the window"
        why = f"{which} has {min(counts)} requests with this metric: too few to compare"
        return _unknown(metric, percentile, counts, why)
    before, after = (latency_s[each] for each in rows)
    level = percentile / 100
    before_s, after_s = float(np.quantile(before, level)), float(np.quantile(after, level))
    draw = np.random.default_rng(seed)
    drawn = quantiles_drawn(after, level, draw) - quantiles_drawn(before, level, draw)
    low_s, high_s = (float(value) for value in np.quantile(drawn, (ALARM, 1 - ALARM)))
    matters = after_s - before_s > max(CHANGE_SHARE_MIN * before_s, CHANGE_S_MIN[metric])
    late = _late_more_often(before, after, draw)
    confirmed = bool(matters and low_s > 0 and late and min(counts) >= 2 * BLOCKS_MIN)
    why = _why(counts, matters, low_s > 0 and late)
    mixed_s, new_share = _mixed(requests, (rows[0], rows[1]), latency_s, level)
    return Spike(
        metric, percentile, before_s, after_s, low_s, high_s, confirmed, mixed_s - before_s,
        new_share, counts, why,
    )  # fmt: skip


def _unknown(metric: str, percentile: float, counts: tuple[int, int], why: str) -> Spike:
    return Spike(
        metric,
        percentile,
        before_s=None,
        after_s=None,
        low_s=0.0,
        high_s=0.0,
        confirmed=False,
        mix_s=0.0,
        new_share=0.0,
        requests=counts,
        why=why,
    )


def quantiles_drawn(values: Floats, level: float, draw: np.random.Generator) -> Floats:
    """A quantile in bootstrap samples made of whole blocks of neighbours."""
    return np.array([np.quantile(values[rows], level) for rows in blocks_drawn(len(values), draw)])


def blocks_drawn(count: int, draw: np.random.Generator, draws: int = DRAWS) -> list[Ints]:
    """Rows of so many bootstrap samples of ``count`` rows in order."""
    length = block_length(count)
    blocks = -(-count // length)
    offsets = np.arange(length)
    found = []
    # Of many rows a part tells as much: its blocks are as long, and fewer.
    if count > 4 * _PLACES:
        blocks = max(BLOCKS_MIN, 4 * _PLACES // length)
    for _ in range(draws):
        starts = draw.integers(0, count, blocks)
        rows = (starts[:, None] + offsets).ravel() % count
        found.append(rows[: min(count, blocks * length)])
    return found


def block_length(count: int) -> int:
    """Longer than most busy periods, short enough that there are blocks to draw from."""
    return max(1, min(BLOCK_MAX, count // BLOCKS_MIN))


def _late_more_often(before: Floats, after: Floats, draw: np.random.Generator) -> bool:
    """Whether more of the requests are above what one in twenty exceeded before.

    A percentile of a few hundred requests hangs on a handful; this looks at many more of them.
    """
    bar = np.quantile(before, _LEVEL_LATE)
    late = after > bar
    shares = np.array([late[rows].mean() for rows in blocks_drawn(len(after), draw)])
    usual = np.array([(before > bar)[rows].mean() for rows in blocks_drawn(len(before), draw)])
    return bool(np.quantile(shares - usual, ALARM) > 0.0)


def _why(counts: tuple[int, int], matters: bool, reliable: bool) -> str:  # noqa: FBT001
    if min(counts) < 2 * BLOCKS_MIN:
        return f"only {min(counts)} requests in one of the windows: too few to be sure"
    if not matters:
        return "the difference is too small to matter"
    return "" if reliable else "the difference could be chance: its interval reaches zero"


def _mixed(
    requests: Requests, rows: tuple[Ints, Ints], latency_s: Floats, level: float
) -> tuple[float, float]:
    """The percentile that the baseline would have had with the requests of the incident.

    Requests of the baseline weigh as much as their kind is frequent in the incident; kinds are
    lengths of prompt and answer, in powers of two, and the model. A kind that was not there before
    has no say; also returns what share of the incident's requests that is.
    """
    kinds = _kinds(requests)
    before, after = kinds[rows[0]], kinds[rows[1]]
    names, place = np.unique(before, return_inverse=True)
    there = np.bincount(place, minlength=len(names))
    wanted = np.array([np.count_nonzero(after == name) for name in names], dtype=float)
    new_share = 1.0 - float(wanted.sum()) / len(after)
    if wanted.sum() == 0:
        return float(np.quantile(latency_s[rows[0]], level)), new_share
    # Strata of a few requests would let one of them decide.
    ratio = np.minimum(wanted / there / (wanted.sum() / there.sum()), 10.0)
    return _weighted_quantile(latency_s[rows[0]], ratio[place], level), new_share


def _kinds(requests: Requests) -> Ints:
    prompt = np.floor(np.log2(np.maximum(1.0, np.nan_to_num(requests["prompt"]))))
    output = np.floor(np.log2(np.maximum(1.0, np.nan_to_num(requests["completion"]))) / 2)
    return ((requests.names["model"] * 64 + prompt) * 64 + output).astype(np.int64)


def _weighted_quantile(values: Floats, weights: Floats, level: float) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    at = int(np.searchsorted(sums, level * sums[-1]))
    return float(values[order[min(at, len(values) - 1)]])
