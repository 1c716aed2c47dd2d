"""Sources of simulated models: which hardware they name, and what a replica of it holds."""

import pytest

from sluice.config.sections import ModelSection
from sluice.config.settings import Settings
from sluice.core.costmodel import Load
from sluice.core.errors import ModelLoadError
from sluice.planner.estimate import BATCH_MAX
from sluice.planner.steady import CHUNK_TOKENS_MAX, Lengths
from sluice.wiring.simulated import simulated_model
from sluice.wiring.simulation import simulated_pool


def model(source, **settings):
    return simulated_model(ModelSection(source, **settings))


def test_more_devices_hold_more_and_are_faster():
    two, four = model("sim:llama-3.1-70b@h100x2"), model("sim:llama-3.1-70b@h100x4")
    assert four.limits.blocks_total > two.limits.blocks_total
    load = Load(32, 32, 32_000)
    assert four.times.predict_ns(load) < two.times.predict_ns(load)
    assert four.limits.sequences_max == BATCH_MAX
    assert four.facts.context_tokens_max == 131_072


def test_a_step_takes_what_a_plan_assumes_where_nobody_says_otherwise():
    section = ModelSection("sim:llama-3.1-8b@h100")
    pool = simulated_pool("m", section, Settings(), Lengths(1000, 200))
    assert pool.batching.chunk_tokens_max == CHUNK_TOKENS_MAX
    assert pool.batching.sequences_max <= BATCH_MAX


def test_a_name_without_a_number_is_one_device_even_where_it_ends_like_one():
    one, same = model("sim:llama-3.1-8b@h100"), model("sim:llama-3.1-8b@H100x1")
    assert one.limits == same.limits


def test_settings_bound_what_a_replica_holds():
    bound = model("sim:llama-3.1-8b@h100", sequences_max=4, context_tokens_max=4096, kv_bytes=2**30)
    assert bound.limits.sequences_max == 4
    assert bound.limits.context_tokens_max == 4096
    held_bytes = bound.limits.blocks_total * bound.limits.block_bytes
    assert 0.99 * 2**30 < held_bytes <= 2**30


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("sim:llama-3.1-70@h100x4", "did you mean llama-3.1-70b"),
        ("sim:llama-3.1-70b@h10x4", "did you mean .*h100"),
        ("sim:llama-3.1-70b", "write sim:MODEL@GPU"),
        ("sim:@h100", "write sim:MODEL@GPU"),
        ("sim:llama-3.1-70b@h100x0", "must be 1 to"),
        ("sim:llama-3.1-70b@h100x3", "cannot be divided by 3"),
        ("sim:llama-3.1-405b@l4", "does not fit"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_can(source, words):
    with pytest.raises(ModelLoadError, match=words):
        model(source)
