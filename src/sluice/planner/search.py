"""The SLO rate of a replica by simulation: the server's own policy in virtual time.

``sluice plan --simulate`` asks for it, for the best few candidates of the closed form. All rates of
a search see the same arrivals and lengths (common random numbers), only faster or slower, so that
two rates differ by the rate and not by luck. How sure a share of one run is comes from batch means.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, sqrt

from sluice.planner.at_once import Told, at_once
from sluice.planner.candidates import Candidates, cost_rank
from sluice.planner.names import CannotPlan, NoFleet, shown_s
from sluice.planner.outcome import Outcome
from sluice.planner.plan import Plan, with_slo_rate
from sluice.planner.predict import Band
from sluice.planner.replicas import simulated_replica
from sluice.planner.simulation import WARM_UP, Span, one_model_fleet, simulate
from sluice.workload.lengths import Fixed, Lognormal, Separate
from sluice.workload.synthetic import Sessions, Synthetic

# Runs per search: the bracket around the closed form's rate, and halvings of it. The factor from
# one to the next squares itself until the share is crossed, so that the last runs of a bracket are
# of requests that are alone in the replica.
RUNS_MAX = 6
BRACKET_RUNS_MAX = 12
STEP, STEP_MAX = 1.3, 4.0
# Shares are taken as straight between two runs: their rates must not be further apart.
APART_MAX = 1.5
# A share of requests of a shorter run says little about a steady state.
REQUESTS_RULE = 20_000
PLACES_RULE = 20

# As many candidates are simulated, each in several runs of a bounded length.
SIMULATED_MAX = 3
REQUESTS_MIN, REQUESTS_MAX = 500, 10_000_000

# A run is broken off where so many times the misses that the share allows are certain.
MISSES_CERTAIN = 2.0

Played = Callable[[float], Outcome]


def ignore(_done: int, _total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a search found: the rate with its interval by batch means, and its runs by rate.

    ``slowest`` is the run at the lowest rate.
    """

    slo_rps: Band
    runs: tuple[tuple[float, float, float], ...]
    slowest: Outcome

    @property
    def words(self) -> str:
        """Each run: rate, share of requests within the targets, half of the 95 % interval."""
        return "; ".join(
            f"{rate:.3g} req/s {share:.1%} ± {half:.1%}" for rate, share, half in self.runs
        )


def with_simulation(found: Candidates, requests: int, told: Told = ignore) -> Candidates:
    """The best few with the SLO rate that a simulation of so many requests a run finds, in the
    order that this gives; on as many cores as there are, up to one for each.

    Raises ``CannotPlan`` for a number of requests that says nothing, and ``NoFleet`` where no
    simulation of them reaches the share. ``told`` hears of requests that were simulated.
    """
    if not REQUESTS_MIN <= requests <= REQUESTS_MAX:
        raise CannotPlan(
            f"--simulate must be {REQUESTS_MIN:,} to {REQUESTS_MAX:,} requests, not {requests:,}"
        )
    asked = (found.best, *found.others)[:SIMULATED_MAX]
    answers = at_once([partial(simulated, each, requests) for each in asked], told)
    plans = [answer for answer in answers if isinstance(answer, Plan)]
    refused = [*found.refused, *(str(answer) for answer in answers if isinstance(answer, NoFleet))]
    if not plans:
        raise NoFleet("; ".join(refused))
    plans.sort(key=cost_rank(plans))
    return Candidates(plans[0], tuple(plans[1:]), tuple(refused))


def simulated(found: Plan, requests: int, told: Told = ignore, *, seed: int = 0) -> Plan:
    """The plan with the SLO rate that its replica has under sluice's policy.

    The closed form's band stays around it, as wide as before, with the interval of the runs.
    Raises ``NoFleet`` where the share is reached at no rate: then the closed form is refuted.
    """
    closed = found.replica.slo_rps
    share = found.question.targets.percentile / 100.0
    played = _player(found, requests, share, seed, told)
    # A short run ends before a queue that grows for ever has made its requests late.
    capacity = found.replica.capacity_rps
    result = search(played, closed.estimate, share, capacity.estimate)
    rate = result.slo_rps
    if rate.estimate <= 0.0:
        raise _refuted(found, result, share)
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


