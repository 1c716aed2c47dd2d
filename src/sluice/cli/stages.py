"""How far work of several stages is, on standard error, where that is a terminal."""

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from sluice.cli.console import plain_console


class Stages:
    """One bar for each stage, from its first ``at``."""

    def __init__(self) -> None:
        console = plain_console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
        )
        self._bars = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def at(self, stage: str, done: int, total: int) -> None:
        """So much of the stage is done."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done)
