"""Prompts as a sparse matrix of n-grams with their shapes beside it, and the two products that
fitting needs.

Kept by rows and by columns, so that both products read memory in order. A value is the count of an
n-gram over the root of how many its kind has in the prompt, times its rarity; both can be had from
one prompt alone, so serving multiplies the same numbers. Only ``training.py`` and ``baselines.py``
use this.
"""

from collections.abc import Callable, Iterator, Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.features import FAMILIES, SHAPE_NAMES, buckets, seen
from sluice.complexity.outcomes import BadOutcomes

BITS = 15
COLUMNS = FAMILIES << BITS
# 16 bytes each, twice over while sorting.
GRAMS_MAX = 60_000_000

Floats = NDArray[np.float32]
# Told of progress: stage, done, of how many.
Told = Callable[[str, int, int], None]


class Matrix:
    """The features of all prompts. ``rarity`` is the factor of each column."""

    def __init__(self, prompts: Sequence[str], told: Told) -> None:
        columns, values, counts, shapes = _counted(prompts, told)
        self.shapes = shapes
        frequency = np.bincount(columns, minlength=COLUMNS)
        # Halved so that the values of a column are of the order of those of a shape.
        rare = np.log(len(prompts) / np.maximum(frequency, 1)) / 2
        self.rarity: Floats = np.where(frequency > 1, rare, 0.0).astype(np.float32)
        rows = np.repeat(np.arange(len(prompts), dtype=np.int32), counts)
        kept = self.rarity[columns] > 0.0
        columns, rows = columns[kept], rows[kept]
        values = values[kept] * self.rarity[columns]
        self._by_row = _Runs(rows, columns, values, len(prompts))
        order = np.argsort(columns, kind="stable")
        self._by_column = _Runs(columns[order], rows[order], values[order], COLUMNS)

    def times(self, weights: Floats) -> Floats:
        """For each row, the sum over its n-grams of value times weight."""
        return self._by_row.sums(weights)

    def transposed_times(self, rows: Floats) -> Floats:
        """For each column, the sum over rows of value times the row's number."""
        return self._by_column.sums(rows)


class _Runs:
    """Values in runs of one target each, and where each takes its factor from."""

    def __init__(
        self, targets: NDArray[np.int32], sources: NDArray[np.int32], values: Floats, size: int
    ) -> None:
        self._sources, self._values, self._size = sources, values, size
        self._targets, self._starts = np.unique(targets, return_index=True)
        # Made once: with a buffer of its own, a product allocates nothing that is large.
        self._products = np.empty(len(values), dtype=np.float32)

    def sums(self, factors: Floats) -> Floats:
        found = np.zeros(self._size, dtype=np.float32)
        if len(self._values):
            np.take(factors, self._sources, out=self._products)
            np.multiply(self._products, self._values, out=self._products)
            found[self._targets] = np.add.reduceat(self._products, self._starts)
        return found


def _counted(
    prompts: Sequence[str], told: Told
) -> tuple[NDArray[np.int32], Floats, NDArray[np.intp], Floats]:
    columns, values, counts, total = [], [], [], 0
    shapes = np.empty((len(prompts), len(SHAPE_NAMES)), dtype=np.float32)
    for number, (found, value, shape) in enumerate(map(_one, prompts)):
        columns.append(found)
        values.append(value)
        counts.append(len(found))
        shapes[number] = shape
        total += len(found)
        if total > GRAMS_MAX:
            raise BadOutcomes(
                f"the first {number} of {len(prompts)} prompts have {GRAMS_MAX:,} different "
                f"n-grams, more than fit into memory: train on a sample of the rows"
            )
        told("reading", number + 1, len(prompts))
    return np.concatenate(columns), np.concatenate(values), np.array(counts), shapes


def _one(prompt: str) -> tuple[NDArray[np.int32], Floats, Floats]:
    """Columns of a prompt, each once, and their values before rarity; its shape."""
    features = seen(prompt)
    kinds = [len(grams) for grams in features.grams]
    all_columns = np.concatenate(list(_columns(features.grams)))
    columns, counts = np.unique(all_columns, return_counts=True)
    roots = np.array([1.0 / sqrt(max(count, 1)) for count in kinds], dtype=np.float32)
    return (
        columns.astype(np.int32),
        counts.astype(np.float32) * roots[columns >> BITS],
        features.shape,
    )


def _columns(grams: Sequence[NDArray[np.uint32]]) -> Iterator[NDArray[np.uint32]]:
    for family, hashes in enumerate(grams):
        yield buckets(hashes, BITS) + np.uint32(family << BITS)
