"""What retrieval is left of a budget, and how many passages fit into it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.path_budget import (
    RESERVE,
    Budget,
    Path,
    Predicted,
    passages_that_fit,
    split,
)

MS = 1_000_000
# A thousand prompt tokens a second, 10 ms for each further one.
PREDICTED = Predicted(
    queue_ns=100 * MS, prefill_token_ns=1.0 * MS, token_ns=10 * MS, output_tokens=50
)
PATH = Path(prompt_tokens=50, passage_tokens=100)


def test_retrieval_gets_what_the_other_stages_and_the_reserve_leave():
    shares = split(Budget(1000 * MS, None), PATH, PREDICTED)
    assert (shares.queue_ns, shares.prefill_ns) == (100 * MS, 160 * MS)
    assert shares.decode_ns == 49 * 10 * MS
    assert shares.retrieval_ns == 900 * MS - 100 * MS - 160 * MS


def test_the_tighter_of_both_targets_counts():
    whole = split(Budget(1000 * MS, 1100 * MS), PATH, PREDICTED).retrieval_ns
    assert whole == 990 * MS - 100 * MS - 490 * MS - 160 * MS
    assert split(Budget(None, 5000 * MS), PATH, PREDICTED).retrieval_ns == 3750 * MS


def test_with_nothing_due_retrieval_is_not_bounded_here():
    assert split(Budget(None, None), PATH, PREDICTED).retrieval_ns is None
    assert passages_that_fit(Budget(None, None), PATH, PREDICTED, 7) == 7


@pytest.mark.parametrize("left_ms", [-50, 0, 100, 280])
def test_a_budget_that_is_used_up_leaves_nothing_and_never_less(left_ms):
    assert split(Budget(left_ms * MS, None), PATH, PREDICTED).retrieval_ns == 0


def test_an_unknown_speed_leaves_half_of_what_the_queue_does():
    unknown = Predicted(queue_ns=0, prefill_token_ns=None, token_ns=10 * MS, output_tokens=50)
    assert split(Budget(1000 * MS, None), PATH, unknown).retrieval_ns == 450 * MS


def test_a_short_limit_of_output_needs_less_time_to_decode():
    short = Path(50, 100, output_tokens_max=1)
    assert split(Budget(None, 1000 * MS), short, PREDICTED).decode_ns == 0


@pytest.mark.parametrize(
    ("left_ms", "fitting"), [(1000, 6), (600, 3), (320, 1), (300, 1), (280, 0), (0, 0)]
)
def test_passages_fit_as_far_as_there_is_time_to_prefill_them(left_ms, fitting):
    assert passages_that_fit(Budget(left_ms * MS, None), PATH, PREDICTED, 6) == fitting


@given(
    left_ms=st.integers(-1000, 10_000),
    queue_ms=st.integers(0, 3000),
    token_us=st.floats(1, 5000),
    passages=st.integers(0, 30),
)
def test_what_fits_is_on_time_and_one_more_is_not(left_ms, queue_ms, token_us, passages):
    predicted = Predicted(queue_ms * MS, token_us * 1e3, 10 * MS, 50)
    budget = Budget(left_ms * MS, None)
    fitting = passages_that_fit(budget, PATH, predicted, passages)
    left_ns = round(left_ms * MS * (1 - RESERVE)) - queue_ms * MS
    assert 0 <= fitting <= passages
    assert fitting == 0 or PATH.prefill_ns(predicted, fitting) <= left_ns
    assert fitting == passages or PATH.prefill_ns(predicted, fitting + 1) > left_ns
