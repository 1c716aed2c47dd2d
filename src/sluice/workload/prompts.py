"""Token ids for prompts that are known by their parts only.

A prefix cache compares tokens, so equal parts must have equal tokens and unequal ones must differ
from their first token on. Ids are cut out of one long tuple, which costs a copy of pointers and not
an object for each token.
"""

from collections.abc import Iterator

from sluice.workload.asks import Part

# A power of two: multiplying with an odd number then gives each text its own offset until so many
# texts have been used, by when the first ones have long left every cache.
_SIZE = 1 << 18
_STEP = 2_654_435_769


class Prompts:
    """Makes the tokens of parts. Making one takes a few milliseconds; share it."""

    def __init__(self) -> None:
        self._ids = tuple(range(1, _SIZE + 1))

    def tokens(self, parts: tuple[Part, ...]) -> tuple[int, ...]:
        """The tokens of a prompt."""
        if len(parts) == 1:
            text, tokens = parts[0]
            start = text * _STEP % _SIZE
            if start + tokens <= _SIZE:
                return self._ids[start : start + tokens]
        return tuple(token for part in parts for token in self._of(part))

    def _of(self, part: Part) -> Iterator[int]:
        start, left = part.text * _STEP % _SIZE, part.tokens
        while left > 0:
            taken = self._ids[start : start + left]
            yield from taken
            left -= len(taken)
            start = 0
