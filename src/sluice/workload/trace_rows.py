"""The rows of request traces, one at a time, from the formats in which they are published.

A file is CSV with a header line or one JSON object per line, plain or gzipped. Its format is known
by the names of its columns:

- Azure's LLM inference traces of 2023 and 2024: ``TIMESTAMP, ContextTokens, GeneratedTokens``;
- Mooncake's: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of the prompt's
  512-token blocks;
- BurstGPT's: ``Timestamp`` in s, ``Request tokens``, ``Response tokens``; rows without a response
  are requests that failed, and are left out;
- ours: ``t_s, input_tokens, output_tokens`` and optionally ``hash_ids``;
- any other, where ``Columns`` says which column is what.

Every row is checked, and whatever is wrong is told with its line and what to change.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from sluice.workload.asks import BadWorkload
from sluice.workload.lengths import TOKENS_MAX

UNITS_S: Mapping[str, float | None] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "date": None}
ROLES = ("t", "input", "output", "blocks", "tenant", "class", "model")
NEEDED = ROLES[:3]
_TIME_S_MAX = 1e11


class TraceRow(NamedTuple):
    """One request of a trace; ``at_s`` counts from its first row. ``blocks`` are the ids of the
    512-token blocks of its prompt, where the trace tells them."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    model: str = ""
    slo_class: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column is what, by role, and the unit of the time column.

    ``failures`` says that rows with no output tokens are requests that failed.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    unit: str = "s"
    failures: bool = False


FORMATS = (
    Columns({"t": "t_s", "input": "input_tokens", "output": "output_tokens", "blocks": "hash_ids"}),
    Columns({"t": "TIMESTAMP", "input": "ContextTokens", "output": "GeneratedTokens"}, unit="date"),
    Columns(
        {
            "t": "timestamp",
            "input": "input_length",
            "output": "output_length",
            "blocks": "hash_ids",
        },
        unit="ms",
    ),
    Columns(
        {"t": "Timestamp", "input": "Request tokens", "output": "Response tokens"}, failures=True
    ),
)


def columns_of(texts: Iterable[str]) -> Columns | None:
    """Columns from texts such as ``t=start:ms`` and ``input=prompt_tokens``; ``None`` of none.

    Raises ``BadWorkload``.
    """
    names: dict[str, str] = {}
    unit = "s"
    for text in texts:
        role, equals, name = text.partition("=")
        if not equals or role not in ROLES or not name:
            raise BadWorkload(
                f"column {text!r} is not ROLE=NAME; roles are {', '.join(ROLES)}, and the time "
                f"may have a unit, as in t=start:ms"
            )
        if role == "t" and name.rpartition(":")[2] in UNITS_S and ":" in name:
            name, _, unit = name.rpartition(":")
        names[role] = name
    if not names:
        return None
    missing = [role for role in NEEDED if role not in names]
    if missing:
        raise BadWorkload(
            f"columns for {', '.join(missing)} are missing: name all of t, input, output"
        )
    return Columns(names, unit)


def trace_rows(path: Path, columns: Columns | None = None) -> Iterator[TraceRow]:
    """The rows of a trace file, in order. Raises ``BadWorkload``."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(_opened(path))
            records = _records(path, file)
            first_line, first = next(records, (0, None))
        except OSError as error:
            raise BadWorkload(f"cannot read the trace {path}: {error.strerror or error}") from None
        if first is None:
            raise BadWorkload(f"the trace {path} is empty: it has no requests")
        reading = _Reading(path, columns or _recognised(path, first))
        for line, record in _with_first(first_line, first, records):
            row = reading.row(line, record)
            if row is not None:
                yield row
        if not reading.rows:
            raise BadWorkload(f"the trace {path} has no request with an answer")


def _with_first(
    line: int, first: Mapping[str, Any], rest: Iterator[tuple[int, Mapping[str, Any]]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    yield line, first
    yield from rest


def _opened(path: Path) -> TextIO:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    if zipped:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _records(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and fields of each record."""
    try:
        start = file.read(1)
        file.seek(0)
        if start == "{":
            yield from _json_records(path, file)
            return
        reader = csv.DictReader(file)
        for record in reader:
            if record.get(None):
                raise BadWorkload(
                    f"{path}:{reader.line_num}: more fields than the header names; quote "
                    f"fields that hold commas"
                )
            yield reader.line_num, record
    except UnicodeDecodeError:
        raise BadWorkload(f"the trace {path} is not UTF-8 text, nor gzip of it") from None
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise BadWorkload(f"the trace {path} is damaged: {error}") from None