def search(played: Played, start_rps: float, share: float, most_rps: float = inf) -> Simulated:
    """The highest rate up to ``most_rps`` at which ``share`` of the requests meet their targets.

    Goes up or down from ``start_rps`` in factors until the share is crossed, then halves. Zero
    where not even requests that are alone reach it. A rate at which the queue grows is too high,
    however few were late before the run ended.
    """
    runs: dict[float, tuple[float, float]] = {}
    slowest: tuple[float, Outcome] | None = None

    def reached(rate: float) -> bool:
        nonlocal slowest
        outcome = played(rate)
        runs[rate] = outcome.attainment, outcome.attainment_half_width
        if slowest is None or rate < slowest[0]:
            slowest = rate, outcome
        return outcome.attainment >= share and not outcome.queue_grows

    low: float | None = None
    high: float | None = None
    rate, step = min(start_rps, most_rps), STEP
    while len(runs) < BRACKET_RUNS_MAX and (low is None or high is None):
        if reached(rate):
            if rate >= most_rps:
                low = rate
                break
            low, rate = rate, min(rate * step, most_rps)
        else:
            high, rate = rate, rate / step
        step = min(step * step, STEP_MAX)
    while low is not None and high is not None:
        if len(runs) >= RUNS_MAX and high / low <= APART_MAX:
            break
        rate = sqrt(low * high)
        if reached(rate):
            low = rate
        else:
            high = rate
    ordered = sorted((rate, *runs[rate]) for rate in runs)
    assert slowest is not None  # noqa: S101 - the bracket has a run
    return Simulated(_interval(ordered, low, share), tuple(ordered), slowest[1])


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


def _refuted(found: Plan, result: Simulated, share: float) -> NoFleet:
    """That no rate reaches the share, with what requests have at the lowest one."""
    rate, deployment = result.runs[0][0], found.model.deployment
    retrieval_s = found.question.targets.retrieval_s
    whole = result.slowest.whole
    first_s, later_s = whole.ttft_s.quantile(share), whole.tpot_s.quantile(share)
    seen = "all were refused" if not whole.e2e_s.count else "it has " + " and ".join(
        f"{name} {shown_s(seconds)}"
        for name, seconds in (
            ("TTFT", None if first_s is None else first_s + retrieval_s),
            ("TPOT", later_s),
        )
        if seconds is not None
    )  # fmt: skip
    return NoFleet(
        f"simulated with sluice's policy in front, no rate meets the targets on "
        f"{deployment.layout.devices} x {deployment.accelerator.name} for {share:.3g} of the "
        f"requests, where the closed form expects {found.replica.slo_rps.estimate:.3g} req/s: at "
        f"{rate:.2g} req/s {result.runs[0][1]:.1%} meet them and {seen} at that share; ask for "
        f"more than that, or for more tensor parallelism"
    )


def _player(found: Plan, requests: int, share: float, seed: int, told: Told) -> Played:
    """Runs of one replica of the plan at a rate, as far as they are needed to say whether the
    share is reached."""
    question = found.question
    lengths, targets = question.load.lengths, question.targets
    whole_s = None if targets.e2e_s is None else targets.e2e_s - targets.retrieval_s
    targets = replace(targets, ttft_s=targets.engine_ttft_s, e2e_s=whole_s)
    replica = simulated_replica(found.model, question.load)
    fleet = one_model_fleet(replica, 1, targets, round(question.chunk_tokens))
    own = max(1, round(lengths.computed))
    variation = lengths.output_variation
    output = Lognormal(lengths.output, variation) if variation else Fixed(round(lengths.output))
    shared = Sessions(system_tokens=round(lengths.prompt) - own)
    warm_up = int(WARM_UP * requests)
    misses_max = int(MISSES_CERTAIN * (1.0 - share) * (requests - warm_up))
    runs = 0

    def tell(count: int) -> None:
        told(runs * requests + count, max(RUNS_MAX, runs + 1) * requests)

    span = Span(requests, warm_up, misses_max=misses_max, told=tell)

    def played(rate: float) -> Outcome:
        nonlocal runs
        workload = Synthetic(rate, Separate(Fixed(own), output), sessions=shared)
        outcome = simulate(workload, fleet, seed=seed, span=span)
        runs += 1
        return outcome

    return played


def _with_note(found: Plan, note: str) -> Plan:
    return replace(found, notes=(*found.notes, note))
