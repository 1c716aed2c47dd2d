"""What the server's counters grew by, whatever becomes of the server meanwhile."""

import pytest

from sluice.executors.stream import Gauges
from sluice.loadtest.signals import Seen, _Look, _our_counters


def seen_of(*values: float) -> Seen:
    seen = Seen()
    seen.looks = [_Look(Gauges(None, None, None, {"preemptions": value}), {}) for value in values]
    return seen


@pytest.mark.parametrize(
    ("values", "growth"),
    [
        ((10.0, 12.0, 15.0), 5.0),
        ((10.0, 12.0, 0.0, 4.0), 6.0),
        ((10.0, 3.0), 3.0),
        ((7.0,), 0.0),
        ((7.0, 7.0), 0.0),
    ],
)
def test_a_counter_that_goes_back_began_anew(values, growth):
    assert seen_of(*values).figures()["preemptions"] == growth


@pytest.mark.parametrize(
    "page",
    [
        'sluice_refusals_total{reason="a"} NaN\n',
        'sluice_refusals_total{reason="a"} +Inf\n',
        'sluice_refusals_total{reason="a\n',
        "sluice_refusals_total{{{ 1\n",
        "sluice_refusals_total\n",
    ],
)
def test_a_page_that_makes_no_sense_tells_nothing(page):
    assert _our_counters(page) == {}
