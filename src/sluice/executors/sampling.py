"""Choosing tokens from logits, for all sampling rows of a step at once.

Decided here: the order of the steps between logits and token, how ties break, and where a
sequence's random numbers come from. An executor that computes logits calls ``choose_tokens``; text,
grammars (beyond applying the mask they give) and stop conditions must not live here.

Order per row: log-probabilities are read from the untouched logits; then mask, bias, repetition,
presence and frequency penalties; then, unless greedy, temperature, min-p, top-k, top-p, draw.
Tokens rank by (logit, lower id first), so that exactly k tokens survive top-k and greedy ties go to
the lower id.

A sequence's n-th token uses the n-th number of a stream keyed by its seed and choice, so that batch
mates, preemption and the order of steps cannot change what it draws.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.core.sampling import SampledLogprobs, Sampling, TokenLogprob
from sluice.executors.base import TokenMask
from sluice.executors.nucleus import best_tokens, draw_filtered, draw_unfiltered

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

LOGPROBS_TOP_MAX = 20

# Constants of the splitmix64 generator: Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", 2014.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class NoTokenLeft(Exception):
    """A row has no token that may be chosen: its mask allows none, or its logits are not numbers.

    ``row`` is the index of the first such row.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} has no token that may be chosen")
        self.row = row


@dataclass(slots=True)
class SequenceSampling:
    """How one sequence is sampled, and what it has sampled; owned by the executor.

    Build it with ``open_sampling``. ``key`` selects the stream of random numbers and ``drawn`` the
    place in it. ``counts`` holds how often each token was generated, and ``seen`` the tokens of
    prompt and output; both are kept only where a penalty needs them.
    """

    sampling: Sampling
    key: int
    plain_greedy: bool
    mask: TokenMask | None = None
    bias_tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    bias_values: Logits = field(default_factory=lambda: np.empty(0, np.float32))
    counts: dict[int, int] | None = None
    seen: set[int] | None = None
    drawn: int = 0

    @property
    def adjusted(self) -> bool:
        """Whether the logits change before a token is chosen."""
        return (
            self.mask is not None
            or self.bias_tokens.size > 0
            or self.counts is not None
            or self.seen is not None
        )

    def record(self, token: int) -> None:
        """Note that the token was generated."""
        self.drawn += 1
        if self.counts is not None:
            self.counts[token] = self.counts.get(token, 0) + 1
        if self.seen is not None:
            self.seen.add(token)


def open_sampling(
    sampling: Sampling,
    prompt: Sequence[int],
    choice: int,
    vocab_size: int,
    mask: TokenMask | None = None,
) -> SequenceSampling:
    """Check parameters and set up the state of one sequence.

    Raises ``ValueError`` naming the parameter, its value and its range.
    """
    _check(sampling, vocab_size)
    bias = sampling.logit_bias
    state = SequenceSampling(
        sampling=sampling,
        key=_stream_key(sampling.seed, choice),
        plain_greedy=False,
        mask=mask,
        bias_tokens=np.fromiter(bias.keys(), np.int64, len(bias)),
        bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
        counts={} if sampling.presence_penalty or sampling.frequency_penalty else None,
        seen=set(prompt) if sampling.repetition_penalty != 1.0 else None,
    )
    state.plain_greedy = (
        sampling.temperature == 0 and sampling.logprobs_top is None and not state.adjusted
    )
    return state


def choose_tokens(
    logits: Logits, states: Sequence[SequenceSampling]
) -> tuple[Tokens, dict[int, SampledLogprobs]]:
    """Choose one token for each row of ``logits`` (rows by vocabulary) and record it in its state.

    Returns the tokens and, by row, the log-probabilities that were asked for: of the distribution
    that the model gave, before mask, bias, penalties, temperature and filters. Overwrites rows of
    ``logits``. Raises ``NoTokenLeft``, and then no state has changed.
    """
    if all(state.plain_greedy for state in states):
        tokens = logits.argmax(axis=1)
        logprobs: dict[int, SampledLogprobs] = {}
    else:
        asking = [i for i, state in enumerate(states) if state.sampling.logprobs_top is not None]
        pending = _read_logprobs(logits, asking, states) if asking else None
        _adjust(logits, states)
        tokens = _pick(logits, states)
        logprobs = {} if pending is None else pending.complete(tokens)
    chosen = logits[np.arange(len(states)), tokens]
    if not np.isfinite(chosen).all():
        raise NoTokenLeft(int(np.flatnonzero(~np.isfinite(chosen))[0]))
    for state, token in zip(states, tokens.tolist(), strict=True):
        state.record(token)
    return tokens, logprobs


