"""Filtering and drawing from scaled logits: min-p, top-k, top-p, inverse of the distribution.

Decided here: how the filters are computed without sorting or looping over the vocabulary. Called by
``sampling`` only. What precedes (temperature, penalties) and the source of random numbers must not
live here.

Two observations make it fast. The k-th greatest of the maxima of blocks of tokens is a lower bound
of the k-th greatest token, because k blocks hold at least k tokens that reach it; so one pass of
block maxima leaves few candidates. And candidates that hold the share p of the mass contain every
token of the top-p set if they are the greatest ones.

All functions take rows whose greatest value is 0, and a row's result depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice.core.sampling import Sampling

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]

_BLOCK = 64  # tokens per block: 768 blocks for 49,152 tokens, both small enough to sum in one pass
_TOP_P_CANDIDATES = 128  # blocks asked for before top-p; enough for nearly all rows of real text


def draw_unfiltered(scaled: Floats, uniforms: Doubles) -> Tokens:
    """Draw one token per row from softmax of the row, tokens in order of id.

    ``scaled`` is rows by vocabulary; it is overwritten. ``uniforms`` has a number in [0, 1) per
    row.
    """
    weights = np.exp(scaled, out=scaled)
    sums = np.einsum("rbt->rb", _blocks(weights, 0.0)).astype(np.float64)
    cumulative = sums.cumsum(axis=1)
    targets = uniforms * cumulative[:, -1]
    block = _first_above(cumulative, targets)
    rows = np.arange(len(targets))
    rest = targets - (cumulative[rows, block] - sums[rows, block])
    columns = block[:, None] * _BLOCK + np.arange(_BLOCK)
    within = weights[rows[:, None], np.minimum(columns, weights.shape[1] - 1)].astype(np.float64)
    within[columns >= weights.shape[1]] = 0.0
    return block * _BLOCK + _first_above(within.cumsum(axis=1), rest)


def draw_filtered(scaled: Floats, uniforms: Doubles, filters: Sequence[Sampling]) -> Tokens:
    """Draw one token per row after min-p, top-k and top-p, in this order.

    Top-p takes the smallest set of best tokens that holds at least the share ``top_p`` of what the
    other filters left. ``filters`` has one entry per row, each with at least one filter on.
    """
    limits = _Limits.of(filters, scaled.shape[1])
    thresholds = _candidate_thresholds(scaled, limits)
    candidates = _Candidates.gather(scaled, thresholds)
    masses = _row_masses(scaled, limits.nucleus_only)
    # With top-k or min-p on, top-p counts what those left, and all of that is among the candidates.
    short = limits.nucleus_only & ~candidates.hold(limits.top_p * masses)
    if short.any():
        thresholds[short] = _safe_thresholds(masses[short], limits.top_p[short], scaled.shape[1])
        candidates = _Candidates.gather(scaled, thresholds)
    values = candidates.values
    _keep_top_k(values, limits.top_k)
    weights = np.exp(values).astype(np.float64)
    totals = np.where(limits.nucleus_only, masses, weights.sum(axis=1))
    _keep_top_p(values, weights, limits.top_p * totals)
    cumulative = weights.cumsum(axis=1)
    places = _first_above(cumulative, uniforms * cumulative[:, -1])
    return candidates.tokens[np.arange(len(places)), places]


def best_tokens(row: Floats, count: int) -> Tokens:
    """Return the ids of the ``count`` greatest values of one row, best first, ties by lower id."""
    maxima = np.sort(_stripes(row[None], -np.inf).max(axis=1)[0])[::-1]
    least = maxima[count - 1] if count <= maxima.size else -np.inf
    tokens = np.flatnonzero(row >= least)
    order: Tokens = np.argsort(-row[tokens], kind="stable")[:count]
    return tokens[order]


@dataclass(frozen=True, slots=True)
class _Limits:
    """The filters of all rows as columns.

    ``least`` is the least scaled logit that min-p allows. ``nucleus_only`` marks rows that have
    top-p alone.
    """

    top_k: Tokens
    top_p: Doubles
    least: Floats
    nucleus_only: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, filters: Sequence[Sampling], vocab_size: int) -> "_Limits":
        with np.errstate(divide="ignore"):
            least = np.log(np.array([f.min_p for f in filters], np.float64)).astype(np.float32)
        top_k = np.array([min(f.top_k or vocab_size, vocab_size) for f in filters], np.int64)
        top_p = np.array([f.top_p for f in filters], np.float64)
        return cls(top_k, top_p, least, (top_k == vocab_size) & np.isneginf(least))


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens that may survive: per row in order of id, padded with value -inf to equal width."""

    tokens: Tokens
    values: Floats

    @classmethod
    def gather(cls, scaled: Floats, thresholds: Floats) -> "_Candidates":
        rows_total, vocab_size = scaled.shape
        flat = np.flatnonzero(scaled >= thresholds[:, None])
        rows, columns = np.divmod(flat, vocab_size)
        counts = np.bincount(rows, minlength=rows_total)
        width = max(int(counts.max()), 1)
        starts = counts.cumsum() - counts
        places = np.arange(flat.size) - starts[rows]
        tokens = np.zeros((rows_total, width), np.int64)
        values = np.full((rows_total, width), -np.inf, np.float32)
        tokens[rows, places] = columns
        values[rows, places] = scaled.reshape(-1)[flat]
        return cls(tokens, values)

    def hold(self, masses: Doubles) -> npt.NDArray[np.bool_]:
        """Tell per row whether the candidates weigh more than the mass, clear of rounding."""
        held = np.exp(self.values).sum(axis=1, dtype=np.float64)
        enough: npt.NDArray[np.bool_] = held > masses * (1 + 1e-5)
        return enough


