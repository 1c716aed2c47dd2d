"""Capacity and SLO rate of one replica, in closed form.

Capacity is the largest rate with a stable queue: as many requests in the replica as its KV pool and
its batch limit hold, replaced as they end. The SLO rate is the largest rate at which the chosen
percentile of TTFT and TPOT meets its target under Poisson arrivals. Sources of the approximations:

- requests in the replica: Little's law, and Poisson counts around the mean (M/G/infinity);
- TPOT of a request averages the batch over its own life, which takes 0.86 of the counts' deviation
  (a correlation that falls by e over one life);
- waiting for prefill: M/D/1 with its exponential tail; waiting for a place: the share of time in
  which all places are taken, with the drain of the places as tail.

Fleets with queues, priorities and faults need the simulation; this is the filter before it.
"""

from dataclasses import dataclass, replace
from math import erfc, exp, floor, inf, log, sqrt
from statistics import NormalDist

from sluice.planner.memory import Budget, NoRoom, budget_of, sequences_max, tokens_max
from sluice.planner.predict import Band, Residual, StepModel, snapped
from sluice.planner.steady import Lengths
from sluice.planner.work import Batch, work_of

LIFE_AVERAGE = 0.86
# From the arrival to the first step that has the request in it: what in-flight batching shows.
DISPATCH_STEPS = 1.5
BATCH_MAX = 1024
GRID_STEPS = 4  # concurrencies tried per doubling
# Fewer requests than this in a replica on average: each is alone, as far as a percentile can tell.
LEAST = 2.0**-6


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds to the first token, between tokens and, where given, to the last one, met by
    ``percentile`` of the requests.

    ``retrieval_s`` is that percentile of the time before the prompt is known. It is part of TTFT
    and of the whole, and is taken off both: percentiles of parts add up to at least that of the
    sum, so this errs on the safe side.
    """

    ttft_s: float
    tpot_s: float
    percentile: float = 95.0
    e2e_s: float | None = None
    retrieval_s: float = 0.0

    @property
    def engine_ttft_s(self) -> float:
        """What retrieval leaves of the TTFT target."""
        return self.ttft_s - self.retrieval_s

    def missed(self, found: "Moment", output: float) -> str:
        """The name of the target that a moment misses, empty where it meets all.

        The whole time is that of a request with ``output`` tokens.
        """
        if found.tpot_s > self.tpot_s:
            return "tpot"
        if found.ttft_s > self.engine_ttft_s:
            return "ttft"
        if self.e2e_s is not None and self.retrieval_s + found.e2e_s(output) > self.e2e_s:
            return "e2e"
        return ""


@dataclass(frozen=True, slots=True)
class Load:
    """What the requests look like, and how many of them an engine takes into one step."""

    lengths: Lengths
    batch_max: int = BATCH_MAX


@dataclass(frozen=True, slots=True)
class Moment:
    """A replica with ``concurrency`` requests decoding on average: its rate and latencies."""

    concurrency: float
    rate_rps: float
    tpot_s: float
    ttft_s: float

    def e2e_s(self, output: float) -> float:
        """From the arrival at the engine to the last of so many tokens."""
        return self.ttft_s + (output - 1.0) * self.tpot_s


@dataclass(frozen=True, slots=True)
class ReplicaEstimate:
    """What one replica can do, and what stops it."""

    capacity_rps: Band
    slo_rps: Band
    binding: str
    at_slo: Moment | None
    sequences_max: int
    kv_tokens_max: int
    prefill_share: float
    budget: Budget
    residual: Residual


def places(model: StepModel, load: Load) -> tuple[float, Budget]:
    """Requests that a replica holds at once, and the memory behind it.

    Raises ``NoRoom`` where the model does not fit, or not even one request.
    """
    deployment = model.deployment
    budget = budget_of(deployment, memory_share=model.memory_share)
    resident = load.lengths.resident_tokens
    held = sequences_max(deployment, budget, resident)
    if budget.pool_bytes <= 0 or held < deployment.layout.groups:
        raise NoRoom(model.deployment, budget, resident)
    return min(held, float(load.batch_max * deployment.layout.groups)), budget


def capacity_rps(model: StepModel, load: Load) -> Band:
    """Most requests per second with a stable queue.

    Longer prompts never raise it: the residual is constant between half doublings of the prompt,
    where the formula alone decides, and across them the least is taken.
    """
    prompt = load.lengths.prompt
    band = _raw_capacity(model, load, prompt)
    low, mid, high = band.low, band.estimate, band.high
    edge = snapped(prompt * (1.0 - load.lengths.cached)) / (1.0 - load.lengths.cached)
    while edge >= 32.0:
        # Just below an edge the residual of the interval below holds.
        shorter = _raw_capacity(model, load, edge * (1.0 - 1e-9))
        low, mid, high = min(low, shorter.low), min(mid, shorter.estimate), min(high, shorter.high)
        edge /= sqrt(2.0)
    return Band(mid, low, high)


def _raw_capacity(model: StepModel, load: Load, prompt: float) -> Band:
    lengths = replace(load.lengths, prompt=prompt)
    held, _ = places(model, replace(load, lengths=lengths))
    # The field is asked where the interval begins, so that it does not move within.
    first = replace(lengths, prompt=snapped(lengths.computed) / (1.0 - lengths.cached))
    asked, _ = places(model, replace(load, lengths=first))
    residual = model.residual(first, asked)
    step_s = model.calculated_s(lengths, held) * exp(residual.mean)
    rate = held / (lengths.output * step_s)
    width = exp(residual.half_width)
    return Band(rate, rate / width, rate * width)


def moment(model: StepModel, load: Load, concurrency: float, share: float, slow: float) -> Moment:
    """Rate and percentile latencies with ``concurrency`` requests decoding on average.

    ``share`` is the percentile as a fraction, ``slow`` a factor on all step times.
    """
    lengths = load.lengths
    factor = slow * exp(model.residual(lengths, concurrency).mean)
    step_s = factor * model.calculated_s(lengths, concurrency)
    spread = NormalDist().inv_cdf(share) * LIFE_AVERAGE * sqrt(concurrency)
    high = max(concurrency + spread, 1.0)
    tpot_s = max(step_s, factor * model.calculated_s(lengths, high))
    rate = concurrency / (lengths.output * step_s)
    return Moment(
        concurrency, rate, tpot_s, _ttft_s(model, load, concurrency, (share, factor, rate))
    )


def moment_at(model: StepModel, load: Load, rate_rps: float, share: float) -> Moment:
    """The replica at this rate, or full where it cannot do more."""
    held, _ = places(model, load)
    low, high = 0.0, held
    for _ in range(24):
        middle = (low + high) / 2.0
        step_s = model.step(load.lengths, middle).estimate
        if middle / (load.lengths.output * step_s) < rate_rps:
            low = middle
        else:
            high = middle
    return moment(model, load, max(high, 1e-3), share, 1.0)


def _ttft_s(
    model: StepModel, load: Load, concurrency: float, state: tuple[float, float, float]
) -> float:
    """The percentile of the time to the first token: dispatch, waits and the own prefill."""
    share, factor, rate = state
    lengths, groups = load.lengths, model.deployment.layout.groups
    rows = concurrency / groups
    context = lengths.resident_tokens
    coefficients = model.level[1]
    chunk = min(lengths.computed, model.chunk_tokens)

    def step_s(prefill: float) -> float:
        batch = Batch(rows, context, prefill, lengths.computed, lengths.past)
        return factor * coefficients.step_duration_s(work_of(model.deployment, batch))

    decode_s, mixed_s = step_s(0.0), step_s(chunk)
    chunks = lengths.computed / chunk
    rest = lengths.computed - floor(chunks) * chunk
    own_s = floor(chunks) * mixed_s + (step_s(rest) if rest > 0.0 else 0.0)
    # A prompt takes from the others what its steps are longer.
    service_s = chunks * (mixed_s - decode_s if chunks <= 1 else mixed_s)
    wait_s = _tail_s(min(0.999, rate / groups * service_s), service_s, share)
    held, _ = places(model, load)
    life_s = lengths.output * decode_s
    own_s = model.first_token_factor * (DISPATCH_STEPS * decode_s + own_s)
    return own_s + wait_s + _place_s(concurrency, held, life_s, share)


def _tail_s(busy: float, service_s: float, share: float) -> float:
    """Percentile of the wait in M/D/1, by its exponential tail."""
    if busy <= 1.0 - share:
        return 0.0
    return service_s / (2.0 * (1.0 - busy)) * log(busy / (1.0 - share))


def _place_s(concurrency: float, held: float, life_s: float, share: float) -> float:
    """Percentile of the wait for a place in the batch."""
    free = held - concurrency
    if free <= 0:
        return inf
    taken = 0.5 * erfc(free / sqrt(2.0 * concurrency))
    if taken <= 1.0 - share:
        return 0.0
    return life_s / free * log(taken / (1.0 - share))


def estimate(
    model: StepModel, load: Load, targets: Targets, *, saturated: StepModel | None = None
) -> ReplicaEstimate:
    """Capacity and SLO rate of a replica; ``saturated`` predicts capacity where another fit does.

    The SLO rate is zero where not even a lone request meets the targets.
    """
    held, budget = places(model, load)
    capacity = capacity_rps(saturated or model, load)
    best, limits = _search(model, load, targets, 1.0)
    residual = model.residual(load.lengths, held if best is None else best.concurrency)
    width = exp(residual.half_width)
    low = slo_moment(model, load, targets, width)
    high = slo_moment(model, load, targets, 1.0 / width)
    rates = [0.0 if found is None else found.rate_rps for found in (best, low, high)]
    rate = min(rates[0], capacity.estimate)
    slo = Band(rate, min(rates[1], capacity.low, rate), max(min(rates[2], capacity.high), rate))
    capped = rate < rates[0]
    if capped:
        best = moment_at(model, load, rate, targets.percentile / 100.0)
    concurrency = held if best is None else best.concurrency
    state = _prefill_share(model, load, concurrency)
    return ReplicaEstimate(
        capacity_rps=capacity,
        slo_rps=slo,
        binding="capacity" if capped else limits,
        at_slo=best,
        sequences_max=int(held),
        kv_tokens_max=int(tokens_max(model.deployment, budget, load.lengths.resident_tokens)),
        prefill_share=state,
        budget=budget,
        residual=residual,
    )


def slo_moment(model: StepModel, load: Load, targets: Targets, slow: float = 1.0) -> Moment | None:
    """The replica at its SLO rate, None where not even one request meets the targets.

    ``slow`` is a factor on all step times.
    """
    return _search(model, load, targets, slow)[0]


def _prefill_share(model: StepModel, load: Load, concurrency: float) -> float:
    from_steady = model.calculated_s(load.lengths, concurrency)
    cached = replace(load.lengths, cached=1.0)
    without = model.calculated_s(cached, concurrency)
    return max(0.0, 1.0 - without / from_steady)


def _search(
    model: StepModel, load: Load, targets: Targets, slow: float
) -> tuple[Moment | None, str]:
    """The moment with the highest rate that meets the targets, and what the next one would break.

    All concurrencies of a fixed grid are tried, so that a tighter target only leaves fewer. Those
    below one matter where no higher one meets the targets.
    """
    held, _ = places(model, load)
    share = targets.percentile / 100.0
    best: Moment | None = None
    limits = (
        "kv memory" if held < load.batch_max * model.deployment.layout.groups else "batch limit"
    )
    step, concurrency = 2.0 ** (1.0 / GRID_STEPS), 1.0
    failed = ""
    while concurrency < held:
        found = moment(model, load, concurrency, share, slow)
        late = targets.missed(found, load.lengths.output)
        if late:
            failed = failed or late
            if found.tpot_s > 4 * targets.tpot_s:
                break
        elif best is None or found.rate_rps > best.rate_rps:
            best, failed = found, ""
        concurrency *= step
    concurrency = min(1.0, held)
    while best is None and concurrency > LEAST:
        concurrency /= step
        found = moment(model, load, concurrency, share, slow)
        best = None if targets.missed(found, load.lengths.output) else found
    if best is not None and failed:
        best = _refined(model, load, targets, (best, step, slow))
    return best, failed or limits


def _refined(
    model: StepModel, load: Load, targets: Targets, start: tuple[Moment, float, float]
) -> Moment:
    """Between the last concurrency that passes and the next, which does not."""
    best, step, slow = start
    low, high = best.concurrency, best.concurrency * step
    for _ in range(6):
        middle = sqrt(low * high)
        found = moment(model, load, middle, targets.percentile / 100.0, slow)
        if not targets.missed(found, load.lengths.output):
            low = middle
            best = found if found.rate_rps > best.rate_rps else best
        else:
            high = middle
    return best
