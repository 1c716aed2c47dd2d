"""Measures by hand: what APGR, CPT, thresholds and calibration are on orders that are known."""

import numpy as np
import pytest

from sluice.complexity.measures import (
    apgr_of,
    calibration_of,
    lead_of,
    quality_of,
    resampled,
    share_at,
    share_for,
    threshold_for,
)

GAINS = np.array([1.0] * 20 + [0.0] * 80)
PERFECT = np.arange(100, 0, -1).astype(float)


def test_an_order_that_finds_every_rescue_first_has_the_area_of_its_trapezoids():
    # 0, 0.5, then 1 from the second decile on.
    assert apgr_of(PERFECT, GAINS) == pytest.approx((0.25 + 0.75 + 8) / 10)


def test_the_opposite_order_mirrors_it():
    assert apgr_of(-PERFECT, GAINS) == pytest.approx(1 - apgr_of(PERFECT, GAINS))


def test_a_constant_score_is_exactly_random():
    assert apgr_of(np.zeros(100), GAINS) == pytest.approx(0.5)
    assert share_for(np.zeros(100), GAINS, 0.8) == pytest.approx(0.8)


def test_cpt_is_the_share_that_recovers_so_much():
    assert share_for(PERFECT, GAINS, 0.5) == pytest.approx(0.10)
    assert share_for(PERFECT, GAINS, 0.8) == pytest.approx(0.16)


def test_rows_where_the_weak_model_was_better_count_against():
    gains = np.array([-1.0, 1.0, 1.0, 0.0])
    assert apgr_of(np.array([4.0, 3.0, 2.0, 1.0]), gains) < 0.5


def test_an_interval_holds_its_value_and_shrinks_with_rows():
    chance = np.random.default_rng(3)
    gains = (chance.random(2000) < 0.3).astype(float)
    scores = gains + chance.normal(0, 2, 2000)
    small = quality_of(scores[:200], gains[:200], range(200)).apgr
    large = quality_of(scores, gains, range(2000)).apgr
    assert small.low < small.value < small.high
    assert large.high - large.low < (small.high - small.low) / 2


def test_rows_of_one_question_are_drawn_together():
    for rows in resampled([0, 0, 1, 2, 2, 2], seed=1):
        counts = np.bincount(rows, minlength=6)
        assert counts[0] == counts[1]
        assert counts[3] == counts[4] == counts[5]


def test_a_lead_over_itself_is_nothing():
    lead = lead_of(PERFECT, PERFECT, GAINS, range(100))
    assert (lead.value, lead.low, lead.high) == (0.0, 0.0, 0.0)


def test_probabilities_that_are_right_have_a_small_error():
    chance = np.random.default_rng(5)
    probabilities = chance.random(5000)
    rescues = (chance.random(5000) < probabilities).astype(float)
    assert calibration_of(probabilities, rescues).error < 0.03
    assert calibration_of(1 - probabilities, rescues).error > 0.4


def test_d19_a_threshold_is_found_for_a_share_and_equal_scores_go_to_the_strong_model():
    tuned = np.arange(1000) / 1000
    live = 0.5 + np.arange(1000) / 2000
    threshold = threshold_for(tuned, 0.30)
    assert threshold == 0.70
    assert share_at(tuned, threshold) == pytest.approx(0.30)
    assert share_at(live, threshold) == pytest.approx(0.60)
    again = threshold_for(live, 0.30)
    assert again == 0.85
    assert share_at(live, again) == pytest.approx(0.30, abs=0.01)
    assert share_at(np.array([again]), again) == 1.0


def test_a_share_of_all_has_the_lowest_score_as_its_threshold():
    assert threshold_for(np.array([0.2, 0.1, 0.9]), 1.0) == 0.1
    assert threshold_for(np.array([0.2, 0.1, 0.9]), 1e-9) == 0.9
