"""What a classifier has to beat: prompt length, and the outcomes of the nearest known prompts.

Random order needs no code: it is a constant score (see ``measures.py``). Printed beside every
result, because a figure without them says little. Called by ``evaluation.py``.
"""

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.features import buckets, seen
from sluice.complexity.folds import FOLDS
from sluice.complexity.matrix import Told

NEIGHBOURS = 40
_BITS = 9
_ROWS_AT_ONCE = 512

Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]


def length_scores(prompts: list[str]) -> Numbers:
    """Longer prompts to the strong model."""
    return np.array([len(prompt) for prompt in prompts], dtype=np.float64)


def embedded(prompts: list[str], told: Told) -> Floats:
    """A unit vector for each prompt: its words and pairs of words, hashed with signs."""
    found = np.zeros((len(prompts), 1 << _BITS), dtype=np.float32)
    for number, prompt in enumerate(prompts):
        hashes = np.unique(np.concatenate(seen(prompt).grams[3:]))
        signs = 1.0 - 2.0 * (hashes & np.uint32(1))
        found[number] = np.bincount(buckets(hashes, _BITS), weights=signs, minlength=1 << _BITS)
        told("neighbours", number + 1, len(prompts))
    found -= found.mean(axis=0)
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    found /= np.maximum(lengths, np.float32(1e-6))
    return found


def neighbour_scores(vectors: Floats, gains: Numbers, folds: NDArray[np.intp]) -> Numbers:
    """The mean gain of the nearest prompts of other folds, for each; 0 where there are none."""
    found = np.zeros(len(vectors))
    for fold in range(FOLDS):
        inside = np.flatnonzero(folds == fold)
        others = folds != fold
        known, known_gains = vectors[others], gains[others]
        count = min(NEIGHBOURS, len(known))
        if count == 0:
            continue
        for start in range(0, len(inside), _ROWS_AT_ONCE):
            part = inside[start : start + _ROWS_AT_ONCE]
            alike = vectors[part] @ known.T
            nearest = np.argpartition(-alike, count - 1, axis=1)[:, :count]
            found[part] = known_gains[nearest].mean(axis=1)
    return found
