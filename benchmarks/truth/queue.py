"""An engine that is a formula: one prefill at a time, decode beside it, slower when more decode.

Prefills wait in line for one server (Lindley's recursion). An answer's tokens come at a pace that
the number of answers under way at its first token decides. Truths of it come from runs of millions
of requests, which take seconds. Played by ``benchmarks.search`` and the tests of searches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from sluice.loadtest.trial import (
    ClosedLoop,
    Ending,
    Objective,
    OpenLoop,
    RequestOutcome,
    Span,
    TrialOutcome,
    TrialPlan,
    Watch,
)
from sluice.loadtest.trial import Progress as TrialProgress

Times = NDArray[np.float64]
# Requests of a closed-loop plan are drawn as they are needed, from the plan's seed.
WATCHED_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueEngine:
    """Mean prefill time with its coefficient of variation, mean tokens of an answer with theirs,
    the pace of one answer alone, and how many answers under way make that twice as slow."""

    name: str
    prefill_s: float = 0.07
    prefill_cv: float = 1.0
    output_tokens: float = 100.0
    output_cv: float = 0.5
    pace_s: float = 0.02
    twice_at: float = 40.0

    def draw(self, count: int, seed: str) -> tuple[Times, Times]:
        """Prefill times and tokens of answers."""
        chance = np.random.default_rng(list(seed.encode()))
        sizes = []
        for mean, cv in ((self.prefill_s, self.prefill_cv), (self.output_tokens, self.output_cv)):
            sigma = sqrt(log(1.0 + cv * cv))
            sizes.append(chance.lognormal(log(mean) - sigma * sigma / 2.0, sigma, count))
        return sizes[0], np.maximum(2.0, np.round(sizes[1]))

    def answer(self, arrive_s: Times, prefill_s: Times, tokens: Times) -> tuple[Times, Times]:
        """First tokens and ends of open-loop requests, in order of arrival."""
        work = np.cumsum(prefill_s)
        first = work + np.maximum.accumulate(arrive_s - (work - prefill_s))
        # Answers under way at each first token, by their pace when alone in a first round, and by
        # the pace that this gives in a second one.
        pace = np.full(len(first), self.pace_s)
        for _ in range(3):
            ends = first + pace * (tokens - 1.0)
            beside = np.arange(len(first)) - np.searchsorted(np.sort(ends), first)
            pace = self.pace_s * (1.0 + np.maximum(0, beside) / self.twice_at)
        return first, first + pace * (tokens - 1.0)


def exceedance(
    engine: QueueEngine, objective: Objective, rate_rps: float, requests: int, seed: int
) -> float:
    """The share that misses an objective in a long run."""
    chance = np.random.default_rng([seed, 77])
    arrive = np.cumsum(chance.exponential(1.0 / rate_rps, requests))
    prefill, tokens = engine.draw(requests, f"{seed}/truth")
    first, ends = engine.answer(arrive, prefill, tokens)
    value = {"ttft": first - arrive, "tpot": (ends - first) / (tokens - 1.0), "e2e": ends - arrive}
    return float((value[objective.metric.value][requests // 20 :] > objective.limit_s).mean())


def true_rate(
    engine: QueueEngine, objectives: Sequence[Objective], requests: int = 3_000_000
) -> float:
    """The SLO rate by bisection over long runs of common random numbers."""
    low, high = 0.05 / engine.prefill_s, 0.999 / engine.prefill_s
    while high / low > 1.001:
        middle = sqrt(low * high)
        met = all(
            exceedance(engine, one, middle, requests, seed=1) <= one.share_max for one in objectives
        )
        low, high = (middle, high) if met else (low, middle)
    return sqrt(low * high)


@dataclass(frozen=True, slots=True)
class QueueStimulus:
    """Poisson plans without asks: the engine draws what it needs from the seed."""

    def open_loop(self, rate_rps: float, span: Span, seed: int) -> TrialPlan:
        """See ``Stimulus``."""
        return TrialPlan(OpenLoop(rate_rps), span, (), seed)

    def closed_loop(self, concurrency: int, span: Span, seed: int) -> TrialPlan:
        """See ``Stimulus``."""
        return TrialPlan(ClosedLoop(concurrency), span, (), seed)


class QueueRunner:
    """Plays plans on a ``QueueEngine`` that is idle when each begins."""

    def __init__(self, engine: QueueEngine) -> None:
        self.engine = engine

    def run(self, plan: TrialPlan, watch: Watch | None = None) -> TrialOutcome:
        """See ``Runner``."""
        load = plan.load
        if isinstance(load, OpenLoop):
            arrive, first, ends, tokens = self._open(plan, load.rate_rps)
        else:
            arrive, first, ends, tokens = self._closed(plan, load.concurrency)
        stopped_s = None if watch is None else _stopped(arrive, ends, plan.span, watch)
        over_s = plan.span.arriving_s if stopped_s is None else stopped_s
        requests = [
            _request(number, at, start, end, round(count))
            if stopped_s is None or end <= stopped_s
            else _left(number, at, stopped_s)
            for number, (at, start, end, count) in enumerate(
                zip(arrive.tolist(), first.tolist(), ends.tolist(), tokens.tolist(), strict=True)
            )
            if at < over_s
        ]
        counted = (arrive >= plan.span.from_s) & (arrive < plan.span.to_s)
        took_s = stopped_s or max(plan.span.to_s, float(ends[counted].max(initial=0.0)))
        return TrialOutcome(plan, requests, took_s, stopped_s=stopped_s)

    def _open(self, plan: TrialPlan, rate_rps: float) -> tuple[Times, Times, Times, Times]:
        chance = np.random.default_rng([plan.seed, 1])
        count = int(rate_rps * plan.span.arriving_s * 1.5 + 100)
        arrive = np.cumsum(chance.exponential(1.0 / rate_rps, count))
        arrive = arrive[arrive < plan.span.arriving_s]
        prefill, tokens = self.engine.draw(count, f"{plan.seed}/sizes")
        prefill, tokens = prefill[: len(arrive)], tokens[: len(arrive)]
        first, ends = self.engine.answer(arrive, prefill, tokens)
        return arrive, first, ends, tokens

    def _closed(self, plan: TrialPlan, clients: int) -> tuple[Times, Times, Times, Times]:
        engine, free_s = self.engine, 0.0
        waiting = [0.0] * clients
        under_way: list[float] = []
        prefill, tokens = engine.draw(200_000, f"{plan.seed}/sizes")
        rows: list[tuple[float, float, float]] = []
        while waiting[0] < plan.span.arriving_s:
            number = len(rows)
            at_s = heappop(waiting)
            free_s = max(free_s, at_s) + float(prefill[number])
            while under_way and under_way[0] <= free_s:
                heappop(under_way)
            pace_s = engine.pace_s * (1.0 + len(under_way) / engine.twice_at)
            end_s = free_s + pace_s * (float(tokens[number]) - 1.0)
            heappush(under_way, end_s)
            heappush(waiting, end_s)
            rows.append((at_s, free_s, end_s))
        arrive, first, ends = np.array(rows).T
        return arrive, first, ends, tokens[: len(rows)]


def _stopped(arrive: Times, ends: Times, span: Span, watch: Watch) -> float | None:
    """When a watch that looks once a second breaks the trial off."""
    over = np.sort(ends)
    for at_s in np.arange(WATCHED_EVERY_S, span.arriving_s + WATCHED_EVERY_S, WATCHED_EVERY_S):
        due, ended = int(np.searchsorted(arrive, at_s)), int(np.searchsorted(over, at_s))
        if watch(TrialProgress(float(at_s), due, due, ended, ended)):
            return float(at_s)
    return None


def _request(number: int, at_s: float, first_s: float, end_s: float, tokens: int) -> RequestOutcome:
    return RequestOutcome(
        number, at_s, Ending.DONE, end_s, sent_s=at_s, first_s=first_s, last_s=end_s,
        output_tokens=tokens, first_tokens=1, chunks=tokens,
    )  # fmt: skip


def _left(number: int, at_s: float, stopped_s: float) -> RequestOutcome:
    return RequestOutcome(number, at_s, Ending.LEFT, stopped_s, sent_s=at_s)
