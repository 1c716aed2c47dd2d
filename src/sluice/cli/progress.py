"""Progress of preparations on standard error: one line for each, which ends with done and time.

On a terminal a bar stands in the line's place while something runs.
"""

import time
from types import TracebackType
from typing import Self

import click
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from sluice.cli.console import plain_console

_MIB = 1024**2


class PreparationProgress:
    """What is being fetched or converted, on standard error. One thing at a time."""

    def __init__(self) -> None:
        self._console = plain_console(stderr=True)
        self._label = ""
        self._begun_s = 0.0
        self._bars: Bars | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._end("done" if kind is None else "failed")

    def update(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show that ``label`` is at ``done_bytes``; the total is ``None`` where nobody knows it."""
        if label != self._label:
            self._end("done")
            self._begin(label)
        if self._bars is not None:
            self._bars.update(self._task, amount=_amount(done_bytes, total_bytes))

    def _begin(self, label: str) -> None:
        self._label, self._begun_s = label, time.monotonic()
        if not self._console.is_terminal:
            click.echo(f"{label} ... ", err=True, nl=False)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description} {task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
        )
        self._bars = Bars(*columns, console=self._console, transient=True)
        self._bars.start()
        self._task = self._bars.add_task(label, total=None, amount="")

    def _end(self, outcome: str) -> None:
        if not self._label:
            return
        words = f"{outcome}, {time.monotonic() - self._begun_s:.1f} s"
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            words = f"{self._label} ... {words}"
        click.echo(words, err=True)
        self._label = ""


def _amount(done_bytes: int, total_bytes: int | None) -> str:
    """How far it is: nothing where no byte was counted, a share where the total is known."""
    if not done_bytes:
        return ""
    done = f"{done_bytes / _MIB:,.0f} MiB"
    if not total_bytes:
        return done
    return f"{done} of {total_bytes / _MIB:,.0f} MiB, {100 * done_bytes // total_bytes} %"
