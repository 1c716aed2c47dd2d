"""Progress of preparations on standard error: bars on a terminal, one line each elsewhere."""

from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class PreparationProgress:
    """What is being fetched or converted, on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._console.is_terminal and self._tasks:
            self._bars.stop()

    def update(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show that ``label`` is at ``done_bytes``; the total is ``None`` where nobody knows it."""
        if not self._console.is_terminal:
            if label not in self._tasks:
                self._tasks[label] = TaskID(len(self._tasks))
                click.echo(label, err=True)
            return
        if label not in self._tasks:
            self._bars.start()
            self._tasks[label] = self._bars.add_task(label, total=total_bytes)
        self._bars.update(self._tasks[label], completed=done_bytes, total=total_bytes)
