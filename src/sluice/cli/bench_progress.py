"""How a load test stands, on standard error: a live line on a terminal, else one line per trial."""

import time
from types import TracebackType
from typing import Self

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.cli.console import plain_console
from sluice.loadtest.trial import Progress as Standing
from sluice.loadtest.trial import TrialPlan, Watch


class BenchProgress:
    """Tells of one trial after the other."""

    def __init__(self) -> None:
        self._console = plain_console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[standing]}", markup=False),
        )
        self._bars = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, words: str) -> None:
        """One line that stays."""
        if self._console.is_terminal:
            self._bars.console.print(words, soft_wrap=True)
        else:
            click.echo(words, err=True)

    def trial(self, name: str, plan: TrialPlan) -> Watch:
        """Begin to tell of a trial; what it gives is called while the trial runs."""
        span = plan.span
        if not self._console.is_terminal:
            digits = 1 if span.arriving_s < 10.0 else 0
            click.echo(f"{name}: {span.arriving_s:.{digits}f} s", err=True)
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        task = self._bars.add_task(name, total=span.arriving_s, standing="")
        latest_s = time.monotonic()

        def watch(standing: Standing) -> bool:
            nonlocal latest_s
            failed = standing.ended - standing.done
            words = (
                f"{standing.sent:,} sent, {standing.in_flight:,} in flight, "
                f"{standing.done:,} whole, {failed:,} failed"
            )
            at_s = min(max(standing.at_s, 0.0), span.arriving_s)
            self._bars.update(task, completed=at_s, standing=words)
            if not self._console.is_terminal and time.monotonic() - latest_s > 10.0:
                latest_s = time.monotonic()
                click.echo(f"  {standing.at_s:.0f} s: {words}", err=True)
            return False

        return watch
