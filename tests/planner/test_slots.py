"""Parallel slots: each takes its whole context, and what fits instead is said."""

import pytest

from sluice.planner.formats import precision_named
from sluice.planner.hardware import Accelerator
from sluice.planner.memory import GIB, Budget
from sluice.planner.model_config import shape_from_config
from sluice.planner.names import CannotPlan
from sluice.planner.slots import Slots, of_budget, verdict
from sluice.planner.work import Deployment, Layout

# 32 layers of 8 KV heads of 128 in 16 bits: 131,072 bytes per token.
SHAPE = shape_from_config(
    "m",
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
)
DEVICE = Accelerator("d", "ada", 24.0, 1000.0, 100.0)
BUDGET = Budget(24 * GIB, 2.4 * GIB, 8 * GIB, 1 * GIB)


def asked(count, tokens=32768, sharing="each", budget=BUDGET, tensor=1):
    deployment = Deployment(SHAPE, DEVICE, precision_named("bf16"), Layout(tensor))
    return of_budget(deployment, Slots(count, tokens, sharing), budget)


def test_d26_every_slot_takes_its_own_context_and_the_nearest_that_fit_are_offered():
    four = asked(4)
    assert four.kv_bytes == 16 * GIB
    assert not four.fits
    assert four.count_max == 3
    assert four.request_tokens_max == 25_804
    assert asked(3).fits
    assert asked(4, 25_804).fits
    assert not asked(4, 25_805).fits


def test_d26_twenty_slots():
    assert asked(20).kv_bytes == 80 * GIB


def test_d26_a_divided_context_is_that_of_one_request_over_the_slots():
    divided = asked(4, sharing="divided")
    assert divided.slots.request_tokens == 8192
    assert divided.kv_bytes == 4 * GIB
    assert divided.fits


def test_d26_each_line_is_shown_with_what_remains():
    files = Budget(24 * GIB, 2.4 * GIB, 8 * GIB, 1 * GIB, {"vision encoder": 2 * GIB})
    lines = asked(4, budget=files).lines()
    assert list(lines) == [
        "device", "margin", "weights", "buffers", "vision encoder", "KV", "remaining",
    ]  # fmt: skip
    assert lines["KV"] == 16 * GIB
    assert lines["remaining"] == pytest.approx((24 - 2.4 - 8 - 1 - 2 - 16) * GIB)


def test_without_room_for_the_weights_nothing_fits():
    none = asked(1, budget=Budget(24 * GIB, 2.4 * GIB, 28 * GIB, 1 * GIB))
    assert not none.fits
    assert (none.count_max, none.request_tokens_max) == (0, 0)


def test_tensor_parallelism_halves_what_a_slot_takes_of_each_device():
    assert asked(4, tensor=2).kv_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (Slots(0, 4096), "slots must be 1"),
        (Slots(4, 0), "context must be 1"),
        (Slots(4, 131073), "longer than the 131,072"),
        (Slots(8, 4, "divided"), "leave none for each; nearest are 4 slots"),
    ],
)
def test_impossible_slots_are_refused_with_the_nearest(slots, words):
    deployment = Deployment(SHAPE, DEVICE, precision_named("bf16"), Layout(1))
    with pytest.raises(CannotPlan, match=words):
        verdict(deployment, slots, memory_share=0.9)
