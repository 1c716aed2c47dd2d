"""Certifying a rate: fresh trials at one rate that must show every objective kept.

The answer of a fit is the rate that is as likely too high as too low. A certified rate is one at
which trials that nothing was fitted to stayed within the limits. Pure functions, called by
``search.py``.
"""

from collections.abc import Mapping, Sequence
from math import exp, log, sqrt
from statistics import NormalDist

from sluice.loadtest.sample import Count, Sample
from sluice.loadtest.slo_fit import SloFit

SOAKS = 3
# After a failure the rate goes down by this, and the allowed error by half, so that trying again
# and again does not buy a pass.
STEP_DOWN = 0.03
ERROR_FIRST = 0.05
# How likely soaks are to pass at the rate that is chosen for them, if the fit is right.
POWER_DEVIATIONS = 1.0


def certified(soaks: Sequence[Sample], limits: Mapping[str, float], error: float) -> bool:
    """Whether soaks at one rate show each objective kept, with this probability of a mistake."""
    if any(not one.valid or one.stopped for one in soaks):
        return False
    return all(
        upper_bound([batch for one in soaks for batch in one.counts.get(name, ())], error) <= limit
        for name, limit in limits.items()
    )


def upper_bound(batches: Sequence[Count], error: float) -> float:
    """A one-sided bound on the share that misses, by batch means, and never below what independent
    requests would give."""
    used = [one for one in batches if one.requests]
    requests = sum(one.requests for one in used)
    if len(used) < 2:
        return 1.0
    missed = sum(one.missed for one in used)
    share = missed / requests
    deviations = sum((one.missed - one.requests * share) ** 2 for one in used)
    deviation = sqrt(deviations * len(used) / (len(used) - 1)) / requests
    by_batches = share + student(error, len(used) - 1) * deviation
    # None of n missing has this probability where the share is -ln(error) / n.
    return max(by_batches, (missed - log(error)) / requests if missed == 0 else by_batches)


def student(error: float, freedom: int) -> float:
    """The point that Student's t exceeds with probability ``error`` (Cornish and Fisher's
    expansion; within 1 % from four degrees of freedom on)."""
    z = NormalDist().inv_cdf(1.0 - error)
    z3, z5, z7 = z**3, z**5, z**7
    return (
        z
        + (z3 + z) / (4.0 * freedom)
        + (5.0 * z5 + 16.0 * z3 + 3.0 * z) / (96.0 * freedom**2)
        + (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * z) / (384.0 * freedom**3)
    )


def soak_rate(fit: SloFit, limits: Mapping[str, float], soaked_s: float, error: float) -> float:
    """The rate to certify: what the fit thinks is exceeded with 95 %, or less where soaks of this
    length in all could not show that."""
    rate = fit.posterior.quantile(0.05)
    for name, response in fit.responses.items():
        limit, middle = limits[name], response.posterior.quantile(0.5)
        base = log(limit / (1.0 - limit))
        need = NormalDist().inv_cdf(1.0 - error) + POWER_DEVIATIONS
        for _ in range(200):
            share = 1.0 / (1.0 + exp(-base - response.steepness * log(rate / middle)))
            spread = sqrt(share * (1.0 - share) * response.dispersion / (rate * soaked_s))
            if share + need * spread <= limit:
                break
            rate *= 0.995
    return rate
