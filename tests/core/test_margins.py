"""Predictions are stretched by what they were exceeded by of late, and not for long."""

import pytest

from sluice.core.margins import FACTOR_FIRST, KEPT, KNOWN_MIN, Margin

S = 1_000_000_000


def taught(*ratios: float, at_s: float = 0) -> Margin:
    margin = Margin()
    for ratio in ratios:
        margin.observe(S, round(ratio * S), round(at_s * S))
    return margin


def test_before_enough_is_known_the_first_guess_holds() -> None:
    assert taught(*[1.0] * (KNOWN_MIN - 1)).factor(0.95, 0) == FACTOR_FIRST
    assert taught(*[1.0] * KNOWN_MIN).factor(0.95, 0) == 1.0


@pytest.mark.parametrize(("quantile", "factor"), [(0.5, 1.2), (0.9, 1.4), (1.0, 1.5)])
def test_the_factor_covers_the_share_asked_for(quantile: float, factor: float) -> None:
    margin = taught(*(n / 10 for n in range(6, 16)))
    assert margin.factor(quantile, 0) == pytest.approx(max(1.0, factor), abs=0.2001)
    assert margin.factor(0.5, 0) <= margin.factor(0.9, 0) <= margin.factor(1.0, 0)


def test_it_stays_between_1_and_2_whatever_happened() -> None:
    assert taught(*[100.0] * 20).factor(0.95, 0) == 2.0
    assert taught(*[0.01] * 20).factor(0.95, 0) == 1.0


def test_a_stall_is_forgotten_after_10_s_without_any_traffic() -> None:
    margin = taught(*[5.0] * 20)
    assert margin.factor(0.95, 9 * S) == 2.0
    assert margin.factor(0.95, 11 * S) == FACTOR_FIRST


def test_a_stall_is_outvoted_by_what_follows_it() -> None:
    margin = taught(*[5.0] * 4)
    for _ in range(KEPT):
        margin.observe(S, S, S)
    assert margin.factor(0.95, S) == 1.0


def test_a_clock_that_goes_back_forgets_rather_than_keeps_for_ever() -> None:
    assert taught(*[2.0] * 20, at_s=1000).factor(0.95, 0) == FACTOR_FIRST


def test_what_is_over_at_once_teaches_nothing_of_ratios() -> None:
    margin = Margin()
    for _ in range(20):
        margin.observe(1_000, 20_000_000, 0)
    assert margin.factor(0.95, 0) == 1.0
