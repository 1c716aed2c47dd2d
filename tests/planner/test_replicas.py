"""A replica on accelerators: what it holds, and that its steps are those of the plan's formula."""

from dataclasses import replace

import pytest

from sluice.core.costmodel import Load as StepLoad
from sluice.planner.estimate import Load
from sluice.planner.names import NoFleet
from sluice.planner.plan import step_models
from sluice.planner.question import precision_for
from sluice.planner.replicas import simulated_replica
from sluice.planner.steady import Lengths
from sluice.planner.tables import own_tables
from sluice.planner.work import Batch, Deployment, Layout, work_of

LOAD = Load(Lengths(1000.0, 300.0))


def model_of(name="llama-3.1-70b", gpu="h100", tensor=4, precision="fp8", groups=1, **changes):
    tables = own_tables()
    shape, kv_format = tables.model(name), changes.pop("kv_format", None)
    accelerator = replace(tables.accelerator(gpu), **changes)
    deployment = Deployment(
        shape, accelerator, precision_for(shape, precision, kv_format), Layout(tensor, groups)
    )
    return step_models(deployment, "vllm", precision)[0]


def chunk(past, tokens, rows=0, context=0):
    return StepLoad(rows, rows, context).with_chunk(past, tokens)


def test_the_pool_holds_what_is_left_of_the_memory():
    """80 layers, 8 KV heads of 128 in fp8: 163,840 bytes per token."""
    replica = simulated_replica(model_of(), LOAD)
    tokens = replica.limits.blocks_total * replica.limits.block_size
    assert tokens * 163_840 / 2**30 == pytest.approx(4 * 49.0, rel=0.05)
    assert replica.limits.context_tokens_max == 131_072
    assert replica.limits.sequences_max == LOAD.batch_max


def test_what_is_remembered_of_steps_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr("sluice.planner.replicas._KNOWN_MAX", 8)
    times = simulated_replica(model_of(), LOAD).times
    first = [times.predict_ns(chunk(0, tokens)) for tokens in range(1, 40)]
    assert len(times._known) <= 8
    assert [times.predict_ns(chunk(0, tokens)) for tokens in range(1, 40)] == first


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_decode_step_takes_what_the_formula_says(rows):
    model = model_of()
    step_s = (
        simulated_replica(model, LOAD).times.predict_ns(StepLoad(rows, rows, rows * 1150)) / 1e9
    )
    formula_s = model.level[1].step_duration_s(work_of(model.deployment, Batch(rows, 1150.0)))
    assert step_s / formula_s == pytest.approx(1.0, abs=0.2)
    # The context of its rows is what makes one step longer than another.
    longer = simulated_replica(model, LOAD).times.predict_ns(StepLoad(rows, rows, rows * 2150))
    again_s = model.level[1].step_duration_s(work_of(model.deployment, Batch(rows, 2150.0)))
    assert (longer / 1e9 - step_s) / (again_s - formula_s) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "gemma-4-31b", "qwen3-30b-a3b"]
)
def test_more_work_never_takes_less_time(name):
    times = simulated_replica(model_of(name, "h200", 8), LOAD).times
    for rows in (0, 1, 3, 8, 40, 100, 250):
        one = StepLoad(rows, rows, 1200 * rows)
        more = StepLoad(rows + 1, rows + 1, 1200 * rows + 1)
        assert times.predict_ns(more) >= times.predict_ns(one)
        assert times.predict_ns(one.steps_later(1)) >= times.predict_ns(one)
        filled = [times.predict_ns(one.with_chunk(0, tokens)) for tokens in (1, 64, 65, 700, 2048)]
        assert filled == sorted(filled)
        assert times.predict_ns(one.with_chunk(4000, 64)) >= times.predict_ns(one.with_chunk(0, 64))


@pytest.mark.parametrize("groups", [1, 4])
def test_more_bandwidth_never_slows_a_step(groups):
    shared = {"name": "deepseek-v3", "gpu": "h200", "tensor": 8, "groups": groups}
    plain, fast = (
        simulated_replica(model_of(**shared, bandwidth_gb_s=bandwidth), LOAD).times
        for bandwidth in (4800.0, 9600.0)
    )
    for load in (StepLoad(1, 1, 10), StepLoad(128, 128, 200_000), chunk(500, 2000, 60, 9000)):
        assert fast.predict_ns(load) <= plain.predict_ns(load)


def test_d25_the_pool_counts_grouped_heads_and_the_type_of_kv():
    """32 layers, 8 KV heads of 128: 131,072 bytes per token in 16 bits; weights do not change."""
    tokens = {}
    for kv_format in ("bf16", "fp8", "q8_0", "q4_0"):
        model = model_of("llama-3.1-8b", "h100", 1, "bf16", kv_format=kv_format)
        limits = simulated_replica(model, LOAD).limits
        tokens[kv_format] = limits.blocks_total * limits.block_size
    left = tokens["bf16"] * 131_072
    for kv_format, bytes_per_token in (("fp8", 65_536), ("q8_0", 69_632), ("q4_0", 36_864)):
        assert tokens[kv_format] * bytes_per_token == pytest.approx(left, rel=0.01)


def test_d26_requests_of_a_replica_share_one_pool():
    """No more of them than the pool holds, and none is promised more context than there is."""
    model = model_of("llama-3.1-70b", "h200", 1, "fp8")
    long = simulated_replica(model, Load(Lengths(30_000.0, 1000.0))).limits
    pool_tokens = long.blocks_total * long.block_size
    assert long.sequences_max == pool_tokens // 30_500
    assert long.context_tokens_max <= pool_tokens
    short = simulated_replica(model, Load(Lengths(500.0, 100.0))).limits
    assert short.sequences_max > 20 * long.sequences_max


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(NoFleet, match="does not fit"):
        simulated_replica(model_of(tensor=1, precision="bf16"), LOAD)