def _check(sampling: Sampling, vocab_size: int) -> None:
    ranges = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf),
        ("logprobs_top", sampling.logprobs_top or 0, 0, LOGPROBS_TOP_MAX),
    )
    for name, value, low, high in ranges:
        if not (low <= value <= high) or math.isinf(value):
            raise ValueError(f"{name} is {value}; it must be a number from {low:g} to {high:g}")
    for name, value, high in (
        ("top_p", sampling.top_p, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, math.inf),
    ):
        if not (0 < value <= high) or math.isinf(value):
            raise ValueError(f"{name} is {value}; it must be above 0 and at most {high:g}")
    for token, value in sampling.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"logit_bias names token {token}; the vocabulary has tokens 0 to {vocab_size - 1}"
            )
        if not math.isfinite(value):
            raise ValueError(f"logit_bias of token {token} is {value}; it must be a finite number")


# ------------------------------------------------------------------------------- random numbers


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _stream_key(seed: int | None, choice: int) -> int:
    """Return a 64-bit key; a seed of any size and sign counts modulo 2**64."""
    start = secrets.randbits(64) if seed is None else seed % 2**64
    mixed = _mix(_mix(np.array([start], np.uint64)) + np.array([choice], np.uint64) * _GAMMA)
    return int(mixed[0])


