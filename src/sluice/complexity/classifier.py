"""The classifier as it serves: a prompt in, the probability that the strong model rescues out.

Called once for each request that asks for a route, so it is numpy on small arrays and nothing else,
and its cost has a bound whatever the prompt is. It makes no decision: whoever routes compares the
probability with a threshold, and a probability equal to the threshold goes to the strong model.
"""

from dataclasses import dataclass, field
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.familiar import Familiar, words_of
from sluice.complexity.features import BYTES_MAX, Seen, Shape, buckets, seen

Floats = NDArray[np.float32]
_ONES = np.ones(BYTES_MAX, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Card:
    """Where a model comes from and what it is worth; read by people and printed by the command.

    ``rows`` and ``questions`` count what it was trained on, ``rescued`` is the share of rows that
    only the strong model answered. Of the cross-validation by question: ``apgr``, with its
    interval, and the same of prompt length alone; ``None`` where it was not measured. By scores of
    fits that did not see the prompts, ``thresholds`` send 1, 2, … 100 % of prompts like those that
    it was trained on to the strong model.
    """

    name: str
    trained_on: tuple[str, ...] = ()
    rows: int = 0
    questions: int = 0
    rescued: float = 0.0
    apgr: tuple[float, float, float] | None = None
    length_apgr: tuple[float, float, float] | None = None
    thresholds: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Linear:
    """A score: weights of each kind of n-gram by bucket, and of the shape between the bounds that
    training saw, so that no prompt is further out than its examples."""

    grams: Floats
    shape: Shape
    shape_low: Shape
    shape_high: Shape
    bias: float


@dataclass(frozen=True, slots=True)
class Classifier:
    """``judged`` is all that serving needs. ``slope`` and ``offset`` make a probability of the
    linear score; ``trained_on`` are fingerprints of the prompts it was trained on."""

    linear: Linear
    slope: float
    offset: float
    card: Card
    familiar: Familiar
    trained_on: NDArray[np.uint64] = field(repr=False)

    def score(self, text: str) -> float:
        """Probability that the strong model answers rightly what the weak one does not."""
        return self._probability(seen(text))

    def judged(self, text: str) -> float | None:
        """The same, ``None`` for a text that is unlike those that the model was trained on."""
        features = seen(text)
        known = self.familiar.knows(words_of(features.grams))
        return self._probability(features) if known else None

    def _probability(self, features: Seen) -> float:
        return probability(self.slope * raw_score(self.linear, features) + self.offset)


def raw_score(linear: Linear, features: Seen) -> float:
    """The linear score of what was seen of a prompt."""
    shape = np.minimum(np.maximum(features.shape, linear.shape_low), linear.shape_high)
    total = linear.bias + float(shape @ linear.shape)
    bits = linear.grams.shape[1].bit_length() - 1
    for weights, hashes in zip(linear.grams, features.grams, strict=True):
        if len(hashes):
            found = weights.take(buckets(hashes, bits))
            # The sum, as a product: that takes half of the time.
            total += float(found @ _ONES[: len(hashes)]) / sqrt(len(hashes))
    return total


def probability(logit: float) -> float:
    """The logistic function, for any finite number."""
    if logit >= 0.0:
        return 1.0 / (1.0 + exp(-min(logit, 700.0)))
    grown = exp(max(logit, -700.0))
    return grown / (1.0 + grown)
