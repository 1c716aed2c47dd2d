"""Rows that belong together, and folds that never split them.

A question may come twice, in other words of case and white space, or with a passage that several
questions share. Whoever trains on one of them has seen the other: what was learned looks better
than it is. Rows of one question, of one normalised prompt, or of one long beginning are one group
here, and a group is in one fold. Called by the trainer and the evaluation.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.outcomes import Outcome, normalised, question_of

FOLDS = 5
# A beginning of this length that few rows share is a passage; what many share is an instruction.
PASSAGE_CHARS = 250
PASSAGE_ROWS_MAX = 25


@dataclass(frozen=True, slots=True)
class Grouping:
    """The group of each row; how many rows share theirs by the question, and how many more by a
    passage. Folds by row would have put these on both sides."""

    groups: NDArray[np.intp]
    by_question: int
    by_passage: int


def grouped(outcomes: Sequence[Outcome]) -> Grouping:
    """Which rows belong together. Groups are numbered in the order of their first rows."""
    normal = [normalised(one.prompt) for one in outcomes]
    sharing = Counter(text[:PASSAGE_CHARS] for text in normal if len(text) > PASSAGE_CHARS)
    asked = _Groups(len(outcomes))
    for row, (one, text) in enumerate(zip(outcomes, normal, strict=True)):
        asked.join(row, ("question", one.question))
        asked.join(row, ("prompt", text))
    by_question = asked.sharing()
    for row, text in enumerate(normal):
        if 1 < sharing[text[:PASSAGE_CHARS]] <= PASSAGE_ROWS_MAX:
            asked.join(row, ("passage", text[:PASSAGE_CHARS]))
    return Grouping(asked.numbers(), by_question, asked.sharing() - by_question)


def folds_of(outcomes: Sequence[Outcome], grouping: Grouping) -> NDArray[np.intp]:
    """The fold of each row, 0 to ``FOLDS`` - 1: by a hash of the group's first question, so that
    more rows leave the folds of the others as they are."""
    chosen: dict[int, int] = {}
    for group, one in zip(grouping.groups.tolist(), outcomes, strict=True):
        if group not in chosen:
            chosen[group] = int(question_of(one.question), 16) % FOLDS
    return np.array([chosen[group] for group in grouping.groups.tolist()], dtype=np.intp)


def fingerprints(outcomes: Sequence[Outcome]) -> NDArray[np.uint64]:
    """One number for each different prompt, sorted: what was trained on, without the text."""
    found = {_fingerprint(one) for one in outcomes}
    return np.array(sorted(found), dtype=np.uint64)


def seen_in(outcomes: Sequence[Outcome], trained_on: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Of each row, whether its prompt is among those that a model was trained on."""
    asked = np.array([_fingerprint(one) for one in outcomes], dtype=np.uint64)
    return np.isin(asked, trained_on)


def _fingerprint(one: Outcome) -> int:
    return int(question_of(one.prompt), 16)


class _Groups:
    """Disjoint sets of rows, joined by keys that they share."""

    def __init__(self, rows: int) -> None:
        self._parent = list(range(rows))
        self._first: dict[tuple[str, str], int] = {}

    def join(self, row: int, key: tuple[str, str]) -> None:
        one, other = sorted((self._root(row), self._root(self._first.setdefault(key, row))))
        self._parent[other] = one

    def sharing(self) -> int:
        """Rows that are in a group and not its first."""
        return sum(root != row for row, root in enumerate(self._roots()))

    def numbers(self) -> NDArray[np.intp]:
        found: dict[int, int] = {}
        numbered = (found.setdefault(root, len(found)) for root in self._roots())
        return np.fromiter(numbered, dtype=np.intp, count=len(self._parent))

    def _roots(self) -> Iterator[int]:
        return (self._root(row) for row in range(len(self._parent)))

    def _root(self, row: int) -> int:
        while self._parent[row] != row:
            self._parent[row] = self._parent[self._parent[row]]
            row = self._parent[row]
        return row
