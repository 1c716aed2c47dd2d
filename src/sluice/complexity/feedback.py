"""Outcomes that clients told of a served route, made into rows that training takes.

Mostly only one model answered, so only its outcome is known. What the other one would have done is
taken from rows in which both are known: the mean outcome where the known model was right, and where
it was wrong. Such rows are learned from and never judged on. Called by ``cli/route.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.complexity.outcome_file import before
from sluice.complexity.outcomes import BadOutcomes, Outcome, question_of


class _Row(msgspec.Struct):
    """One line of the file."""

    prompt: str
    weak: float | None = None
    strong: float | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """Rows of which both outcomes are known, and those of which one is.

    ``torn`` lines were cut short when a server was stopped or its disk was full.
    """

    whole: Sequence[Outcome]
    halves: Sequence[_Row]
    torn: int = 0


_decode = msgspec.json.Decoder(_Row).decode


def read_feedback(path: Path) -> Feedback:
    """What was told, the older file before it included. Raises ``BadOutcomes``."""
    try:
        files = [file for file in (before(path), path) if file.exists()]
        lines = [
            (file, number, line)
            for file in files
            for number, line in enumerate(file.read_bytes().splitlines(), 1)
            if line.strip()
        ]
    except OSError as error:
        raise BadOutcomes(f"cannot read {path}: {error.strerror}") from None
    if not lines:
        raise BadOutcomes(f"{path} has no outcomes")
    whole: list[Outcome] = []
    halves: list[_Row] = []
    torn = 0
    for file, number, line in lines:
        try:
            row = _decode(line)
        except (msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            raise BadOutcomes(f"{file}:{number}: {error}") from None
        except msgspec.DecodeError:
            torn += 1
            continue
        values = [value for value in (row.weak, row.strong) if value is not None]
        if not row.prompt.strip() or not values or not all(0 <= one <= 1 for one in values):
            raise BadOutcomes(f"{file}:{number}: needs a prompt and outcomes from 0 to 1")
        if row.weak is not None and row.strong is not None:
            question = question_of(row.prompt)
            whole.append(Outcome(question, "", row.prompt, row.weak, row.strong))
        else:
            halves.append(row)
    if not whole and not halves:
        raise BadOutcomes(f"{path} has no outcomes: none of its {torn} lines is whole")
    return Feedback(whole, halves, torn)


def completed(halves: Sequence[_Row], known: Sequence[Outcome]) -> list[Outcome]:
    """Rows of one outcome with what is expected of the other model.

    Raises ``BadOutcomes`` where nothing is known of both.
    """
    if halves and not known:
        raise BadOutcomes(
            "every outcome is of one model only: give DATA in which both are known, or tell both "
            "outcomes of some prompts"
        )
    strong_by_weak = _means([(one.weak, one.strong) for one in known])
    weak_by_strong = _means([(one.strong, one.weak) for one in known])
    found = []
    for row in halves:
        if row.weak is not None:
            weak, strong = row.weak, _expected(strong_by_weak, row.weak)
        else:
            strong = row.strong or 0.0
            weak = _expected(weak_by_strong, strong)
        found.append(Outcome(question_of(row.prompt), "", row.prompt, weak, strong))
    return found


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of the second where the first is wrong, and where it is right."""
    overall = sum(second for _, second in pairs) / max(len(pairs), 1)
    found = []
    for weights in ([1.0 - first for first, _ in pairs], [first for first, _ in pairs]):
        total = sum(weight * second for weight, (_, second) in zip(weights, pairs, strict=True))
        # One row of the overall mean, so that a model that is never wrong has one as well.
        found.append((total + overall) / (sum(weights) + 1.0))
    return found[0], found[1]


def _expected(means: tuple[float, float], known: float) -> float:
    wrong, right = means
    return (1.0 - known) * wrong + known * right