def _candidate_thresholds(scaled: Floats, limits: _Limits) -> Floats:
    """Return per row a value that every survivor reaches; for top-p alone, that most likely do."""
    maxima = np.sort(_stripes(scaled, -np.inf).max(axis=1), axis=1)[:, ::-1]
    rows_total, blocks_total = maxima.shape
    wanted = np.where(limits.nucleus_only, _TOP_P_CANDIDATES, limits.top_k)
    reach = np.minimum(wanted, blocks_total) - 1
    bounds = np.where(wanted <= blocks_total, maxima[np.arange(rows_total), reach], -np.inf)
    thresholds: Floats = np.maximum(bounds, limits.least).astype(np.float32)
    return thresholds


def _row_masses(scaled: Floats, wanted: npt.NDArray[np.bool_]) -> Doubles:
    """Return the sum of the weights of all tokens for the rows wanted, 0 for the others."""
    masses = np.zeros(len(wanted))
    if wanted.any():
        weights = np.exp(scaled if wanted.all() else scaled[wanted])
        # Sums of 64 numbers in float32, which is fast, and of those in float64.
        masses[wanted] = _stripes(weights, 0.0).sum(axis=1).sum(axis=1, dtype=np.float64)
    return masses


def _safe_thresholds(masses: Doubles, top_p: Doubles, vocab_size: int) -> Floats:
    """Return values under which no token is in the top-p set.

    Tokens lighter than (1 - p) * mass / vocabulary weigh less than (1 - p) * mass together, so the
    set is complete without them. The bound is halved to stay clear of rounding.
    """
    with np.errstate(divide="ignore"):
        safe: Floats = np.log(0.5 * (1 - top_p) * masses / vocab_size).astype(np.float32)
    return safe


def _keep_top_k(values: Floats, top_k: Tokens) -> None:
    """Set all but the k best of each row to -inf, in place."""
    width = values.shape[1]
    if (top_k >= width).all():
        return
    ordered = np.sort(values, axis=1)[:, ::-1]
    kth = ordered[np.arange(len(top_k)), np.minimum(top_k, width) - 1]
    values[values < kth[:, None]] = -np.inf
    _drop_late_ties(values, kth, top_k)


def _keep_top_p(values: Floats, weights: Doubles, targets: Doubles) -> None:
    """Zero the weights outside the smallest set of best tokens that reaches the target mass."""
    ordered = np.sort(values, axis=1)[:, ::-1]
    cumulative = np.exp(ordered).astype(np.float64).cumsum(axis=1)
    short = (cumulative < targets[:, None]).sum(axis=1)
    needed = np.minimum(short + 1, values.shape[1])
    last = ordered[np.arange(len(needed)), needed - 1]
    values[values < last[:, None]] = -np.inf
    _drop_late_ties(values, last, needed)
    weights[np.isneginf(values)] = 0.0


def _drop_late_ties(values: Floats, last: Floats, kept: Tokens) -> None:
    """Of tokens tied at the last kept value, drop those with the higher ids, in place."""
    reached = (values >= last[:, None]).sum(axis=1)
    for row in np.flatnonzero((reached > kept) & ~np.isneginf(last)):
        tied = np.flatnonzero(values[row] == last[row])
        values[row, tied[len(tied) - (reached[row] - kept[row]) :]] = -np.inf


def _blocks(rows: Floats, padding: float) -> Floats:
    """View rows as blocks of neighbouring tokens: rows, blocks, tokens of the block."""
    return _padded(rows, padding).reshape(rows.shape[0], -1, _BLOCK)


def _stripes(rows: Floats, padding: float) -> Floats:
    """View rows as blocks of tokens that lie apart: rows, tokens of the block, blocks.

    Reducing over the middle axis runs along memory, several times as fast as over ``_blocks``.
    """
    return _padded(rows, padding).reshape(rows.shape[0], _BLOCK, -1)


def _padded(rows: Floats, padding: float) -> Floats:
    missing = -rows.shape[1] % _BLOCK
    if missing:
        rows = np.pad(rows, ((0, 0), (0, missing)), constant_values=padding)
    return rows


def _first_above(cumulative: Doubles, targets: Doubles) -> Tokens:
    """Return per row the first place whose cumulative weight exceeds the target.

    Rounding can put the target at or beyond the end; then the last place that adds weight is taken.
    """
    places = (cumulative <= targets[:, None]).sum(axis=1)
    last = (cumulative < cumulative[:, -1:]).sum(axis=1)
    first: Tokens = np.minimum(places, last)
    return first