def _json_records(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadWorkload(f"{path}:{line}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise BadWorkload(f"{path}:{line}: not a JSON object")
        yield line, record


def _recognised(path: Path, record: Mapping[str, Any]) -> Columns:
    for columns in FORMATS:
        if all(columns.names[role] in record for role in NEEDED):
            return columns
    there = ", ".join(str(name) for name in record) or "none"
    known = "; ".join(", ".join(columns.names[role] for role in NEEDED) for columns in FORMATS)
    raise BadWorkload(
        f"the columns of {path} are not those of a known trace. It has: {there}. Known: {known}. "
        f"Say which is what with --column t=NAME --column input=NAME --column output=NAME"
    )


class _Reading:
    """One pass over a file: fields to values, and the order of times."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path = path
        self._columns = columns
        self._start_s: float | None = None
        self._last_s = 0.0
        self.rows = 0

    def row(self, line: int, record: Mapping[str, Any]) -> TraceRow | None:
        """The request in a record, ``None`` for one that failed."""
        names = self._columns.names
        at_s = self._time_s(line, record)
        output = self._tokens(line, record, "output", 0 if self._columns.failures else 1)
        prompt = self._tokens(line, record, "input", 1)
        if self._start_s is None:
            self._start_s = self._last_s = at_s
        if at_s < self._last_s:
            raise BadWorkload(
                f"{self._path}:{line}: the time goes back by {self._last_s - at_s:g} s: sort the "
                f"trace by {names['t']}"
            )
        self._last_s = at_s
        if not output:
            return None
        self.rows += 1
        blocks = self._blocks(line, record) if "blocks" in names else ()
        texts = [str(record.get(names.get(role, ""), "") or "") for role in ROLES[4:]]
        tenant, slo_class, model = texts
        return TraceRow(at_s - self._start_s, prompt, output, blocks, model, slo_class, tenant)

    def _field(self, line: int, record: Mapping[str, Any], role: str) -> Any:
        name = self._columns.names[role]
        value = record.get(name)
        if value is None or value == "":
            missing = "is empty" if name in record else "is missing"
            raise BadWorkload(f"{self._path}:{line}: {name} {missing}")
        return value

    def _number(self, line: int, record: Mapping[str, Any], role: str) -> float:
        value = self._field(line, record, role)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not isfinite(number):
            name = self._columns.names[role]
            raise BadWorkload(f"{self._path}:{line}: {name} is {value!r}, not a number")
        return number

    def _tokens(self, line: int, record: Mapping[str, Any], role: str, least: int) -> int:
        number = self._number(line, record, role)
        if number != int(number) or not least <= number <= TOKENS_MAX:
            raise BadWorkload(
                f"{self._path}:{line}: {self._columns.names[role]} is {number:g}; it must be a "
                f"whole number from {least} to {TOKENS_MAX:,}: correct the row or leave it out"
            )
        return int(number)

    def _time_s(self, line: int, record: Mapping[str, Any]) -> float:
        factor = UNITS_S[self._columns.unit]
        if factor is not None:
            at_s = self._number(line, record, "t") * factor
        else:
            value = str(self._field(line, record, "t"))
            try:
                at = datetime.fromisoformat(value.strip())
            except ValueError:
                name = self._columns.names["t"]
                raise BadWorkload(
                    f"{self._path}:{line}: {name} is {value!r}, not a date and time"
                ) from None
            at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        if not 0.0 <= at_s <= _TIME_S_MAX:
            raise BadWorkload(
                f"{self._path}:{line}: {self._columns.names['t']} is {at_s:g} s; times must not be "
                f"negative, nor above {_TIME_S_MAX:g} s"
            )
        return at_s

    def _blocks(self, line: int, record: Mapping[str, Any]) -> tuple[int, ...]:
        value = record.get(self._columns.names["blocks"]) or ()
        parts: Sequence[Any] = value.split() if isinstance(value, str) else value
        try:
            return tuple(int(part) for part in parts)
        except (TypeError, ValueError, OverflowError):
            name = self._columns.names["blocks"]
            raise BadWorkload(f"{self._path}:{line}: {name} is not a list of numbers") from None
