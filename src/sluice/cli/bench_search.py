"""``sluice bench`` without a load: the search for capacity and SLO rate.

Options, files and words of a search; how it goes is decided in ``loadtest/search.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, assert_never

import click

from sluice.cli.bench_progress import BenchProgress
from sluice.cli.bench_search_report import interval_words
from sluice.config.units import parse_duration_s
from sluice.loadtest.client_limit import ClientLimit, client_machine
from sluice.loadtest.run_search import Play, run_search
from sluice.loadtest.sample import Sample
from sluice.loadtest.search import BUDGET_QUICK_S, BUDGET_S, Question, Search, Wish
from sluice.loadtest.search_document import search_document
from sluice.loadtest.search_record import SearchRecord
from sluice.loadtest.trial import (
    CannotMeasure,
    ClosedLoop,
    Objective,
    OpenLoop,
    Stimulus,
    TrialOutcome,
)

F = TypeVar("F", bound=Callable[..., Any])
BUDGET_S_MIN = 30.0
# How wide the backlog's growth may be that counts as none, where there is little time to see it.
DRIFT_TOLERANCE, DRIFT_TOLERANCE_QUICK = 0.01, 0.03


def search_options(function: F) -> F:
    """Add the options of a search."""
    for option in reversed(
        (
            click.option("--quick", is_flag=True, help="A search of 5 minutes, less sure."),
            click.option(
                "--budget", metavar="DURATION", help="Time for a search. Default: 20m, quick 5m."
            ),
            click.option(
                "--resume",
                type=click.Path(path_type=Path, dir_okay=False),
                metavar="FILE",
                help="Keep the trials of a search there, and go on from those that it holds.",
            ),
        )
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class SearchWanted:
    """What was asked for."""

    question: Question
    record: SearchRecord | None


def search_wanted(asked: Mapping[str, Any], objectives: Sequence[Objective]) -> SearchWanted:
    """The search, with what it kept of an earlier run. Raises ``CannotMeasure``."""
    budget_s = budget_wanted_s(asked)
    question = Question(
        {one.metric.value: one for one in objectives},
        budget_s=budget_s,
        seed=asked["seed"],
        drift_tolerance=DRIFT_TOLERANCE_QUICK if asked["quick"] else DRIFT_TOLERANCE,
    )
    left_out = {"resume", "out", "rows", "markdown", "html", "processes", "lag_max"}
    identity = {
        key: str(value)
        for key, value in asked.items()
        if value not in (None, (), False) and key not in left_out
    }
    record = None if asked["resume"] is None else SearchRecord(asked["resume"], identity)
    return SearchWanted(question, record)


def client_known(
    wanted: SearchWanted,
    processes: int,
    measure: Callable[[], float | None],
    progress: BenchProgress,
) -> SearchWanted:
    """The search with what the client can send: as an earlier run on this machine has measured it,
    so that the same trials are wished for, or measured now."""
    machine, record = client_machine(processes), wanted.record
    if record is not None and record.client is not None and record.client.machine == machine:
        limit = record.client
        progress.say("the client alone: as it was measured before")
    else:
        limit = ClientLimit(measure(), machine)
        if record is not None:
            _kept(partial(record.add_client, limit), progress)
    return replace(wanted, question=replace(wanted.question, client_rps=limit.rps))


def budget_wanted_s(asked: Mapping[str, Any]) -> float:
    """How long the search may take. Raises ``CannotMeasure``."""
    if asked["budget"] is None:
        return BUDGET_QUICK_S if asked["quick"] else BUDGET_S
    try:
        budget_s = parse_duration_s(asked["budget"])
    except ValueError as error:
        raise CannotMeasure(f"--budget: {error}") from None
    if budget_s < BUDGET_S_MIN:
        raise CannotMeasure(
            f"--budget must be {BUDGET_S_MIN:.0f}s or more, not {asked['budget']}; for less, "
            f"measure one load with --rate"
        )
    return budget_s


def searched(
    wanted: SearchWanted,
    play: Play,
    stimulus: Stimulus,
    describe: Callable[[TrialOutcome], Mapping[str, Any]],
    progress: BenchProgress,
) -> dict[str, Any]:
    """The search with all its trials, played to the end of the budget or to an interruption."""
    search = Search(wanted.question)
    record = wanted.record
    before = [] if record is None else list(record.trials)
    documents: list[Mapping[str, Any]] = []
    if before:
        progress.say(f"{len(before)} trials are there already")

    def told(wish: Wish, sample: Sample, outcome: TrialOutcome | None) -> None:
        document = before[len(documents)][2] if outcome is None else describe(outcome)
        documents.append(document)
        if outcome is not None:
            # Void trials have numbers too; one that ended the search is to be tried again.
            if record is not None and search.stopped is None:
                _kept(partial(record.add, wish, sample, document), progress)
            progress.say(f"  {interval_words(search_document(search))}")

    recorded = [(wish, sample) for wish, sample, _ in before]
    run_search(search, play, stimulus, told, recorded)
    return {**search_document(search), "trials": documents}


def _kept(keep: Callable[[], None], progress: BenchProgress) -> None:
    try:
        keep()
    except OSError as error:
        progress.say(f"cannot keep it for --resume: {error.strerror or error}")


def name_of(wish: Wish) -> str:
    """A trial for the progress line."""
    match wish.load:
        case OpenLoop(rate_rps):
            return f"{wish.stage.value}, {rate_rps:.4g} requests/s"
        case ClosedLoop(concurrency):
            return f"{wish.stage.value}, {concurrency} client{'s' if concurrency > 1 else ''}"
        case unknown:
            assert_never(unknown)
