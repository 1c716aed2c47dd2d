"""Percentiles from a sketch are within its ratio of the exact ones."""

from random import Random

import pytest

from sluice.planner.sketch import RATIO, Sketch


@pytest.mark.parametrize("sigma", [0.1, 2.0])
def test_quantiles_are_near_the_exact_ones(sigma):
    random = Random(1)
    values = [random.lognormvariate(-3, sigma) for _ in range(5000)]
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    values.sort()
    for share in (0.01, 0.5, 0.9, 0.95, 0.99, 1.0):
        exact = values[max(0, round(share * 5000) - 1)]
        assert sketch.quantile(share) == pytest.approx(exact, rel=RATIO - 1)
    assert sketch.mean == pytest.approx(sum(values) / 5000)


def test_of_nothing_there_is_no_quantile_and_zeros_count():
    sketch = Sketch()
    assert sketch.quantile(0.5) is None
    assert sketch.mean is None
    assert sketch.percentiles() == {"p50": None, "p90": None, "p95": None, "p99": None}
    for value in (0.0, 0.0, 0.0, 1.0):
        sketch.add(value)
    assert sketch.quantile(0.75) == 0.0
    assert sketch.quantile(1.0) == pytest.approx(1.0, rel=RATIO - 1)
    assert sketch.mean == 0.25
