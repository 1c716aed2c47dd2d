"""How far something countable is, on standard error, where that is a terminal."""

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sluice.cli.console import plain_console


class Told:
    """A bar over ``total`` requests."""

    def __init__(self, total: int) -> None:
        console = plain_console(stderr=True)
        columns = (
            TextColumn("simulating", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests", markup=False),
            TimeRemainingColumn(),
        )
        self._bars = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bars.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def at(self, done: int) -> None:
        """So many are done."""
        self._bars.update(self._task, completed=done)
