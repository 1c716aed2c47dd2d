"""Looking ahead: predicted lengths and the peak of KV use, against slow oracles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.lengths import (
    Holding,
    OutputLengths,
    later,
    peak_blocks,
    steps_until_fit,
)

SIZE = 4


@st.composite
def holdings(draw):
    cells = draw(st.integers(0, 60))
    blocks = -(-cells // SIZE)
    shared = draw(st.integers(0, blocks))
    return Holding(cells, draw(st.integers(1, 40)), blocks - shared, blocks)


def peak_step_by_step(held, shared):
    """Run the sequences in lock step, one token each, and count blocks after every step."""
    peak = 0
    for step in range(1, max((h.remaining for h in held), default=0) + 1):
        alive = [h for h in held if h.remaining >= step]
        used = sum(h.private + max(0, -(-(h.cells + step) // SIZE) - h.blocks) for h in alive)
        peak = max(peak, used)
    return peak + shared


@given(st.lists(holdings(), max_size=12), st.integers(0, 9))
def test_peak_equals_a_step_by_step_simulation(held, shared):
    assert peak_blocks(held, shared, SIZE) == peak_step_by_step(held, shared)


def peak_with_delays(held, delays):
    """As above, where each sequence begins to decode after a delay of its own."""
    peak = 0
    for step in range(1, 40 + max(delays, default=0) + 1):
        used = 0
        for h, delay in zip(held, delays, strict=True):
            if step <= h.remaining + delay:
                cells = h.cells + max(0, step - delay)
                used += h.private + max(0, -(-cells // SIZE) - h.blocks)
        peak = max(peak, used)
    return peak


@given(st.lists(st.tuples(holdings(), st.integers(0, 60)), max_size=8))
def test_peak_holds_however_late_prompts_are_computed(delayed):
    held = [h._replace(prefilling=delay > 0) for h, delay in delayed]
    assert peak_with_delays(held, [delay for _, delay in delayed]) <= peak_blocks(held, 0, SIZE)


@given(st.lists(holdings(), min_size=1, max_size=8), holdings())
def test_candidate_fits_once_the_steps_until_it_fits_are_over(held, candidate):
    blocks = max(peak_blocks([candidate], 0, SIZE), peak_blocks(held, 0, SIZE))
    steps = steps_until_fit(held, candidate, 0, SIZE, blocks)
    assert peak_blocks([*later(held, steps, SIZE), candidate], 0, SIZE) <= blocks


def test_thin_history_predicts_the_limit():
    lengths = OutputLengths()
    for _ in range(49):
        lengths.observe(10)
    assert lengths.remaining(0, 500) == 500
    lengths.observe(10)
    assert lengths.remaining(0, 500) == 10


def test_prediction_is_the_quantile_of_what_is_longer_than_now():
    lengths = OutputLengths()
    for length in range(1, 101):
        lengths.observe(length)
    assert lengths.remaining(0, 500) == pytest.approx(90, abs=2)
    assert lengths.remaining(50, 500) == pytest.approx(95 - 50, abs=2)
    assert lengths.remaining(0, 7) == 7


def test_an_output_longer_than_nearly_all_seen_counts_with_its_limit():
    lengths = OutputLengths()
    for length in range(1, 101):
        lengths.observe(length)
    assert lengths.remaining(99, 300) == 300


def test_preemptions_make_predictions_longer_for_a_while():
    lengths = OutputLengths()
    for length in range(1, 201):
        lengths.observe(length)
    before = lengths.remaining(0, 500)
    lengths.missed()
    after = lengths.remaining(0, 500)
    for length in range(1, 201):
        lengths.observe(length)
    assert before < after
    assert lengths.remaining(0, 500) == before
