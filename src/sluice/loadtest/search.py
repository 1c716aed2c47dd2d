"""The search for capacity and SLO rate: which trial comes next, and what is known so far.

A ``Search`` asks for one trial after the other and is told their samples. It knows no clock and
sends nothing: it spends a budget by what trials say they took. The same samples lead to the same
next trial, so that a search goes on from the samples of an earlier run. ``run_search.py`` has the
trials played; the statistics are in ``capacity.py``, ``slo_fit.py`` and ``soaks.py``.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, log, sqrt

from sluice.loadtest.capacity import (
    Capacity,
    Throughput,
    capacity_of,
    concurrency,
    follows,
    little_holds,
    next_rung,
    rungs,
    throughput,
)
from sluice.loadtest.sample import Count, Sample, Trend
from sluice.loadtest.slo_fit import Dose, SloFit, fit
from sluice.loadtest.soaks import ERROR_FIRST, SOAKS, STEP_DOWN, certified, soak_rate, upper_bound
from sluice.loadtest.trial import ClosedLoop, Load, Objective, OpenLoop, Span, VoidCause

BUDGET_S, BUDGET_QUICK_S = 1200.0, 300.0
# Parts of the budget. What one stage leaves, the next may use.
LADDER_PART, CONFIRM_PART, SOAK_PART = 0.10, 0.16, 0.20
# Open-loop rates tried around the ladder's throughput; the last but one comes after overload.
CONFIRM_BELOW, CONFIRM_ABOVE = (0.90, 0.80, 0.65), (1.05, 1.20, 1.50)
# By how much the ladder may be late.
LADDER_LATE = 2.5
# Where nothing has shown what is too much: a rate so far above all that was reached, for so many
# answer times that growth stands out.
TOO_MUCH, TOO_MUCH_ANSWERS = 1.5, 4.0
BRACKET_FROM, BRACKET_STEP, BRACKET_DOWN_MAX = 0.3, 1.4, 6
# On both sides of the middle of what is known, in logits of the share that misses: where it rises
# twenty times as fast as the rate, 2 % below and 3 % above.
BESIDE = (-0.4, 0.6)
BESIDE_MAX = 0.08
HALF_WIDTH_RESOLVED = 0.025
FIT_TRIALS, FIT_TRIALS_MIN = 6, 4
MEMORIES_PER_TRIAL = 30.0
# In mean answer times: load before what counts, at least what counts, and until all of that ended.
WARM_ANSWERS, COUNTED_ANSWERS, DRAIN_ANSWERS = 2.5, 6.0, 3.0
# Requests below which a trial says too little to be worth its beginning.
REQUESTS_PER_TRIAL = 60
# A queue of so many times what the closed loop needed at its best is overload.
OVERLOADED = 4.0
# Rates stay below this part of what the client can send.
CLIENT_PART = 0.7
# Trials in a row that say nothing, after which another will not either.
VOIDS_MAX = 3


class Stage(StrEnum):
    """What a trial is for."""

    LADDER = "ladder"
    CAPACITY = "capacity"
    REVISIT = "revisit"
    OVERLOAD = "overload"
    BRACKET = "bracket"
    FIT = "fit"
    SOAK = "soak"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. Without objectives only capacity is looked for.

    ``client_rps`` is the highest rate at which the client kept its schedule against a server that
    does nothing, ``None`` where that was not measured. ``drift_tolerance`` is the growth of the
    backlog, as a part of the rate, that counts as none.
    """

    objectives: Mapping[str, Objective]
    budget_s: float = BUDGET_S
    seed: int = 1
    client_rps: float | None = None
    drift_tolerance: float = 0.01


@dataclass(frozen=True, slots=True)
class Wish:
    """The next trial. Beyond ``in_flight_max`` requests under way it can be broken off: it has
    shown overload."""

    number: int
    stage: Stage
    load: Load
    span: Span
    seed: int
    in_flight_max: int | None = None


