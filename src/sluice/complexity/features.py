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
_DIGITS = bytes(range(0x30, 0x3A))
_SYMBOLS = bytes((*range(0x21, 0x30), *range(0x3A, 0x41), *range(0x5B, 0x61), *range(0x7B, 0x7F)))
_ASCII, _FOREIGN = bytes(range(0x80)), bytes(range(0x80, 0x100))
# Bytes of UTF-8 that begin no character.
_CONTINUING = bytes(range(0x80, 0xC0))
# 1 for the bytes that make words: digits, letters, and all that is not ASCII.
_WORD_BYTE = bytes(
    byte in _DIGITS or byte in range(0x61, 0x7B) or byte in _FOREIGN for byte in range(256)
)
# What ``lower`` and ``split`` make of ASCII, a byte at a time: several times as fast. It is right
# for a text too whose other characters they would leave as they are.
_PLAIN = bytes(
    0x20 if chr(byte).isspace() else ord(chr(byte).lower()) if byte < 0x80 else byte
    for byte in range(256)
)


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
    # Of what case and white space leave; only lines are counted as they came.
    flat, characters = _flat(part)
    raw = np.frombuffer(flat, dtype=np.uint8)
    shape = _shape(flat, characters, part.count("\n"))
    return Seen((*_char_grams(raw), *_word_grams(flat, raw)), shape)


def _flat(part: str) -> tuple[bytes, int]:
    """The text in lower case with single spaces, in UTF-8, and its characters."""
    plain = part.encode("utf-8", "replace")
    foreign = plain.translate(None, _ASCII).decode("utf-8", "replace")
    if foreign and (foreign.lower() != foreign or foreign.split() != [foreign]):
        flat = " ".join(part.lower().split())
        return flat.encode("utf-8", "replace")[:BYTES_MAX], len(flat)
    plain = plain.translate(_PLAIN)
    while b"  " in plain:
        plain = plain.replace(b"  ", b" ")
    plain = plain.strip(b" ")
    return plain, len(plain) - _among(plain, _CONTINUING)


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


def _word_grams(flat: bytes, raw: NDArray[np.uint8]) -> list[Hashes]:
    # A blank at either end, so that each word begins and ends between two bytes.
    inside = np.frombuffer(b"\0" + flat.translate(_WORD_BYTE) + b"\0", dtype=bool)
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[0::2], edges[1::2]
    # Differences of a running sum give the polynomial of each word; dividing by the power of its
    # place makes it the same wherever the word stands.
    sums = np.zeros(len(raw) + 1, dtype=np.uint64)
    np.add.accumulate((raw.astype(np.uint64) + np.uint64(1)) * _UP[: len(raw)], out=sums[1:])
    words = (sums[ends] - sums[starts]) * _DOWN[starts]
    words ^= words >> np.uint64(29)
    pairs = words[:-1] * _PAIR + words[1:]
    return [_folded(words), _folded(pairs)]


def _folded(hashes: NDArray[np.uint64]) -> Hashes:
    spread = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(_ODD)
    return (spread >> np.uint64(32)).astype(np.uint32)


def _shape(flat: bytes, characters: int, lines: int) -> Shape:
    words = flat.count(b" ") + 1 if flat else 0
    bytes_or_one = max(len(flat), 1)
    return np.array(
        (
            log1p(characters),
            *(log(max(characters, bend) / bend) for bend in BENDS_CHARS),
            log1p(words),
            log1p(lines),
            log1p(characters / max(words, 1)),
            _among(flat, _DIGITS) / bytes_or_one,
            _among(flat, _SYMBOLS) / bytes_or_one,
            _among(flat, _FOREIGN) / bytes_or_one,
            log1p(flat.count(b"?")),
            log1p(flat.count(b"{") + flat.count(b"\\")),
        ),
        dtype=np.float32,
    )


def _among(flat: bytes, some: bytes) -> int:
    """How many bytes are among these."""
    return len(flat) - len(flat.translate(None, some))
