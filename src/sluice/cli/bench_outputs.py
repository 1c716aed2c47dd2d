"""The files that ``sluice bench`` writes beside what it prints.

Where a disk is full the run goes on: what was measured is printed all the same, and the failure is
told in the end.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from sluice.cli.bench_page import page
from sluice.cli.bench_report import markdown
from sluice.cli.options import json_text
from sluice.cli.page import write_whole
from sluice.loadtest.rows import RowsFile
from sluice.loadtest.trial import CannotMeasure, TrialOutcome

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    ("--out", "out", "JSON document, as --json prints it."),
    ("--rows", "rows", "Parquet file with a row for each request."),
    ("--markdown", "markdown", "Report as Markdown."),
    ("--html", "html", "Report with plots; it loads nothing."),
)


def output_options(function: F) -> F:
    """Add the options for files."""
    for option, name, words in reversed(_OPTIONS):
        kind = click.Path(path_type=Path, dir_okay=False)
        function = click.option(option, name, type=kind, metavar="FILE", help=words)(function)
    return function


class Outputs:
    """The files of one run."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._rows = RowsFile(paths["rows"]) if "rows" in paths else None
        self._problems: list[str] = []

    def add_rows(self, outcome: TrialOutcome, trial: int) -> None:
        """Keep the requests of a trial."""
        if self._rows is not None:
            self._try(self._paths["rows"], lambda: self._add(outcome, trial))

    def _add(self, outcome: TrialOutcome, trial: int) -> None:
        assert self._rows is not None  # noqa: S101 - asked for above
        self._rows.add(outcome, trial)

    def write(self, result: Mapping[str, Any]) -> None:
        """Write all; say on standard error what could not be written."""
        if self._rows is not None:
            self._try(self._paths["rows"], self._rows.close)
        texts: Mapping[str, Callable[[], str]] = {
            "out": lambda: json_text(result) + "\n",
            "markdown": lambda: markdown(result),
            "html": lambda: page(result),
        }
        for name, text in texts.items():
            if name in self._paths:
                path = self._paths[name]
                self._try(path, partial(_write, path, text))
        for problem in self._problems:
            click.echo(f"sluice: {problem}", err=True)

    def _try(self, path: Path, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            words = f"cannot write {path}: {error.strerror or error}"
            if words not in self._problems:
                self._problems.append(words)


def outputs_wanted(asked: Mapping[str, Any]) -> Outputs:
    """The files that are asked for. Raises ``CannotMeasure`` for folders that are not there."""
    paths = {name: asked[name] for _, name, _ in _OPTIONS if asked[name] is not None}
    for path in paths.values():
        if not path.absolute().parent.is_dir():
            raise CannotMeasure(f"cannot write {path}: there is no folder {path.parent}")
    return Outputs(paths)


def _write(path: Path, text: Callable[[], str]) -> None:
    write_whole(path, text())
