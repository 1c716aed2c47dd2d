"""The cost model: monotone, learns from steps, survives absurd ones."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.costmodel import (
    Coefficients,
    FixedCostModel,
    LinearCostModel,
    Load,
    chunk_tokens_max,
    nonnegative_least_squares,
)

TRUE = Coefficients(10e6, 0.3e6, 0.5e6, 900.0, 150.0)
SEED = Coefficients()


def loads(random, count):
    """A mixed run: decode steps with a prefill chunk in every third."""
    for number in range(count):
        rows = random.randint(1, 16)
        load = Load(rows, rows, rows * random.randint(50, 800))
        yield load.with_chunk(random.randint(0, 500), 64) if number % 3 == 0 else load


def trained(count=400, noise=0.05, seed=7):
    random = Random(seed)
    model = LinearCostModel(SEED)
    for load in loads(random, count):
        model.observe(load, int(TRUE.predict_ns(load) * random.uniform(1 - noise, 1 + noise)))
    return model


def relative_error(model, load):
    return abs(model.step_ns(load) / TRUE.predict_ns(load) - 1)


def test_predictions_come_close_to_what_was_measured():
    model = trained()
    for rows, context in ((1, 100), (8, 3000), (16, 9000)):
        load = Load(rows, rows, context)
        assert relative_error(model, load) < 0.1
        assert relative_error(model, load.with_chunk(100, 128)) < 0.15


def test_margin_follows_the_spread_of_errors():
    assert trained(noise=0.02).margin < 1.1
    assert 1.2 < trained(noise=0.4).margin <= 2.0


def test_one_stalled_step_changes_little():
    model = trained()
    load = Load(8, 8, 3000)
    before_ns, margin = model.step_ns(load), model.margin
    model.observe(load, 5_000_000_000)
    for other in loads(Random(1), 16):
        model.observe(other, int(TRUE.predict_ns(other)))
    assert abs(model.step_ns(load) / before_ns - 1) < 0.05
    assert model.margin <= margin + 0.05


def test_a_lasting_slowdown_is_learnt():
    model = trained()
    for load in loads(Random(3), 600):
        model.observe(load, int(3 * TRUE.predict_ns(load)))
    load = Load(8, 8, 3000)
    assert model.step_ns(load) == pytest.approx(3 * TRUE.predict_ns(load), rel=0.1)


def test_a_long_run_of_decoding_keeps_what_is_known_about_prefill():
    model = trained()
    chunk = Load().with_chunk(0, 128)
    before = relative_error(model, chunk)
    for _ in range(2000):
        model.observe(Load(4, 4, 2000), int(TRUE.predict_ns(Load(4, 4, 2000))))
    assert relative_error(model, chunk) < before + 0.1


def test_prefill_rate_counts_the_decode_rows_beside_it():
    model = LinearCostModel(SEED)
    load = Load(8, 8, 800).with_chunk(0, 100)
    for _ in range(300):
        model.observe(load, 50_000_000)
    assert model.prefill_tokens_per_s == pytest.approx(2000, rel=0.05)


def test_state_continues_where_it_was_taken():
    model = trained(100)
    copy = LinearCostModel(SEED, model.state())
    for load in loads(Random(9), 100):
        for each in (model, copy):
            each.observe(load, int(TRUE.predict_ns(load)))
    assert copy.state() == model.state()


@given(st.integers(0, 32), st.integers(0, 4000), st.integers(0, 2000), st.integers(1, 300_000_000))
def test_largest_chunk_is_the_last_that_keeps_the_budget(rows, context, past, budget_ns):
    model = FixedCostModel(TRUE)
    load = Load(rows, rows, rows * context)
    tokens = chunk_tokens_max(model, load, past, budget_ns, 256)
    assert 0 <= tokens <= 256
    if tokens:
        assert model.step_ns(load.with_chunk(past, tokens)) <= budget_ns
    if tokens < 256:
        assert model.step_ns(load.with_chunk(past, tokens + 1)) > budget_ns


@given(
    st.lists(
        st.tuples(st.integers(0, 32), st.integers(0, 900), st.integers(0, 256), st.floats(0.01, 9)),
        max_size=80,
    )
)
def test_learnt_coefficients_are_never_negative(steps):
    model = LinearCostModel(SEED)
    for rows, context, chunk, factor in steps:
        load = Load(rows, rows, rows * context).with_chunk(0, chunk)
        model.observe(load, int(factor * 20e6))
    fitted = model.coefficients
    assert min(fitted.step_ns, fitted.token_ns, fitted.row_ns) >= 0
    assert min(fitted.decode_context_ns, fitted.chunk_context_ns) >= 0
    assert 1.0 <= model.margin <= 2.0
    assert model.prefill_tokens_per_s > 0


@given(st.integers(0, 10_000))
def test_nonnegative_least_squares_meets_its_optimality_conditions(seed):
    random = Random(seed)
    size = random.randint(1, 5)
    rows = [[random.uniform(-1, 1) for _ in range(size)] for _ in range(size + 3)]
    target = [random.uniform(-1, 1) for _ in rows]
    gram = [
        [sum(r[i] * r[j] for r in rows) + (1e-3 if i == j else 0) for j in range(size)]
        for i in range(size)
    ]
    moment = [sum(r[i] * t for r, t in zip(rows, target, strict=True)) for i in range(size)]
    solution = nonnegative_least_squares(gram, moment, [0.0] * size)
    for i in range(size):
        slope = moment[i] - sum(gram[i][j] * solution[j] for j in range(size))
        assert solution[i] >= 0
        assert slope <= 1e-4
        assert abs(slope * solution[i]) <= 1e-4