@dataclass(frozen=True, slots=True)
class SloRate:
    """The SLO rate: as likely above as below ``estimate_rps``, with 90 % between the others.

    ``estimate_rps`` is ``None`` where trials contradict one line through them, or where no rate was
    found that keeps the targets; ``low_rps`` where none kept them, ``high_rps`` where none missed
    them. ``binding`` names the objective that sets it, and ``certified_rps`` the rate that fresh
    trials confirmed. ``resolved``: the interval is as narrow as a search aims for.
    """

    estimate_rps: float | None = None
    low_rps: float | None = None
    high_rps: float | None = None
    certified_rps: float | None = None
    binding: str | None = None
    resolved: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What is known at some moment of a search; each part is ``None`` until something is known."""

    spent_s: float
    trials: int
    throughput: Throughput | None
    capacity: Capacity
    slo: SloRate | None
    fit: SloFit | None
    notes: tuple[str, ...] = ()


class _Over(Exception):
    """Nothing more can be learned; the argument says why."""


Trials = Generator[Wish, Sample, None]
Played = Generator[Wish, Sample, Sample | None]


class Search:
    """One search. ``next`` is the trial that is wanted, ``take`` tells what became of it."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.samples: list[Sample] = []
        self.stages: list[Stage] = []
        self.spent_s = 0.0
        self.stopped: str | None = None
        self._limits = {name: one.share_max for name, one in question.objectives.items()}
        self._client_rps = inf if question.client_rps is None else CLIENT_PART * question.client_rps
        self._client_bound = False
        self._revisited: Sample | None = None
        self._certified_rps: float | None = None
        self._voids = 0
        self._steps = self._all()
        self.next: Wish | None = next(self._steps)

    def take(self, sample: Sample) -> None:
        """What the wished trial gave."""
        assert self.next is not None
        self.samples.append(sample)
        self.stages.append(self.next.stage)
        self.spent_s += sample.took_s
        try:
            self.next = self._steps.send(sample)
        except StopIteration:
            self.next = None
        except _Over as over:
            self.next, self.stopped = None, str(over)

    # ------------------------------------------------------------------------------- what is known

    def found(self) -> Found:
        """What is known now."""
        best = throughput(self.samples)
        capacity = self._capacity()
        fitted = self._fit() if self._limits else None
        slo = None if not self._limits else self._slo(fitted)
        return Found(
            self.spent_s, len(self.samples), best, capacity, slo, fitted, tuple(self._notes())
        )

    def _capacity(self) -> Capacity:
        return capacity_of(
            self.samples, revisited=self._revisited, tolerance=self.question.drift_tolerance
        )

    def _slo(self, fitted: SloFit | None) -> SloRate | None:
        passed = [one.rate_rps for one in self._open() if not self._fails(one)]
        failed = [one.rate_rps for one in self._open() if self._fails(one)]
        if not passed and not failed:
            return None
        missed = any(self._misses(one) for one in self._open())
        if fitted is None or not passed or not missed or self._contradicted():
            # A backlog that looks as if it grew is no target missed: it bounds nothing from above.
            low, high = self._ends(fitted, passed, failed if missed else ())
            return SloRate(
                low_rps=low, high_rps=high, certified_rps=self._certified_rps,
                binding=self._worst() if failed else None,
            )  # fmt: skip
        rate = fitted.posterior
        low, middle, high = (rate.quantile(share) for share in (0.05, 0.5, 0.95))
        return SloRate(
            middle, low, high, self._certified_rps, self._binding(fitted),
            resolved=(high - low) / 2.0 <= HALF_WIDTH_RESOLVED * middle,
        )  # fmt: skip

    def _ends(
        self, fitted: SloFit | None, passed: Sequence[float], failed: Sequence[float]
    ) -> tuple[float | None, float | None]:
        """What is known without an estimate: an end where trials have been on that side of it. That
        a short trial passes or fails shows little: the ends are those of the fit, where there is
        one line through all."""
        if fitted is not None and not self._contradicted():
            rate, low = fitted.posterior, None
            if passed:
                # Nothing is known of rates above those that were tried.
                low = min(rate.quantile(0.05), max(passed))
            return low, rate.quantile(0.95) if failed else None
        low, high = max(passed, default=None), min(failed, default=None)
        if low is not None and high is not None:
            low, high = min(low, high), max(low, high)
        return low, high

    def _binding(self, fitted: SloFit) -> str:
        """The objective that sets the rate; failures where most of what misses it failed, and
        capacity where nothing misses it but in overload."""
        name = max(fitted.binding, key=fitted.binding.__getitem__)
        middle = fitted.posterior.quantile(0.5)
        near = [one for one in self._open() if abs(log(one.rate_rps / middle)) <= 0.2]
        if sum(one.failed for one in near) > 0.5 * sum(one.count(name).missed for one in near) > 0:
            return "failures"
        calm = [one for one in near if not self._overloaded(one)]
        if len(calm) < len(near) and not any(self._fails(one) for one in calm):
            return "capacity"
        return name

    def _worst(self) -> str:
        """The objective that the lowest failing rate misses most."""
        lowest = min((one for one in self._open() if self._fails(one)), key=_rate)
        if self._overloaded(lowest):
            return "capacity"
        return max(self._limits, key=lambda name: _share(lowest.count(name)) / self._limits[name])

    def _contradicted(self) -> bool:
        """Whether a rate kept the targets beyond doubt above one that missed them beyond doubt."""
        sure_fail = [
            one.rate_rps
            for one in self._open()
            if any(_low(one, name) > limit for name, limit in self._limits.items())
        ]
        sure_pass = [
            one.rate_rps
            for one in self._open()
            if all(_high(one, name) < limit for name, limit in self._limits.items())
        ]
        return bool(sure_fail and sure_pass) and max(sure_pass) > 1.05 * min(sure_fail)

    def _notes(self) -> list[str]:
        notes = [] if self.stopped is None else [self.stopped]
        if self._client_bound:
            notes.append(
                f"the client keeps its schedule to {self._client_rps:.3g} requests/s only; "
                f"higher rates were not tried"
            )
        best = throughput(self.samples)
        notes += [
            f"with {concurrency(one)} clients, throughput x latency is "
            f"{one.completed_rps * one.latency_s:.3g}: the trial was too short to be steady"
            for one in rungs(self.samples)
            if best is not None and concurrency(one) == best.concurrency and not little_holds(one)
        ]
        return notes

    def _open(self) -> list[Sample]:
        return [
            one
            for stage, one in zip(self.stages, self.samples, strict=True)
            if one.rate_rps > 0.0 and one.valid and stage is not Stage.OVERLOAD
        ]

    def _fails(self, sample: Sample) -> bool:
        return self._misses(sample) or self._overloaded(sample)

    def _misses(self, sample: Sample) -> bool:
        return sample.stopped or any(
            _share(sample.count(name)) > limit for name, limit in self._limits.items()
        )

    def _overloaded(self, sample: Sample) -> bool:
        """Whether it was broken off in overload, or its backlog grew at a rate that neither the
        closed loop nor another trial, no shorter, has kept up with. Of many trials below that, some
        look as if theirs did."""
        best = throughput(self.samples)
        beyond = best is not None and sample.rate_rps >= best.estimate_rps
        if sample.stopped or not beyond or not sample.backs_up:
            return sample.stopped
        return not any(
            one.rate_rps >= sample.rate_rps
            and one.counted_s >= sample.counted_s
            and not one.backs_up
            and not self._misses(one)
            for one in self._open()
        )

    def _fit(self) -> SloFit | None:
        doses = {
            name: [self._dose(one, name) for one in self._open() if one.count(name).requests]
            for name in self._limits
        }
        if not all(doses.values()):
            return None
        return fit(doses, self._limits)

    def _dose(self, sample: Sample, name: str) -> Dose:
        """Its counts; in overload all would be late if it only lasted."""
        if not self._overloaded(sample):
            return Dose(sample.rate_rps, sample.counts[name], sample.memory_s)
        requests = ceil(sample.rate_rps * sample.counted_s)
        return Dose(sample.rate_rps, (Count(requests, requests),), overload=True)

    # --------------------------------------------------------------------------------- the stages

    def _all(self) -> Trials:
        budget_s, aims = self.question.budget_s, bool(self._limits)
        yield from self._ladder(LADDER_PART * budget_s)
        if throughput(self.samples) is None:
            raise _Over("no request was answered in a closed loop: there is nothing to search for")
        confirm_part = LADDER_PART + CONFIRM_PART if aims else 1.0
        yield from self._confirm(confirm_part * budget_s)
        if aims:
            fit_until_s = (1.0 - SOAK_PART) * budget_s
            yield from self._bracket(fit_until_s)
            yield from self._narrow(fit_until_s)
            # Before there is an estimate, its time is better spent on that.
            if any(self._fails(one) for one in self._open()):
                yield from self._overload(budget_s)
            yield from self._certify()
            # What certifying has left.
            yield from self._narrow(budget_s)
        else:
            yield from self._overload(budget_s)

    def _ladder(self, until_s: float) -> Trials:
        while (clients := next_rung(self.samples)) is not None:
            ladder = rungs(self.samples)
            steep = follows(ladder)
            answer_s = (1.2 if steep else 2.0) * ladder[-1].latency_s if ladder else 0.0
            # Where throughput still follows the clients, all that matters is that it does; and it
            # must be known where it ends, or all that comes later looks at the wrong rates.
            left_s = (LADDER_LATE if steep else 1.0) * until_s - self.spent_s
            wanted_s = max(4.0 * answer_s, 0.03 * until_s if steep else left_s / 3.0)
            if wanted_s > (LADDER_LATE * until_s - self.spent_s):
                return
            warm_s = min(1.5 * answer_s, 0.5 * wanted_s)
            span = Span(wanted_s - warm_s, warm_s, 0.0, self._patience_s(answer_s))
            sample = yield from self._played(Stage.LADDER, ClosedLoop(clients), span)
            if sample is None:
                return
            if sample.completed_rps <= 0.0:
                # One answer takes longer than that.
                span = Span(8.0 * wanted_s, 0.0, 0.0, 8.0 * wanted_s)
                sample = yield from self._played(Stage.LADDER, ClosedLoop(clients), span)
                if sample is None or sample.completed_rps <= 0.0:
                    return

    def _confirm(self, until_s: float) -> Trials:
        best = throughput(self.samples)
        assert best is not None
        below = best.estimate_rps
        for part in CONFIRM_BELOW:
            below = part * best.estimate_rps
            sample = yield from self._at(Stage.CAPACITY, below, until_s, 4)
            if sample is None or sample.trend is not Trend.UNSTABLE:
                break
        above: Sample | None = None
        for part in CONFIRM_ABOVE:
            above = yield from self._at(Stage.CAPACITY, part * best.estimate_rps, until_s, 3)
            if above is None or above.trend is Trend.UNSTABLE:
                break
        if above is not None and above.trend is Trend.UNSTABLE:
            self._revisited = yield from self._at(Stage.REVISIT, below, until_s, 1)
        for part in (1.0, 0.95):
            yield from self._at(Stage.CAPACITY, part * best.estimate_rps, until_s, 1)

    def _overload(self, until_s: float) -> Trials:
        """The upper end of capacity, where time is left and no trial has shown one. Nothing that is
        near the SLO rate is learned there, so that it is left out of the fit."""
        best, capacity = throughput(self.samples), self._capacity()
        assert best is not None
        rate = TOO_MUCH * max(best.high_rps, capacity.low_rps or 0.0)
        answer_s = self._answer_s(best.low_rps)
        counted_s = max(2.0, TOO_MUCH_ANSWERS * answer_s)
        span = Span(counted_s, _warm_s(answer_s), 0.0, self._patience_s(answer_s))
        # What comes too fast by a part takes that part of the time to be answered behind it.
        takes_s = TOO_MUCH * span.to_s + answer_s
        if capacity.high_rps is not None or takes_s > until_s - self.spent_s:
            return
        if rate > self._client_rps:
            self._client_bound = True
            return
        yield from self._played(Stage.OVERLOAD, OpenLoop(rate), span)

    def _bracket(self, until_s: float) -> Trials:
        best = throughput(self.samples)
        assert best is not None
        rate = max(BRACKET_FROM * best.estimate_rps, self._kept_rps())
        downs = 0
        while self.spent_s < until_s:
            failed = [one.rate_rps for one in self._open() if self._fails(one)]
            passed = [one.rate_rps for one in self._open() if not self._fails(one)]
            if passed and failed:
                low, high = max(passed), min(failed)
                if high <= BRACKET_STEP * low:
                    return
                rate = sqrt(low * high)
            elif passed:
                rate = max(rate, max(passed) * BRACKET_STEP)
            elif failed:
                rate = min(rate, min(failed) / BRACKET_STEP)
                downs += 1
            if rate > 1.05 * best.high_rps or downs > BRACKET_DOWN_MAX:
                return
            if (yield from self._at(Stage.BRACKET, rate, until_s, 14)) is None:
                return

    def _kept_rps(self) -> float:
        """What the ladder says of a rate to begin with: the throughput of the last closed loop that
        kept the targets. Open-loop arrivals come in bursts, and will keep them only below."""
        kept = [one for one in rungs(self.samples) if not self._fails(one)]
        return 0.8 * kept[-1].completed_rps if kept else 0.0

    def _narrow(self, until_s: float) -> Trials:
        done = 0
        while self.spent_s < until_s:
            fitted = self._fit()
            passed = [one for one in self._open() if not self._fails(one)]
            if fitted is None or not passed:
                return
            known = self._slo(fitted)
            if known is not None and known.resolved and done >= FIT_TRIALS_MIN:
                return
            middle = fitted.posterior.quantile(0.5)
            binding = max(fitted.binding, key=fitted.binding.__getitem__)
            beside = BESIDE[done % len(BESIDE)] / fitted.responses[binding].steepness
            rate = middle * (1.0 + max(-BESIDE_MAX, min(BESIDE_MAX, beside)))
            trials = max(1, FIT_TRIALS - done)
            sample = yield from self._at(Stage.FIT, rate, until_s, trials)
            if sample is None:
                return
            done += 1

    def _certify(self) -> Trials:
        error, rate_max = ERROR_FIRST, inf
        while True:
            fitted = self._fit()
            left_s = 0.75 * (self.question.budget_s - self.spent_s)
            if fitted is None or all(self._fails(one) for one in self._open()):
                return
            middle = fitted.posterior.quantile(0.5)
            answer_s = self._answer_s(middle)
            span = self._span(left_s / SOAKS, answer_s)
            if (
                span.counted_s < COUNTED_ANSWERS * answer_s
                or span.counted_s * middle < REQUESTS_PER_TRIAL
            ):
                return
            rate = min(
                rate_max,
                self._client_rps,
                soak_rate(fitted, self._limits, SOAKS * span.counted_s, error),
            )
            soaks = []
            for _ in range(SOAKS):
                sample = yield from self._played(Stage.SOAK, OpenLoop(rate), span)
                if sample is None:
                    return
                soaks.append(sample)
            if certified(soaks, self._limits, error):
                self._certified_rps = rate
                return
            error, rate_max = error / 2.0, rate * (1.0 - STEP_DOWN)

    # ---------------------------------------------------------------------------------- one trial

    def _at(self, stage: Stage, rate_rps: float, until_s: float, trials: int) -> Played:
        """An open-loop trial that takes its part of the time until then, or what a trial needs;
        ``None`` where there is too little time or the client could not."""
        if rate_rps > self._client_rps:
            self._client_bound = True
            rate_rps = self._client_rps
        left_s = until_s - self.spent_s
        answer_s = self._answer_s(rate_rps)
        needed_s = _around_s(answer_s) + max(COUNTED_ANSWERS * answer_s, 2.0)
        if needed_s > left_s:
            return None
        span = self._span(max(needed_s, left_s / trials), answer_s)
        return (yield from self._played(stage, OpenLoop(rate_rps), span))

    def _answer_s(self, rate_rps: float) -> float:
        """How long an answer takes at this rate, about: as in the closed loop that reached it, and
        in open-loop trials near it."""
        near = [one for one in self._open() if abs(one.rate_rps / rate_rps - 1.0) < 0.1]
        if near:
            return near[-1].latency_s
        best = throughput(self.samples)
        # More clients than the best had are overload, whatever throughput that leaves.
        ladder = [
            one
            for one in rungs(self.samples)
            if best is None or concurrency(one) <= best.concurrency
        ]
        below = [one for one in ladder if one.completed_rps <= 1.05 * rate_rps]
        return (below or ladder)[-1 if below else 0].latency_s if ladder else 0.0

    def _span(self, length_s: float, answer_s: float) -> Span:
        """A trial that is over in about ``length_s``: load before what counts, until answers end as
        often as they begin, and behind it until those that count have ended."""
        counted_s = max(1.0, length_s - _around_s(answer_s))
        tail_s = DRAIN_ANSWERS * answer_s
        return Span(counted_s, _warm_s(answer_s), tail_s, self._patience_s(answer_s))

    def _patience_s(self, answer_s: float) -> float:
        limits = [one.limit_s for one in self.question.objectives.values()]
        return max(10.0, 6.0 * answer_s, *(3.0 * limit_s for limit_s in limits))

    def _played(self, stage: Stage, load: Load, span: Span) -> Played:
        for _ in range(2):
            number = len(self.samples)
            sample = yield Wish(
                number, stage, load, span, self.question.seed * 1_000_003 + number,
                self._in_flight_max() if isinstance(load, OpenLoop) else None,
            )  # fmt: skip
            if sample.void is None:
                self._voids = 0
                return sample
            self._voids += 1
            if sample.void.cause in _FINAL or self._voids >= VOIDS_MAX:
                raise _Over(f"{sample.void.cause}: {sample.void.detail}")
        if isinstance(load, OpenLoop):
            self._client_rps, self._client_bound = 0.9 * load.rate_rps, True
        return None

    def _in_flight_max(self) -> int:
        best = throughput(self.samples)
        return ceil(OVERLOADED * max(16, best.concurrency if best else 0))


def _warm_s(answer_s: float) -> float:
    return max(1.0, WARM_ANSWERS * answer_s)


def _around_s(answer_s: float) -> float:
    """What a trial takes beside what counts."""
    return _warm_s(answer_s) + DRAIN_ANSWERS * answer_s


_FINAL = (VoidCause.INTERRUPTED, VoidCause.NOTHING_ANSWERED, VoidCause.CACHE_MOVED)


def _high(sample: Sample, name: str) -> float:
    """A one-sided 95 % bound on the share that misses."""
    return upper_bound(sample.counts.get(name, ()), ERROR_FIRST)


def _low(sample: Sample, name: str) -> float:
    """The same from below: the share that does not miss, turned round."""
    kept = [Count(one.requests, one.requests - one.missed) for one in sample.counts.get(name, ())]
    return 1.0 - upper_bound(kept, ERROR_FIRST)


def _rate(sample: Sample) -> float:
    return sample.rate_rps


def _share(count: Count) -> float:
    return count.missed / count.requests if count.requests else 0.0
