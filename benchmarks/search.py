"""How near searches come to a truth that is known, beside plain bisection.

Run with ``python -m benchmarks.search [SEEDS] [--core SEEDS] [--quick]``. Engines are simulated and
nothing waits for a clock: a formula of queues for many seeds, and the production core in virtual
time. The truth is found by runs of hundreds of thousands of requests. Printed for each method:
median of estimate over truth, its 5th and 95th percentile, how often it is within 5 %, how often
the 90 % interval holds the truth and how wide it is, what was certified, and the simulated time.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from benchmarks.truth.core import CoreEngine, CoreRunner, CoreStimulus
from benchmarks.truth.queue import QueueEngine, QueueRunner, QueueStimulus, true_rate
from sluice.loadtest.run_search import player, run_search
from sluice.loadtest.search import BUDGET_QUICK_S, BUDGET_S, Question, Search
from sluice.loadtest.trial import Metric, Objective, Runner, Span, Stimulus

BISECTIONS = 7
TABLE = "{:<34}{:>8}{:>16}{:>9}{:>9}{:>9}{:>11}{:>8}{:>8}"
TRUTH_S = 30_000.0


@dataclass(frozen=True, slots=True)
class Case:
    """An engine with one objective. ``about_rps`` is where its truth is looked for."""

    name: str
    runner: Runner
    stimulus: Stimulus
    objective: Objective
    truth: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one run of a method said, as parts of the truth."""

    estimate: float | None
    low: float | None
    high: float | None
    certified: float | None
    spent_s: float


def cases() -> Iterator[Case]:
    """Two queues, on whose first a search is tuned no less than on the others, and the core."""
    quick = QueueEngine("many short prompts", prefill_s=0.02, twice_at=150.0)
    slow = QueueEngine("few long prompts")
    for engine, metric, limit_s in (
        (quick, Metric.TTFT, 0.3),
        (quick, Metric.TPOT, 0.04),
        (slow, Metric.TTFT, 1.0),
    ):
        objective = Objective(metric, limit_s)
        yield Case(
            f"queue, {engine.name}, {metric.value}",
            QueueRunner(engine),
            QueueStimulus(),
            objective,
            lambda engine=engine, objective=objective: true_rate(engine, [objective], 1_000_000),  # type: ignore[misc]
        )
    core = CoreEngine()
    for metric, limit_s, about_rps in ((Metric.TTFT, 0.5, 9.3), (Metric.TPOT, 0.1, 8.9)):
        objective = Objective(metric, limit_s)
        runner, stimulus = CoreRunner(core), CoreStimulus(core.lengths)
        yield Case(
            f"core, {metric.value}",
            runner,
            stimulus,
            objective,
            lambda r=runner, s=stimulus, o=objective, a=about_rps: _crossing(r, s, o, a),  # type: ignore[misc]
        )


def _crossing(runner: Runner, stimulus: Stimulus, objective: Objective, about_rps: float) -> float:
    """Where the share of long runs crosses the limit: a line of logits through rates around it."""
    rates = [about_rps * part for part in (0.96, 1.0, 1.04)]
    logits = []
    for seed, rate in enumerate(rates):
        span = Span(TRUTH_S / len(rates), warm_s=60.0, tail_s=20.0)
        counted = runner.run(stimulus.open_loop(rate, span, 900 + seed)).counted
        share = sum(bool(objective.missed(one)) for one in counted) / len(counted)
        logits.append(log(share / (1.0 - share)))
    slope, offset = np.polyfit(np.log(rates), logits, 1)
    limit = objective.share_max
    return exp((log(limit / (1.0 - limit)) - float(offset)) / float(slope))


def searched(case: Case, seed: int, budget_s: float) -> Answer:
    """What a search says."""
    objectives = {case.objective.metric.value: case.objective}
    search = Search(Question(objectives, budget_s=budget_s, seed=1000 + seed))
    run_search(search, player(case.runner), case.stimulus)
    slo = search.found().slo
    if slo is None:
        return Answer(None, None, None, None, search.spent_s)
    return Answer(slo.estimate_rps, slo.low_rps, slo.high_rps, slo.certified_rps, search.spent_s)


def bisected(case: Case, seed: int, budget_s: float, capacity_rps: float) -> Answer:
    """What bisection on the measured percentile says, which is given the true capacity."""
    low, high, spent_s = 0.3 * capacity_rps, capacity_rps, 0.0
    for number in range(BISECTIONS):
        rate = sqrt(low * high)
        counted_s = budget_s / BISECTIONS - 15.0
        span = Span(counted_s, warm_s=0.1 * counted_s)
        outcome = case.runner.run(case.stimulus.open_loop(rate, span, 100 * seed + number))
        counted = outcome.counted
        missed = sum(bool(case.objective.missed(one)) for one in counted)
        spent_s += outcome.took_s
        low, high = (
            (rate, high) if missed <= case.objective.share_max * len(counted) else (low, rate)
        )
    return Answer(sqrt(low * high), None, None, None, spent_s)


def row(name: str, answers: Sequence[Answer], truth: float) -> str:
    """One line of the table."""
    told = np.array([one.estimate for one in answers if one.estimate is not None]) / truth
    if not len(told):
        return TABLE.format(name, "none", "", "", "", "", "", "", "")
    p5, p50, p95 = np.quantile(told, [0.05, 0.5, 0.95])
    within = float((np.abs(told - 1.0) <= 0.05).sum()) / len(answers)
    bounds = [(one.low, one.high) for one in answers if one.low is not None]
    wide = [(low, high) for low, high in bounds if high is not None]
    held = sum(low <= truth <= (truth if high is None else high) for low, high in bounds)
    half = np.mean([(high - low) / 2.0 / truth for low, high in wide]) if wide else None
    rates = [one.certified / truth for one in answers if one.certified is not None]
    return TABLE.format(
        name,
        f"{p50:.3f}",
        f"{p5:.3f}-{p95:.3f}",
        f"{within:.0%}",
        f"{held / len(answers):.0%}" if bounds else "-",
        "-" if half is None else f"±{half:.1%}",
        f"{len(rates)} x {np.mean(rates):.3f}" if rates else "-",
        f"{sum(rate > 1.0 for rate in rates)}" if rates else "-",
        f"{np.mean([one.spent_s for one in answers]):.0f}",
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=100)
    parser.add_argument("--core", type=int, default=20, help="Seeds on the core, which is slower.")
    parser.add_argument("--quick", action="store_true", help="Searches of 5 minutes.")
    parser.add_argument("--only", default="", help="Cases whose names hold this.")
    asked = parser.parse_args()
    budget_s = BUDGET_QUICK_S if asked.quick else BUDGET_S
    print(
        TABLE.format("", "median", "5-95 %", "in 5 %", "covered", "half", "certified", "false", "s")
    )
    for case in cases():
        seeds = asked.core if case.name.startswith("core") else asked.seeds
        if asked.only not in case.name or not seeds:
            continue
        truth = case.truth()
        print(f"{case.name}: truth {truth:.2f} requests/s, {seeds} seeds", flush=True)
        found = [searched(case, seed, budget_s) for seed in range(seeds)]
        print(row("  search", found, truth), flush=True)
        plain = [bisected(case, seed, budget_s, 1.35 * truth) for seed in range(seeds)]
        print(row("  bisection", plain, truth), flush=True)


if __name__ == "__main__":
    main()
