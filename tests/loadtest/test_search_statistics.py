"""What searches are made of: series, shares against rates, drift, soaks. Numbers only."""

from math import inf, log

import numpy as np
import pytest

from sluice.loadtest.capacity import capacity_of, next_rung, throughput
from sluice.loadtest.sample import Count, Sample, Trend, trend_of
from sluice.loadtest.series import Slope, level, memory_steps, settled_from, slope_of
from sluice.loadtest.slo_fit import Dose, fit
from sluice.loadtest.soaks import certified, student, upper_bound


def share_at(rate, slo_rate=10.0, limit=0.05, steepness=12.0):
    odds = limit / (1 - limit) * (rate / slo_rate) ** steepness
    return odds / (1 + odds)


def dose(rate, requests=1000, batches=5, **of):
    missed = round(requests * share_at(rate, **of))
    each = requests // batches
    counts = [Count(each, missed // batches + (n < missed % batches)) for n in range(batches)]
    return Dose(rate, tuple(counts))


def sample(rate=0.0, clients=None, drift=Slope(0.0, 0.001), completed=0.0, **of):  # noqa: B008
    fields = {
        "rate_rps": rate,
        "concurrency": clients,
        "counted_s": 60.0,
        "took_s": 70.0,
        "void": None,
        "stopped": False,
        "requests": 10_000,
        "failed": 0,
        "completed_rps": completed,
        "completed_error_rps": 0.01 * completed,
        "latency_s": 1.0,
        "in_flight": 1.0,
        "memory_s": 1.0,
        "counts": {},
        "drift": drift,
    }
    return Sample(**{**fields, **of})


def test_what_is_under_way_is_what_began_and_has_not_ended():
    found = level(np.array([0.0, 1.0, 2.0]), np.array([3.0, 1.5, inf]), np.array([0.5, 1.2, 4.0]))
    assert found.tolist() == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("factor", [0.0, 0.8], ids=["independent", "autoregressive"])
def test_memory_is_the_sum_of_correlations(factor):
    chance = np.random.default_rng(1)
    series = np.zeros(20_000)
    for at in range(1, len(series)):
        series[at] = factor * series[at - 1] + chance.normal()
    assert memory_steps(series) == pytest.approx((1 + factor) / (1 - factor), rel=0.2)


def test_a_trend_is_found_within_its_error_though_neighbours_depend_on_each_other():
    chance = np.random.default_rng(2)
    noise = np.convolve(chance.normal(size=460), np.ones(40) / 40, "valid")[:400]
    found = slope_of(noise + 0.05 * np.arange(400), step_s=0.5)
    assert found.estimate == pytest.approx(0.1, abs=2 * found.error)
    assert found.error > 0.0


def test_a_transient_is_cut_off():
    series = np.concatenate((np.linspace(0.0, 10.0, 50), np.full(350, 10.0)))
    assert 40 <= settled_from(series) <= 60


def test_the_slo_rate_is_where_shares_cross_the_limit_and_more_trials_narrow_it():
    doses = [dose(rate, requests=20_000) for rate in (8.5, 9.5, 10.5, 11.5)]
    few = fit({"ttft": doses[1:3]}, {"ttft": 0.05}).posterior
    many = fit({"ttft": doses * 2}, {"ttft": 0.05}).posterior
    assert many.quantile(0.5) == pytest.approx(10.0, rel=0.01)
    assert many.quantile(0.95) - many.quantile(0.05) < few.quantile(0.95) - few.quantile(0.05)


def test_counts_that_come_together_are_believed_less():
    apart = [dose(rate) for rate in (9.5, 10.5)]
    together = [
        Dose(one.rate_rps, (Count(200, min(200, one.missed)), *[Count(200, 0)] * 4))
        for one in apart
    ]
    wide, narrow = (
        fit({"ttft": doses}, {"ttft": 0.05}).responses["ttft"] for doses in (together, apart)
    )
    assert wide.dispersion > 3 * narrow.dispersion


def test_the_objective_with_the_lowest_rate_binds():
    rates = (8.0, 9.0, 10.0)
    doses = {
        "ttft": [dose(rate, 5000, slo_rate=12.0) for rate in rates],
        "tpot": [dose(rate, 5000, slo_rate=9.0) for rate in rates],
    }
    found = fit(doses, {"ttft": 0.05, "tpot": 0.05})
    assert found.binding["tpot"] > 0.95
    assert found.posterior.quantile(0.5) == pytest.approx(9.0, rel=0.02)


def test_the_bound_of_soaks_is_wider_where_misses_come_in_batches():
    even, odd = [Count(100, 4)] * 10, [Count(100, 40 * (n == 3)) for n in range(10)]
    assert upper_bound(even, 0.05) == pytest.approx(0.04)
    assert upper_bound(odd, 0.05) > 0.1
    # None of 299 independent requests missing shows 99 % with 95 %.
    assert upper_bound([Count(100, 0), Count(199, 0)], 0.05) == pytest.approx(-log(0.05) / 299)


def test_student_is_wider_than_normal_for_few_batches():
    assert student(0.05, 4) == pytest.approx(2.132, rel=0.01)
    assert student(0.05, 1000) == pytest.approx(1.646, rel=0.01)


def test_soaks_certify_only_what_all_of_them_together_show():
    def soak(missed):
        return sample(9.0, counts={"ttft": (Count(500, missed), Count(500, missed))})

    assert certified([soak(10), soak(12), soak(11)], {"ttft": 0.05}, 0.05)
    assert not certified([soak(20), soak(30), soak(24)], {"ttft": 0.05}, 0.05)
    assert not certified([sample(9.0, stopped=True)], {"ttft": 0.05}, 0.05)


@pytest.mark.parametrize(
    ("drift", "trend"),
    [
        (Slope(0.0, 0.002), Trend.STABLE),
        (Slope(0.05, 0.01), Trend.UNSTABLE),
        (Slope(0.02, 0.02), Trend.UNDECIDED),
        (Slope(0.005, 0.0001), Trend.STABLE),
    ],
    ids=str,
)
def test_a_backlog_is_shown_to_grow_or_not_or_neither(drift, trend):
    assert trend_of(drift, 0.01, Count(10_000, 0)) is trend


def test_capacity_lies_between_the_highest_stable_and_the_lowest_unstable_rate():
    trials = [sample(8.0), sample(9.0), sample(10.0, drift=Slope(0.08, 0.01))]
    found = capacity_of(trials, tolerance=0.01)
    assert (found.low_rps, found.high_rps, found.metastable) == (9.0, 10.0, False)


def test_trials_that_are_too_short_alone_show_it_together():
    short = [sample(9.0 + 0.01 * n, drift=Slope(0.0, 0.008)) for n in range(6)]
    assert capacity_of(short[:1], tolerance=0.01).low_rps is None
    low = capacity_of(short, tolerance=0.01).low_rps
    assert low is not None
    assert 9.0 < low < 9.05


def test_a_rate_that_is_not_sustained_after_overload_makes_the_server_metastable():
    again = sample(9.0, drift=Slope(0.1, 0.01))
    trials = [sample(8.0), sample(9.0), sample(12.0, drift=Slope(0.3, 0.02)), again]
    found = capacity_of(trials, revisited=again, tolerance=0.01)
    assert (found.low_rps, found.high_rps, found.metastable) == (8.0, 9.0, True)


def test_growth_at_a_rate_below_one_that_was_calm_for_as_long_is_taken_for_chance():
    grew, calm = sample(9.0, drift=Slope(0.1, 0.01)), sample(11.0, drift=Slope(0.0, 0.02))
    assert capacity_of([grew], tolerance=0.01).high_rps == 9.0
    assert capacity_of([grew, calm], tolerance=0.01).high_rps is None
    short = sample(11.0, drift=Slope(0.0, 0.02), counted_s=10.0)
    assert capacity_of([grew, short], tolerance=0.01).high_rps == 9.0
    trials = [sample(12.0, drift=Slope(0.3, 0.02)), grew, calm]
    assert not capacity_of(trials, revisited=grew, tolerance=0.01).metastable


def test_few_requests_do_not_show_growth_that_chance_has_too():
    assert trend_of(Slope(0.1, 0.01), 0.01, Count(700, 0)) is Trend.UNDECIDED
    assert trend_of(Slope(0.1, 0.01), 0.01, Count(2_000, 0)) is Trend.UNSTABLE


def test_the_ladder_ends_where_more_clients_bring_no_more():
    ladder: list[Sample] = []
    asked = []
    while (clients := next_rung(ladder)) is not None:
        asked.append(clients)
        ladder.append(sample(clients=clients, completed=min(clients, 20.0)))
    assert asked == [1, 4, 16, 64, 128]
    best = throughput(ladder)
    assert best is not None
    assert best.estimate_rps == pytest.approx(20.0)


def test_a_server_that_turns_away_what_is_too_much_does_not_keep_up():
    calm = Slope(0.0, 0.001)
    assert trend_of(calm, 0.01, Count(700, 3)) is Trend.STABLE
    assert trend_of(calm, 0.01, Count(700, 10)) is Trend.UNDECIDED
    assert trend_of(calm, 0.01, Count(700, 70)) is Trend.UNSTABLE
