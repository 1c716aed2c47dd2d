"""Which of two models answered which question rightly: files of outcomes, read and checked.

Called by ``cli/route.py`` and the benchmark. A file is CSV with the columns
``prompt, weak_ok, strong_ok``, or one JSON object a line, plain or gzipped, with ``prompt`` and
either ``weak`` and ``strong`` or ``scores``, a score for each of several models, of which a pair is
asked for. ``question`` or ``qid`` and ``task`` are optional. Outcomes are from 0, wrong, to 1.
Rows that say ``contaminated: 1`` are left out, because published figures leave them out.

Every row is checked; what is wrong is told with its line. What the rows say together (repetitions,
prompts that are no text) is counted by ``reviewed``.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

# A prompt beyond this is a mistake in the file; one below is read and capped as in serving.
PROMPT_CHARS_MAX = 4_000_000
_CSV_COLUMNS = ("prompt", "weak_ok", "strong_ok")
_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}


class BadOutcomes(ValueError):
    """Outcomes that cannot be read or that nothing can be learned from; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one question. ``question`` is the same for all rows that ask the same."""

    question: str
    task: str
    prompt: str
    weak: float
    strong: float

    @property
    def gain(self) -> float:
        """What the strong model adds; negative where the weak one did better."""
        return self.strong - self.weak

    @property
    def rescue(self) -> float:
        """How far the strong model makes good what the weak one missed: 0 to 1."""
        return max(self.gain, 0.0)


@dataclass(frozen=True, slots=True)
class Review:
    """What stands out in rows: how many repeat an earlier question, how many of those contradict
    it, and how many prompts are mostly no text."""

    rows: int
    repeated: int
    contradicting: int
    no_text: int


def read_outcomes(path: Path, pair: tuple[str, str] | None = None) -> list[Outcome]:
    """All rows of a file. ``pair`` names the weak and the strong model of ``scores``.

    Raises ``BadOutcomes``.
    """
    found = []
    try:
        with ExitStack() as stack:
            lines = stack.enter_context(_opened(path))
            for number, row in _rows(path, lines):
                where = f"{path}:{number}"
                if not _number(row.get("contaminated", 0), "contaminated", where):
                    found.append(_outcome(row, pair, where))
    except (OSError, EOFError, zlib.error) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise BadOutcomes(f"cannot read {path}: {words}") from None
    except UnicodeDecodeError:
        raise BadOutcomes(f"{path} is not UTF-8 text") from None
    if not found:
        raise BadOutcomes(f"{path} has no rows")
    return found


def normalised(prompt: str) -> str:
    """A prompt without what case and white space make of it."""
    return " ".join(prompt.casefold().split())


def question_of(prompt: str) -> str:
    """The name of the question that a prompt asks, for rows that do not name it."""
    return blake2b(normalised(prompt).encode("utf-8", "replace"), digest_size=8).hexdigest()


def reviewed(outcomes: Sequence[Outcome]) -> Review:
    """Counts of what stands out. Every one of these rows is used all the same."""
    first: dict[str, Outcome] = {}
    repeated = contradicting = 0
    for outcome in outcomes:
        before = first.setdefault(outcome.question, outcome)
        if before is not outcome:
            repeated += 1
            contradicting += (before.weak, before.strong) != (outcome.weak, outcome.strong)
    return Review(
        len(outcomes), repeated, contradicting, sum(not_text(one.prompt) for one in outcomes)
    )


def not_text(prompt: str) -> bool:
    """Whether control and replacement characters make up a tenth of the beginning."""
    part = prompt[:1000]
    odd = sum(
        character == "\ufffd" or (character < " " and character not in "\t\n\r")
        for character in part
    )
    return odd * 10 > len(part)


def _opened(path: Path) -> TextIO:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    if zipped:
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, lines: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    first = lines.readline()
    while first and not first.strip():
        first = lines.readline()
    rest = _joined(first, lines)
    return _objects(path, rest) if first.lstrip().startswith("{") else _records(path, rest)


def _joined(first: str, lines: Iterable[str]) -> Iterator[str]:
    yield first
    yield from lines


def _objects(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadOutcomes(f"{path}:{number}: not a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise BadOutcomes(f"{path}:{number}: not a JSON object")
        yield number, row


def _records(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    csv.field_size_limit(PROMPT_CHARS_MAX + 1)
    reader = csv.DictReader(lines)
    try:
        names = reader.fieldnames or ()
        missing = [name for name in _CSV_COLUMNS if name not in names]
        if missing and names:
            raise BadOutcomes(
                f"{path}: the first line must name the columns {', '.join(_CSV_COLUMNS)}; "
                f"{', '.join(missing)} not among {', '.join(names)[:200]!r}"
            )
        for row in reader:
            renamed = {"weak": row["weak_ok"], "strong": row["strong_ok"]}
            yield reader.line_num, {**row, **renamed}
    except csv.Error as error:
        raise BadOutcomes(f"{path}:{reader.line_num}: {error}") from None


def _outcome(row: Mapping[str, Any], pair: tuple[str, str] | None, where: str) -> Outcome:
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadOutcomes(f"{where}: prompt must be a text that is not empty")
    if len(prompt) > PROMPT_CHARS_MAX:
        raise BadOutcomes(
            f"{where}: the prompt has {len(prompt)} characters; at most {PROMPT_CHARS_MAX}"
        )
    if "scores" in row:
        weak, strong = _of_pair(row["scores"], pair, where)
    elif "weak" in row and "strong" in row:
        if pair is not None:
            raise BadOutcomes(f"{where}: has one pair of models; --pair is for files with scores")
        weak, strong = row["weak"], row["strong"]
    else:
        raise BadOutcomes(f"{where}: needs weak and strong, or scores")
    question = row.get("question") or row.get("qid") or question_of(prompt)
    return Outcome(
        question=str(question),
        task=str(row.get("task") or ""),
        prompt=prompt,
        weak=_number(weak, "weak", where),
        strong=_number(strong, "strong", where),
    )


def _of_pair(scores: object, pair: tuple[str, str] | None, where: str) -> tuple[object, object]:
    if not isinstance(scores, dict):
        raise BadOutcomes(f"{where}: scores must be an object of model names and scores")
    known = ", ".join(sorted(map(str, scores)))
    if pair is None:
        raise BadOutcomes(
            f"{where}: has scores of several models; choose --pair WEAK:STRONG of {known}"
        )
    missing = [name for name in pair if name not in scores]
    if missing:
        raise BadOutcomes(f"{where}: no score of {' and '.join(missing)}; there are {known}")
    return scores[pair[0]], scores[pair[1]]


def _number(value: object, name: str, where: str) -> float:
    found: float | None = None
    if isinstance(value, str):
        word = value.strip().lower()
        try:
            found = _WORDS[word] if word in _WORDS else float(word)
        except ValueError:
            found = None
    elif isinstance(value, bool | int | float) and -1 <= value <= 2:  # no integer beyond a float
        found = float(value)
    if found is None or not 0.0 <= found <= 1.0:
        raise BadOutcomes(f"{where}: {name} must be 0 to 1, true or false, not {value!r:.60}")
    return found
