"""The SLO rate from the shares of requests that missed each objective, over all trials at once.

The share that misses an objective grows with the rate, near its limit on a straight line of
logarithms: logit p(rate) = logit(limit) + steepness x (ln rate - ln SLO rate). What is not known is
the SLO rate and the steepness; every trial says something about both, and the posterior over a grid
of them says how much. Counts are taken for as much less than independent ones as they vary more
(quasi-likelihood). Pure functions of numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from sluice.loadtest.sample import Count

Grid = NDArray[np.float64]

# What steepness engines have: from the waiting time of a single server far from its capacity to a
# batch that is suddenly full. Log-normal.
STEEPNESS_USUAL, STEEPNESS_SPREAD = 12.0, 0.5
_STEEPNESS = np.exp(np.linspace(log(3.0), log(300.0), 41))
RATES = 400
# How far from the tested rates an answer may be.
BEYOND = 0.05
# The line is straight near the answer only. Trials count by how near they are, with these widths
# in the logarithm of the rate: first to find about where the answer is, then around it.
WIDTHS = (0.35, 0.1, 0.1)
# How much is known of the dispersion before trials are compared: as much as so many of them tell.
DISPERSION_FREEDOM = 8.0
# Requests that miss a limit are at least as dependent as this part of the server's memory makes
# them; chosen so that intervals cover as often as they say in ``benchmarks/search.py``.
MEMORY_PART = 0.15
# Trials tell how much they scatter where the share that misses is within this of the limit, as a
# factor: further away hardly any miss, or nearly all.
TELLING = 5.0


@dataclass(frozen=True, slots=True)
class Dose:
    """One trial's batches for one objective, at its rate. Of ``overload`` it is said, not counted,
    that all would miss; how much counts vary is not seen there. ``memory_s`` is how long the server
    remembers its load."""

    rate_rps: float
    batches: tuple[Count, ...]
    memory_s: float = 0.0
    overload: bool = False

    @property
    def requests(self) -> int:
        """All batches together."""
        return sum(one.requests for one in self.batches)

    @property
    def missed(self) -> int:
        """All batches together."""
        return sum(one.missed for one in self.batches)


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is known of a rate: probabilities over a grid of rates."""

    rates_rps: Grid
    weights: Grid

    def quantile(self, share: float) -> float:
        """The rate below which the true one is with this probability."""
        below = np.cumsum(self.weights) - 0.5 * self.weights
        return float(np.interp(share, below, self.rates_rps))


@dataclass(frozen=True, slots=True)
class Response:
    """One objective: the SLO rate that it alone would allow, the dispersion of its counts and the
    mean steepness."""

    posterior: Posterior
    dispersion: float
    steepness: float


@dataclass(frozen=True, slots=True)
class SloFit:
    """All objectives together: the lowest of their rates, and how likely each sets it."""

    posterior: Posterior
    responses: Mapping[str, Response]
    binding: Mapping[str, float]


def fit(doses: Mapping[str, Sequence[Dose]], limits: Mapping[str, float]) -> SloFit:
    """The SLO rate by all trials; ``limits`` are the shares that may miss each objective.

    Every objective needs one trial with requests.
    """
    tested = [dose.rate_rps for each in doses.values() for dose in each if dose.requests]
    low, high = log(min(tested)) - 0.7, log(max(tested)) + BEYOND
    rates = np.exp(np.linspace(low, high, RATES))
    responses = {name: respond(each, limits[name], rates) for name, each in doses.items()}
    above = {
        name: 1.0 - np.cumsum(one.posterior.weights) + one.posterior.weights
        for name, one in responses.items()
    }
    all_above = np.prod(list(above.values()), axis=0)
    weights = np.append(all_above[:-1] - all_above[1:], all_above[-1])
    binding = {
        name: float((one.posterior.weights * all_above / np.maximum(above[name], 1e-300)).sum())
        for name, one in responses.items()
    }
    total = sum(binding.values())
    return SloFit(
        Posterior(rates, weights / weights.sum()),
        responses,
        {name: share / total for name, share in binding.items()},
    )


