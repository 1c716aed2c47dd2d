"""The trials of a search in a file, one line each, so that a search can be gone on with.

A line holds what was wished, what came of it, and the trial as reports show it, or what the client
can send, which wishes depend on as well. A torn last line, of a run that was killed, is dropped.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from sluice.loadtest.client_limit import ClientLimit
from sluice.loadtest.sample import Sample
from sluice.loadtest.search import Stage, Wish
from sluice.loadtest.trial import CannotMeasure, ClosedLoop, OpenLoop, Span


class SearchRecord:
    """The file of one search. ``question`` is what was asked: trials of another one are refused.

    ``client`` is the limit of the client that was measured last.
    """

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        self._path = path
        self.trials: list[tuple[Wish, Sample, Mapping[str, Any]]] = []
        self.client: ClientLimit | None = None
        asked = json.loads(json.dumps(question))
        try:
            if not path.exists():
                self._append({"question": asked})
                return
            lines = path.read_text(encoding="utf-8").split("\n")
            whole = lines[:-1]
            before = self._take(whole)
            if lines[-1] and before == asked:
                path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
        except OSError as error:
            raise CannotMeasure(
                f"cannot keep the trials in {path}: {error.strerror or error}"
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CannotMeasure(f"{path} holds no trials of a search: {error}") from None
        if before != asked:
            keys = {key for key in {*before, *asked} if before.get(key) != asked.get(key)}
            differ = sorted("input" if key == "prompt" else key for key in keys)
            raise CannotMeasure(
                f"{path} holds trials of another search ({', '.join(differ)} differ); give another "
                f"file, or what was asked before"
            )

    def _take(self, lines: Sequence[str]) -> dict[str, Any]:
        """Take the trials; what was asked when they were made."""
        rows = [json.loads(line) for line in lines]
        before: dict[str, Any] = dict(rows[0]["question"])
        for row in rows[1:]:
            if "client" in row:
                self.client = msgspec.convert(row["client"], ClientLimit)
            else:
                self.trials.append(_read(row))
        return before

    def add(self, wish: Wish, sample: Sample, document: Mapping[str, Any]) -> None:
        """Keep a trial. Raises ``OSError``."""
        self._append({"wish": asdict(wish), "sample": asdict(sample), "trial": document})

    def add_client(self, limit: ClientLimit) -> None:
        """Keep what the client can send. Raises ``OSError``."""
        self._append({"client": asdict(limit)})
        self.client = limit

    def _append(self, row: Mapping[str, Any]) -> None:
        """Add a whole line, or nothing: more may follow when a full disk has room again."""
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            left = json.dumps(row, default=str).encode() + b"\n"
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(size)
                raise


def _read(row: Mapping[str, Any]) -> tuple[Wish, Sample, Mapping[str, Any]]:
    wish, sample = row["wish"], msgspec.convert(row["sample"], Sample)
    load = OpenLoop if "rate_rps" in wish["load"] else ClosedLoop
    return (
        Wish(
            wish["number"],
            Stage(wish["stage"]),
            load(**wish["load"]),
            msgspec.convert(wish["span"], Span),
            wish["seed"],
            wish["in_flight_max"],
        ),
        sample,
        row["trial"],
    )
