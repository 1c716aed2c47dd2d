"""How far a simulation is, on standard error: a bar on a terminal, else a line now and then."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sluice.cli.console import plain_console

# What takes no longer than this needs no line; a file or a pipe gets one so often after that.
FIRST_LINE_S = 2.0
LINE_EVERY_S = 10.0


class Told:
    """How many of ``total`` requests are simulated."""

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        console = plain_console(stderr=True)
        columns = (
            TextColumn("simulating", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests", markup=False),
            TimeRemainingColumn(),
        )
        self._lines = not console.is_terminal
        self._bars = Progress(*columns, console=console, transient=True, disable=self._lines)
        self._task = self._bars.add_task("", total=total)
        self._total = total
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + FIRST_LINE_S

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def at(self, done: int, total: int | None = None) -> None:
        """So many are done, of ``total`` where that is another number now."""
        self._total = self._total if total is None else total
        self._bars.update(self._task, completed=done, total=self._total)
        now_s = self._clock()
        if self._lines and done and now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            left_s = (now_s - self._began_s) * (self._total - done) / done
            click.echo(
                f"simulating: {done:,} of {self._total:,} requests, about {left_s:,.0f} s left",
                err=True,
            )
