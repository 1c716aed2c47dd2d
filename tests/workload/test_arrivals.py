"""Arrival processes: their mean rates, their shapes, and what is refused."""

from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from sluice.workload.arrivals import (
    Constant,
    Gamma,
    OnOff,
    Poisson,
    Ramp,
    arrivals_named,
    checked_rate,
)
from sluice.workload.asks import BadWorkload


def times(arrivals, rate, count=20_000, seed=1):
    return list(islice(arrivals.seconds(rate, Random(seed)), count))


@pytest.mark.parametrize("arrivals", [Constant(), Poisson(), Gamma(3.0), OnOff(5.0, 15.0)], ids=str)
def test_all_have_the_mean_rate_and_rise(arrivals):
    found = times(arrivals, 50.0, 50_000)
    assert len(found) / found[-1] == pytest.approx(50.0, rel=0.06)
    assert all(a <= b for a, b in pairwise(found))


@pytest.mark.parametrize(("arrivals", "cv"), [(Constant(), 0), (Poisson(), 1), (Gamma(3.0), 3)])
def test_gaps_have_their_coefficient_of_variation(arrivals, cv):
    gaps = [b - a for a, b in pairwise(times(arrivals, 10.0))]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.06, abs=1e-6)


def test_nothing_arrives_while_off():
    for at_s in times(OnOff(5.0, 15.0), 10.0, 2000):
        assert at_s % 20.0 <= 5.0 + 1e-9


@pytest.mark.parametrize("to_rps", [40.0, 2.0])
def test_a_ramp_goes_from_one_rate_to_the_other_and_stays(to_rps):
    found = times(Ramp(to_rps, 100.0), 10.0, 12_000)
    whole = sum(at_s < 100.0 for at_s in found)
    assert whole == pytest.approx((10.0 + to_rps) / 2 * 100.0, rel=0.1)
    first = sum(at_s < 20.0 for at_s in found) / 20.0
    assert first == pytest.approx(10.0 + 0.1 * (to_rps - 10.0), rel=0.25)
    after = [at_s for at_s in found if at_s > 100.0]
    assert len(after) / (after[-1] - 100.0) == pytest.approx(to_rps, rel=0.1)


@pytest.mark.parametrize("arrivals", [Poisson(), Gamma(2.0)], ids=str)
def test_two_rates_of_one_seed_see_the_same_pattern(arrivals):
    slow, fast = times(arrivals, 5.0, 100), times(arrivals, 10.0, 100)
    assert fast == pytest.approx([at_s / 2 for at_s in slow])


def test_arrivals_are_named_by_text():
    assert arrivals_named("poisson") == Poisson()
    assert arrivals_named("gamma:cv=3") == Gamma(3.0)
    assert arrivals_named("onoff:on=1,off=9") == OnOff(1.0, 9.0)
    assert arrivals_named("Ramp:to=20,over=300") == Ramp(20.0, 300.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("poison", "known are constant, poisson"),
        ("gamma:cv=0", "must be above 0, .* not 0"),
        ("gamma:cv=1e-200", "must be above 0, 1e-06 to 1e.07, not 1e-200"),
        ("onoff:on=1e200", "1e-06 to 1e.07"),
        ("gamma:cv=nan", "must be above 0"),
        ("gamma:cv=much", "'much', not a number"),
        ("onoff:up=3", "take on, off, not 'up'"),
        ("poisson:x=1", "take no options"),
    ],
)
def test_texts_that_name_none_are_refused_with_what_to_write(text, words):
    with pytest.raises(BadWorkload, match=words):
        arrivals_named(text)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 1e9, 1e-300])
def test_rates_that_are_none_are_refused(rate):
    with pytest.raises(BadWorkload, match="rate must be above 0"):
        checked_rate(rate)
