"""Progress of a download on standard error: a bar on a terminal, one line elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from sluice.catalog.download import Progress


@contextmanager
def download_progress(label: str) -> Iterator[Progress]:
    """Give the function that a download tells its progress to. Nothing is shown before it is
    told."""
    console = Console(stderr=True)
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bars.add_task(f"fetching {label}", start=True, total=None)
    told = False

    def progress(done_bytes: int, total_bytes: int | None) -> None:
        nonlocal told
        if not told:
            told = True
            if console.is_terminal:
                bars.start()
            else:
                click.echo(f"fetching {label}", err=True)
        bars.update(task, completed=done_bytes, total=total_bytes)

    try:
        yield progress
    finally:
        bars.stop()


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

    def __enter__(self) -> "PreparationProgress":
        return self

    def __exit__(self, *_exc: object) -> None:
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
