"""Runs as files, so that a table that was interrupted continues where it stopped.

A key says everything that the run depends on but the code; ``forget`` is for when that changed.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.facts import UNCALIBRATED, Calibration
from benchmarks.load.outcomes import Run


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title; a cell is text, a number or nothing."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]

    def text(self) -> str:
        """As Markdown."""
        cells = [[_shown(cell) for cell in row] for row in (self.columns, *self.rows)]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        lines.insert(1, "|" + "---|" * len(self.columns))
        return f"### {self.title}\n\n" + "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Each row by column."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


class Share(float):
    """A share of a whole: a number in JSON, percent in a table."""


def _shown(cell: str | float | None) -> str:
    match cell:
        case None:
            return "–"
        case Share():
            return f"{100 * cell:.1f} %"
        case str():
            return cell
        case int():
            return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


class Store:
    """The folder with the runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Run | None:
        """A run that was made."""
        path = self._path(key)
        return Run.from_json(json.loads(path.read_text())) if path.exists() else None

    def need(self, key: str) -> Run:
        """A run that must have been made. Raises ``RuntimeError``."""
        run = self.get(key)
        if run is None:
            raise RuntimeError(f"it needs {key}, which was not run")
        return run

    def cached(self, key: str, make: Callable[[], Run]) -> Run:
        """A run, made now where it is not there."""
        run = self.get(key)
        if run is None:
            run = make()
            self._write(self._path(key), run.to_json())
        return run

    def forget(self, parts: Iterable[str]) -> None:
        """Drop the runs whose key begins with one of these."""
        for part in parts:
            for path in self._folder.glob(f"{part}*.json"):
                path.unlink()

    def calibration(self) -> Calibration:
        """The speed of the live engine, or a made-up one where none was measured."""
        path = self._path("calibration")
        if not path.exists():
            return UNCALIBRATED
        return Calibration.from_json(json.loads(path.read_text()))

    def keep_calibration(self, calibration: Calibration) -> None:
        """Keep it for the virtual backend."""
        self._write(self._path("calibration"), calibration.to_json())

    def _path(self, key: str) -> Path:
        return self._folder / (re.sub(r"[^A-Za-z0-9_.-]+", "_", key) + ".json")

    @staticmethod
    def _write(path: Path, document: object) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(document))
        part.replace(path)