def _uniforms(states: Sequence[SequenceSampling]) -> npt.NDArray[np.float64]:
    """Return each state's next number in [0, 1), 53 bits each."""
    keys = np.array([state.key for state in states], np.uint64)
    places = np.array([state.drawn + 1 for state in states], np.uint64)
    mixed = _mix(keys + places * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


# ------------------------------------------------------------------------------------ adjusting


def _adjust(logits: Logits, states: Sequence[SequenceSampling]) -> None:
    """Apply masks, biases and penalties in place."""
    _apply_masks(logits, states)
    for row, state in enumerate(states):
        if state.bias_tokens.size:
            logits[row, state.bias_tokens] += state.bias_values
        if state.seen:
            _apply_repetition(logits[row], state.seen, state.sampling.repetition_penalty)
        if state.counts:
            tokens = np.fromiter(state.counts.keys(), np.int64, len(state.counts))
            counts = np.fromiter(state.counts.values(), np.float32, len(state.counts))
            logits[row, tokens] -= (
                counts * np.float32(state.sampling.frequency_penalty)
                + np.float32(state.sampling.presence_penalty)
            )  # fmt: skip


def _apply_repetition(row: Logits, seen: set[int], penalty: float) -> None:
    """Divide positive logits of seen tokens by the penalty and multiply negative ones."""
    tokens = np.fromiter(seen, np.int64, len(seen))
    values = row[tokens]
    factor = np.float32(penalty)
    row[tokens] = np.where(values > 0, values / factor, values * factor)


def _apply_masks(logits: Logits, states: Sequence[SequenceSampling]) -> None:
    rows = [i for i, state in enumerate(states) if state.mask is not None]
    if not rows:
        return
    vocab_size = logits.shape[1]
    words = np.zeros((len(rows), -(-vocab_size // 32)), np.dtype("<u4"))
    for place, row in enumerate(rows):
        mask = states[row].mask
        assert mask is not None
        mask.fill(words[place].data)
    allowed = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    for place, row in enumerate(rows):
        logits[row][allowed[place] == 0] = -np.inf


# -------------------------------------------------------------------------------------- picking


def _pick(logits: Logits, states: Sequence[SequenceSampling]) -> Tokens:
    """Return a token per row: greedy rows by argmax, the others by filter and draw."""
    tokens = np.empty(len(states), np.int64)
    greedy, unfiltered, filtered = _by_way(states)
    if greedy:
        tokens[greedy] = logits[greedy].argmax(axis=1)
    if unfiltered:
        scaled = _scaled(logits, unfiltered, states)
        uniforms = _uniforms([states[row] for row in unfiltered])
        tokens[unfiltered] = draw_unfiltered(scaled, uniforms)
    if filtered:
        scaled = _scaled(logits, filtered, states)
        uniforms = _uniforms([states[row] for row in filtered])
        filters = [states[row].sampling for row in filtered]
        tokens[filtered] = draw_filtered(scaled, uniforms, filters)
    return tokens


def _by_way(states: Sequence[SequenceSampling]) -> tuple[list[int], list[int], list[int]]:
    """Split row numbers into greedy, drawn from all tokens, and drawn after filters."""
    greedy: list[int] = []
    unfiltered: list[int] = []
    filtered: list[int] = []
    for row, state in enumerate(states):
        chosen_by = state.sampling
        if chosen_by.temperature == 0:
            greedy.append(row)
        elif chosen_by.top_k == 0 and chosen_by.top_p >= 1.0 and chosen_by.min_p == 0.0:
            unfiltered.append(row)
        else:
            filtered.append(row)
    return greedy, unfiltered, filtered


def _scaled(logits: Logits, rows: list[int], states: Sequence[SequenceSampling]) -> Logits:
    """Return the rows' logits over temperature, shifted so that each row's greatest is 0.

    Overwrites ``logits`` where all its rows are wanted: a copy of that size costs more than the
    arithmetic. Shifting first keeps a very small temperature from overflowing. Rows without a
    finite logit, or with one that is not a number, raise ``NoTokenLeft``.
    """
    picked: Any = logits if len(rows) == logits.shape[0] else logits[rows]
    temperatures = np.array([states[row].sampling.temperature for row in rows], np.float32)
    greatest = picked.max(axis=1, keepdims=True)
    if not np.isfinite(greatest).all():
        raise NoTokenLeft(rows[int(np.flatnonzero(~np.isfinite(greatest))[0])])
    with np.errstate(over="ignore"):
        scaled: Logits = np.subtract(picked, greatest, out=picked)
        if (temperatures != 1).any():
            scaled /= np.maximum(temperatures, np.finfo(np.float32).tiny)[:, None]
    return scaled


# ---------------------------------------------------------------------------- log-probabilities


@dataclass(frozen=True, slots=True)
class _PendingLogprobs:
    """Log-probabilities read before the logits were adjusted; complete once tokens are known."""

    rows: list[int]
    logprobs: Logits
    top: list[tuple[TokenLogprob, ...]]

    def complete(self, tokens: Tokens) -> dict[int, SampledLogprobs]:
        """Return the entries by row."""
        answers: dict[int, SampledLogprobs] = {}
        for place, row in enumerate(self.rows):
            token = int(tokens[row])
            sampled = TokenLogprob(token, float(self.logprobs[place, token]))
            answers[row] = SampledLogprobs(sampled, self.top[place])
        return answers


def _read_logprobs(
    logits: Logits, rows: list[int], states: Sequence[SequenceSampling]
) -> _PendingLogprobs:
    picked = logits[rows]
    picked -= picked.max(axis=1, keepdims=True)
    sums = np.exp(picked).sum(axis=1, dtype=np.float64, keepdims=True)
    picked -= np.log(sums).astype(np.float32)
    counts = [states[row].sampling.logprobs_top or 0 for row in rows]
    tops = [_best(picked[place], count) for place, count in enumerate(counts)]
    return _PendingLogprobs(rows, picked, tops)


def _best(logprobs: Logits, count: int) -> tuple[TokenLogprob, ...]:
    """Return the most likely tokens, best first, ties by lower id."""
    if count == 0:
        return ()
    tokens = best_tokens(logprobs, min(count, logprobs.size)).tolist()
    return tuple(TokenLogprob(token, float(logprobs[token])) for token in tokens)
