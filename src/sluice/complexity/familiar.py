"""Whether a text is of the kind that a classifier was trained on: how many of its words it met.

A score of a text in another language or of an unknown field is little better than its length. Words
of the training prompts are kept as bits of a table by their hash; a text of which fewer words are
known than of nearly all training prompts, each measured by the words of the others, is unfamiliar.
Whoever routes sends it to the default model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.features import CHAR_SIZES, Hashes, buckets, seen

BITS = 20
# This percentage of prompts like those of the training counts as unfamiliar.
MISSED_PERCENT = 1.0
_WORDS = len(CHAR_SIZES)

Table = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Familiar:
    """The words that were met, and the share of known words that a familiar text has at least."""

    words: Table
    share_min: float

    def knows(self, words: Hashes) -> bool:
        """Whether a text of these words is familiar; one without words is not."""
        if not len(words):
            return False
        known = np.count_nonzero(self.words.take(buckets(words, BITS)))
        return bool(known >= self.share_min * len(words))


def words_of(grams: tuple[Hashes, ...]) -> Hashes:
    """The words among the n-grams of a text."""
    return grams[_WORDS]


def familiar_of(prompts: Sequence[str], folds: NDArray[np.intp]) -> Familiar:
    """What training prompts make familiar. Prompts of one fold are strangers to the others."""
    met = np.zeros((int(folds.max()) + 1, 1 << BITS), dtype=bool)
    placed = []
    for prompt, fold in zip(prompts, folds.tolist(), strict=True):
        places = buckets(words_of(seen(prompt).grams), BITS)
        met[fold, places] = True
        placed.append(places)
    times = met.sum(axis=0, dtype=np.uint8)
    shares = [
        float(np.mean(times[places] > met[fold, places]))
        for places, fold in zip(placed, folds.tolist(), strict=True)
        if len(places)
    ]
    share_min = float(np.percentile(shares, MISSED_PERCENT)) if shares else 0.0
    return Familiar(times > 0, share_min)
