"""Looking ahead: predicted lengths and the peak of KV use, against slow oracles."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.lengths import (
    CLASSES_MAX,
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


@given(
    st.lists(st.integers(1, 300), min_size=60, max_size=200),
    st.integers(0, 320),
    st.sampled_from([0.5, 0.9, 0.99]),
)
def test_prediction_of_uncut_outputs_is_their_conditional_quantile(seen, produced, quantile):
    lengths = OutputLengths()
    for length in seen:
        lengths.observe(length)
    longer = sorted(length for length in seen if length > produced)
    predicted = lengths.remaining(produced, 10_000, quantile)
    if len(longer) < 5:
        assert predicted == 10_000
    else:
        place = ceil(quantile * len(longer) - 1e-6) - 1
        assert predicted == longer[place] - produced


def test_outputs_cut_by_their_limit_say_only_that_they_would_have_been_longer():
    """Half of the answers run to 200; of the requests of 50 tokens nobody knows their own end."""
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe(50, cut=True)
        lengths.observe(200)
    assert lengths.remaining(0, 2000, 0.5) == 200
    assert lengths.remaining(0, 50, 0.5) == 50


def test_outputs_that_never_end_by_themselves_count_with_their_limit():
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe(50, cut=True)
    assert lengths.remaining(0, 2000) == 2000


def test_each_class_is_predicted_from_its_own_outputs():
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe(10, "brief")
        lengths.observe(400, "essay")
    assert lengths.remaining(0, 2000, slo_class="brief") == 10
    assert lengths.remaining(0, 2000, slo_class="essay") == 400
    assert lengths.remaining(0, 2000, slo_class="unseen") == 400  # of all together


def test_class_with_too_few_outputs_is_predicted_from_all():
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe(10)
    for _ in range(49):
        lengths.observe(300, "rare")
    assert lengths.remaining(0, 2000, 0.5, "rare") == 10
    lengths.observe(300, "rare")
    assert lengths.remaining(0, 2000, 0.5, "rare") == 300


def test_any_number_of_class_names_keeps_a_bounded_history():
    lengths = OutputLengths()
    for number in range(10_000):
        lengths.observe(number % 100, f"class{number}")
    assert len(lengths._of_class) == CLASSES_MAX
