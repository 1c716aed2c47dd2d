"""What the classifier sees of a prompt: hashed word and character n-grams, and its shape.

Training and serving call the same functions, so that a weight means the same in both. Text is
capped at its head and tail: the cost of a decision has a bound, and padding in the middle changes
nothing. Hashes are arithmetic on integers of fixed width, the same on every platform. Weights and
outcomes are not known here.
"""

from dataclasses import dataclass
from math import log, log1p

import numpy as np
from numpy.typing import NDArray

HEAD_CHARS, TAIL_CHARS = 2000, 2000
# A character takes at most four bytes, and lower case may be longer than upper case.
BYTES_MAX = 4 * (HEAD_CHARS + TAIL_CHARS)
# n-grams of characters, then of words; each kind has buckets of its own.
CHAR_SIZES = (3, 4, 5)
WORD_SIZES = (1, 2)
FAMILIES = len(CHAR_SIZES) + len(WORD_SIZES)
# Length acts differently on short and on long prompts, so its slope may change at these lengths.
BENDS_CHARS = (100, 300, 1000)
SHAPE_NAMES = (
    "characters",
    *(f"beyond_{bend}_characters" for bend in BENDS_CHARS),
    "words",
    "lines",
    "word_length",
    "digits",
    "symbols",
    "not_ascii",
    "question_marks",
    "braces",
)

Hashes = NDArray[np.uint32]
Shape = NDArray[np.float32]

_STEP = np.uint32(0x01000193)
_SPREAD = np.uint32(0x9E3779B1)
_ODD = 0x9E3779B97F4A7C15
_PAIR = np.uint64(0xD6E8FEB86659FD93)
_WORD_BYTE = np.zeros(256, dtype=bool)
_WORD_BYTE[[*range(0x30, 0x3A), *range(0x61, 0x7B), *range(0x80, 0x100)]] = True


def _powers(base: int) -> NDArray[np.uint64]:
    """``base`` to the power of each place, modulo 2**64."""
    found = np.full(BYTES_MAX, base, dtype=np.uint64)
    found[0] = 1
    return np.multiply.accumulate(found, dtype=np.uint64)


_UP = _powers(_ODD)
_DOWN = _powers(pow(_ODD, -1, 2**64))


@dataclass(frozen=True, slots=True)
class Seen:
    """Features of one prompt: 32-bit hashes of each kind of n-gram, in order of appearance and with
    repetitions, and the numbers of ``SHAPE_NAMES``."""

    grams: tuple[Hashes, ...]
    shape: Shape


def seen(text: str) -> Seen:
    """The features of ``text``. Any text has some; that of no characters has none but its shape."""
    part = capped(text)
    words = part.lower().split()
    flat = " ".join(words)
    raw = np.frombuffer(flat.encode("utf-8", "replace")[:BYTES_MAX], dtype=np.uint8)
    # Of what case and white space leave; only lines are counted as they came.
    shape = _shape(flat, raw, (len(words), part.count("\n")))
    return Seen((*_char_grams(raw), *_word_grams(raw)), shape)


def capped(text: str) -> str:
    """Head and tail of a text that is longer than both."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return text[:HEAD_CHARS] + text[-TAIL_CHARS:]


def buckets(hashes: Hashes, bits: int) -> Hashes:
    """The bucket of each hash, out of ``2**bits``."""
    return hashes >> np.uint32(32 - bits)


def _char_grams(raw: NDArray[np.uint8]) -> list[Hashes]:
    wide = raw.astype(np.uint32) + np.uint32(1)
    found = []
    gram = wide
    for size in range(2, max(CHAR_SIZES) + 1):
        gram = gram[:-1] * _STEP + wide[size - 1 :] if len(wide) >= size else wide[:0]
        if size in CHAR_SIZES:
            # The high bits choose the bucket; those of a product depend on all of its low ones.
            found.append((gram ^ (gram >> np.uint32(15))) * _SPREAD)
    return found


def _word_grams(raw: NDArray[np.uint8]) -> list[Hashes]:
    inside = _WORD_BYTE[raw]
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    first = [0] if len(raw) and inside[0] else []
    last = [len(raw)] if len(raw) and inside[-1] else []
    edges = np.concatenate((first, edges, last)).astype(np.intp)
    starts, ends = edges[0::2], edges[1::2]
    # Differences of a running sum give the polynomial of each word; dividing by the power of its
    # place makes it the same wherever the word stands.
    sums = np.zeros(len(raw) + 1, dtype=np.uint64)
    np.cumsum((raw.astype(np.uint64) + np.uint64(1)) * _UP[: len(raw)], out=sums[1:])
    words = (sums[ends] - sums[starts]) * _DOWN[starts]
    words ^= words >> np.uint64(29)
    pairs = words[:-1] * _PAIR + words[1:]
    return [_folded(words), _folded(pairs)]


def _folded(hashes: NDArray[np.uint64]) -> Hashes:
    spread = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(_ODD)
    return (spread >> np.uint64(32)).astype(np.uint32)


_CLASSES = np.zeros(256, dtype=np.uint8)
_CLASSES[0x30:0x3A] = 1
_CLASSES[[*range(0x21, 0x30), *range(0x3A, 0x41), *range(0x5B, 0x61), *range(0x7B, 0x7F)]] = 2
_CLASSES[0x80:] = 3


def _shape(flat: str, raw: NDArray[np.uint8], counts: tuple[int, int]) -> Shape:
    words, lines = counts
    _, digits, symbols, foreign = np.bincount(_CLASSES[raw], minlength=4).tolist()
    characters, bytes_or_one = len(flat), max(len(raw), 1)
    return np.array(
        (
            log1p(characters),
            *(log(max(characters, bend) / bend) for bend in BENDS_CHARS),
            log1p(words),
            log1p(lines),
            log1p(characters / max(words, 1)),
            digits / bytes_or_one,
            symbols / bytes_or_one,
            foreign / bytes_or_one,
            log1p(flat.count("?")),
            log1p(flat.count("{") + flat.count("\\")),
        ),
        dtype=np.float32,
    )