def respond(doses: Sequence[Dose], limit: float, rates: Grid) -> Response:
    """One objective. Trials far from the answer are left out once it is known where it is."""
    used = [dose for dose in doses if dose.requests]
    whole = [(dose, 1.0) for dose in used]
    response = _posterior(whole, limit, rates, (expected_dispersion(used), DISPERSION_FREEDOM))
    for width in WIDTHS:
        middle = response.posterior.quantile(0.5)
        near = []
        for dose in used:
            share = _share(dose.rate_rps, limit, response)
            # Where half miss, independent counts would tell most; these depend on each other most.
            telling = min(1.0, limit * (1.0 - limit) / (share * (1.0 - share)))
            apart = log(dose.rate_rps / middle) / width
            near.append((dose, telling * exp(-0.5 * apart * apart)))
        response = _posterior(near, limit, rates, _dispersion(used, limit, response))
    return response


def _share(rate_rps: float, limit: float, response: Response) -> float:
    """The share that the fit expects to miss at a rate."""
    apart = log(rate_rps / response.posterior.quantile(0.5))
    logit = log(limit / (1.0 - limit)) + response.steepness * apart
    return 1.0 / (1.0 + exp(-max(-30.0, min(30.0, logit))))


def expected_dispersion(doses: Sequence[Dose]) -> float:
    """What the batches of each trial and the server's memory let expect."""
    calm = [dose for dose in doses if not dose.overload and dose.memory_s > 0.0]
    memories = [dose.rate_rps * dose.memory_s for dose in calm]
    by_memory = MEMORY_PART * sum(memories) / len(memories) if memories else 1.0
    return max(within(doses), by_memory)


def _dispersion(doses: Sequence[Dose], limit: float, response: Response) -> tuple[float, float]:
    """The dispersion by how trials scatter around the fit, together with what was expected, and
    how many degrees of freedom it has (conjugate for a variance)."""
    total, telling = 0.0, list[Dose]()
    for dose in doses:
        share = _share(dose.rate_rps, limit, response)
        if dose.overload or not limit / TELLING <= share <= min(0.5, limit * TELLING):
            continue
        telling.append(dose)
        spread = dose.requests * share * (1.0 - share)
        total += (dose.missed - dose.requests * share) ** 2 / spread
    expected = DISPERSION_FREEDOM * expected_dispersion(telling or doses)
    freedom = DISPERSION_FREEDOM + max(0, len(telling) - 1)
    return max(1.0, (expected + total) / freedom), freedom


def _posterior(
    doses: Sequence[tuple[Dose, float]],
    limit: float,
    rates: Grid,
    known: tuple[float, float],
) -> Response:
    """The grid, with each dose by its weight. What is not known of the dispersion makes the tails
    heavier, as Student's t are."""
    dispersion, freedom = known
    steepness = _STEEPNESS[:, None]
    prior = -0.5 * ((np.log(steepness) - log(STEEPNESS_USUAL)) / STEEPNESS_SPREAD) ** 2
    support = np.zeros((len(_STEEPNESS), len(rates)))
    base = log(limit / (1.0 - limit))
    for dose, weight in doses:
        logit = base + steepness * (log(dose.rate_rps) - np.log(rates)[None, :])
        missed, met = weight * dose.missed, weight * (dose.requests - dose.missed)
        # ln p = -ln(1 + e^-x), ln(1 - p) = -ln(1 + e^x)
        support -= missed * np.logaddexp(0.0, -logit) + met * np.logaddexp(0.0, logit)
    deviance = 2.0 * (support.max() - support) / dispersion
    support = prior - 0.5 * (freedom + 1.0) * np.log1p(deviance / freedom)
    likely = np.exp(support - support.max())
    likely /= likely.sum()
    return Response(
        Posterior(rates, likely.sum(axis=0)),
        dispersion,
        float((likely * steepness).sum()),
    )


def within(doses: Sequence[Dose]) -> float:
    """How many times more counts of batches vary within their trials than independent ones would;
    at least 1. Trials count by what they can tell."""
    found = expected = 0.0
    for dose in doses:
        share = dose.missed / dose.requests
        if not 0.0 < share < 1.0:
            continue
        for batch in dose.batches:
            if batch.requests:
                spread = batch.requests * share * (1.0 - share)
                found += (batch.missed - batch.requests * share) ** 2 / spread
        expected += len(dose.batches) - 1
    return max(1.0, found / expected) if expected else 1.0
