"""Has the trials of a search played, one after the other.

Called by ``sluice bench``. Which trial comes next is decided in ``search.py``.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from sluice.loadtest.sample import Sample, sample_of
from sluice.loadtest.search import Search, Wish
from sluice.loadtest.trial import (
    ClosedLoop,
    OpenLoop,
    Progress,
    Runner,
    Stimulus,
    TrialOutcome,
    TrialPlan,
    Watch,
)

Play = Callable[[Wish, TrialPlan, Watch], TrialOutcome]
# Told of each trial with what came of it; the outcome is ``None`` where it was recorded before.
Told = Callable[[Wish, Sample, TrialOutcome | None], None]


def run_search(
    search: Search,
    play: Play,
    stimulus: Stimulus,
    told: Told = lambda _wish, _sample, _outcome: None,
    recorded: Sequence[tuple[Wish, Sample]] = (),
) -> None:
    """Play a search to its end.

    ``recorded`` are trials of an earlier run of the same search: they are taken as they are, as
    long as each is the one that is wished.
    """
    for wish, sample in recorded:
        if search.next != wish:
            break
        search.take(sample)
        told(wish, sample, None)
    while (wanted := search.next) is not None:
        outcome = play(wanted, _plan_of(wanted, stimulus), _watch_of(wanted))
        sample = sample_of(outcome, search.question.objectives)
        search.take(sample)
        told(wanted, sample, outcome)


def player(runner: Runner) -> Play:
    """Plays with nothing beside."""
    return lambda _, plan, watch: runner.run(plan, watch)


def _plan_of(wish: Wish, stimulus: Stimulus) -> TrialPlan:
    match wish.load:
        case OpenLoop(rate_rps):
            return stimulus.open_loop(rate_rps, wish.span, wish.seed)
        case ClosedLoop(concurrency):
            return stimulus.closed_loop(concurrency, wish.span, wish.seed)
        case unknown:
            assert_never(unknown)


def _watch_of(wish: Wish) -> Watch:
    """A closed loop has told all when its time is over, an open one when it has shown overload."""
    most = wish.in_flight_max

    def over(progress: Progress) -> bool:
        if isinstance(wish.load, ClosedLoop):
            return progress.at_s >= wish.span.to_s
        return most is not None and progress.in_flight > most

    return over
