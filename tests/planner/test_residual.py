"""What neighbours add, and how the band widens with distance."""

from math import exp, log

import pytest

from sluice.planner.residual import (
    Case,
    Field,
    Part,
    Row,
    field_as_json,
    field_from_json,
)

HERE = Case("m", "m", "vllm", "hopper", "h100", "fp8", 4, 1, 16.0, 1024.0, 1024.0)
PARTS = (Part((0,), 0.2, 4.0), Part((2, 3), 0.1, 4.0))


def field(*rows, noise=0.02):
    return Field(PARTS, noise, tuple(Row(case, value, "s") for case, value in rows))


def test_a_measurement_of_the_case_itself_is_believed():
    found = field((HERE, 0.3)).estimate(HERE)
    assert found.mean == pytest.approx(0.3, rel=0.02)
    assert found.deviation < 0.04


def test_the_band_widens_and_the_estimate_shrinks_with_distance():
    rows = field((HERE, 0.3))
    far = [HERE._replace(concurrency=16.0 * 2**step) for step in range(8)]
    found = [rows.estimate(case) for case in far]
    assert [each.mean for each in found] == sorted((each.mean for each in found), reverse=True)
    assert [each.deviation for each in found] == sorted(each.deviation for each in found)
    assert found[-1].mean < 0.15


def test_without_anything_near_the_estimate_is_zero_with_the_whole_spread():
    other = HERE._replace(model="other", engine_name="sglang")
    found = field((HERE, 0.3)).estimate(other)
    assert found.mean == 0.0
    assert found.deviation == pytest.approx((0.2**2 + 0.1**2 + 0.02**2) ** 0.5)
    assert found.leaned_on == ()


def test_another_model_on_the_same_engine_moves_it_less_than_the_same_model():
    rows = field((HERE, 0.3))
    other = rows.estimate(HERE._replace(model="other"))
    same = rows.estimate(HERE._replace(engine_name="sglang"))
    assert 0 < other.mean < same.mean < 0.3


def test_a_dozen_of_equal_rows_give_their_value_and_stay_solvable():
    found = field(*[(HERE, 0.1)] * 12, noise=1e-6).estimate(HERE)
    assert found.mean == pytest.approx(0.1, rel=0.01)


def test_the_estimate_is_that_of_the_formula_for_two_rows():
    """By hand: covariance k on the diagonal with noise, c between the rows, s to the question."""
    near, further = HERE, HERE._replace(concurrency=32.0)
    asked = HERE._replace(concurrency=64.0)
    rows = field((near, 0.2), (further, -0.1), noise=0.1)
    whole = 0.2**2 + 0.1**2

    def share(doublings):
        return whole * exp(-0.6 * doublings / 4.0)

    k, c, s1, s2 = whole + 0.01, share(1), share(2), share(1)
    determinant = k * k - c * c
    weight1, weight2 = (k * s1 - c * s2) / determinant, (k * s2 - c * s1) / determinant
    found = rows.estimate(asked)
    assert found.mean == pytest.approx(weight1 * 0.2 - weight2 * 0.1)
    left = whole - weight1 * s1 - weight2 * s2 + 0.01
    assert log(found.deviation) == pytest.approx(log(left) / 2)


def test_a_field_survives_json():
    rows = field((HERE, 0.3), (HERE._replace(model="other"), -0.1))
    again = field_from_json(field_as_json(rows))
    assert again.estimate(HERE)[:2] == pytest.approx(rows.estimate(HERE)[:2])
    assert again.rows == rows.rows
