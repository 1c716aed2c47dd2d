"""The SLO rate of a replica by simulation: the server's own policy in virtual time.

``sluice plan --simulate`` asks for it, for the best few candidates of the closed form. All rates of
a search see the same arrivals and lengths (common random numbers), only faster or slower, so that
two rates differ by the rate and not by luck. How sure a share of one run is comes from batch means.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, sqrt

from sluice.planner.candidates import Candidates, cost_rank
from sluice.planner.names import CannotPlan
from sluice.planner.outcome import Outcome
from sluice.planner.plan import Plan, with_slo_rate
from sluice.planner.predict import Band
from sluice.planner.replicas import simulated_replica
from sluice.planner.simulation import Span, one_model_fleet, simulate
from sluice.workload.lengths import Fixed, Lognormal, Separate
from sluice.workload.synthetic import Sessions, Synthetic

# Runs per search: the bracket around the closed form's rate, and halvings of it.
RUNS_MAX = 6
STEP = 1.3
# A share of requests of a shorter run says little about a steady state.
REQUESTS_RULE = 20_000
PLACES_RULE = 20
WARM_UP = 0.1

# As many candidates are simulated, each in several runs of a bounded length.
SIMULATED_MAX = 3
REQUESTS_MIN, REQUESTS_MAX = 100, 10_000_000

Played = Callable[[float], Outcome]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a search found: the rate with its interval by batch means, and its runs by rate."""

    slo_rps: Band
    runs: tuple[tuple[float, float, float], ...]

    @property
    def words(self) -> str:
        """Each run: rate, share of requests within the targets, half of the 95 % interval."""
        return "; ".join(
            f"{rate:.3g} req/s {share:.1%} ± {half:.1%}" for rate, share, half in self.runs
        )


def with_simulation(found: Candidates, requests: int) -> Candidates:
    """The best few with the SLO rate that a simulation of so many requests a run finds, in the
    order that this gives.

    Raises ``CannotPlan`` for a number of requests that says nothing.
    """
    if not REQUESTS_MIN <= requests <= REQUESTS_MAX:
        raise CannotPlan(
            f"--simulate must be {REQUESTS_MIN:,} to {REQUESTS_MAX:,} requests, not {requests:,}"
        )
    plans = [simulated(each, requests) for each in (found.best, *found.others)[:SIMULATED_MAX]]
    plans.sort(key=cost_rank(plans))
    return Candidates(plans[0], tuple(plans[1:]), found.refused)


def simulated(found: Plan, requests: int, seed: int = 0) -> Plan:
    """The plan with the SLO rate that its replica has under sluice's policy.

    The closed form's band stays around it, as wide as before, with the interval of the runs.
    """
    played = _player(found, requests, seed)
    closed = found.replica.slo_rps
    result = search(played, closed.estimate, found.question.targets.percentile / 100.0)
    rate = result.slo_rps
    if rate.estimate <= 0.0:
        return _with_note(found, f"simulation: no rate reached the share; {result.words}")
    # A short run ends before a queue that grows for ever has made its requests late.
    capacity = found.replica.capacity_rps
    middle = min(rate.estimate, capacity.estimate)
    low = min(rate.low, middle * closed.low / closed.estimate, capacity.low)
    high = min(max(rate.high, middle * closed.high / closed.estimate), capacity.high)
    band = Band(middle, low, max(middle, high))
    note = (
        f"SLO rate by simulation with sluice's policy in front, {requests:,} requests a run; "
        f"closed form {closed.estimate:.3g} req/s; within the targets: {result.words}"
    )
    rule = max(REQUESTS_RULE, PLACES_RULE * found.replica.sequences_max)
    if requests < rule:
        note += f"; runs are shorter than {rule:,} requests, which a steady state takes"
    return _with_note(with_slo_rate(found, band, result.words), note)


def search(played: Played, start_rps: float, share: float) -> Simulated:
    """The highest rate at which ``share`` of the requests meet their targets.

    Goes up or down from ``start_rps`` in factors until the share is crossed, then halves. Zero
    where no tried rate reaches it.
    """
    runs: dict[float, tuple[float, float]] = {}

    def reached(rate: float) -> bool:
        outcome = played(rate)
        runs[rate] = outcome.attainment, outcome.attainment_half_width
        return outcome.attainment >= share

    low: float | None = None
    high: float | None = None
    rate = start_rps
    while len(runs) < RUNS_MAX and (low is None or high is None):
        if reached(rate):
            low, rate = rate, rate * STEP
        else:
            high, rate = rate, rate / STEP
    while len(runs) < RUNS_MAX and low is not None and high is not None:
        rate = sqrt(low * high)
        if reached(rate):
            low = rate
        else:
            high = rate
    ordered = sorted((rate, *runs[rate]) for rate in runs)
    return Simulated(_interval(ordered, low, share), tuple(ordered))


def _interval(runs: list[tuple[float, float, float]], reached: float | None, share: float) -> Band:
    """Where the share is crossed, straight between two runs, and the rates at which the ends of
    the runs' intervals cross it."""
    if reached is None:
        return Band(0.0, 0.0, 0.0)
    ends = []
    for side in (0.0, -1.0, 1.0):
        crossed = reached if side == 0.0 else runs[0][0] if side < 0 else runs[-1][0]
        for (rate, met, half), (after, met_after, half_after) in pairwise(runs):
            here, there = met + side * half - share, met_after + side * half_after - share
            if here >= 0.0 > there:
                crossed = rate + (after - rate) * here / (here - there)
                break
        ends.append(crossed)
    middle, low, high = ends
    return Band(middle, min(low, middle), max(high, middle))


def _player(found: Plan, requests: int, seed: int) -> Played:
    """Runs of one replica of the plan at a rate."""
    question = found.question
    lengths, targets = question.load.lengths, question.targets
    whole_s = None if targets.e2e_s is None else targets.e2e_s - targets.retrieval_s
    targets = replace(targets, ttft_s=targets.engine_ttft_s, e2e_s=whole_s)
    fleet = one_model_fleet(simulated_replica(found.model, question.load), 1, targets)
    own = max(1, round(lengths.computed))
    variation = lengths.output_variation
    output = Lognormal(lengths.output, variation) if variation else Fixed(round(lengths.output))
    shared = Sessions(system_tokens=round(lengths.prompt) - own)
    span = Span(requests, ceil(WARM_UP * requests))

    def played(rate: float) -> Outcome:
        workload = Synthetic(rate, Separate(Fixed(own), output), sessions=shared)
        return simulate(workload, fleet, seed=seed, span=span)

    return played


def _with_note(found: Plan, note: str) -> Plan:
    return replace(found, notes=(*found.notes, note))
