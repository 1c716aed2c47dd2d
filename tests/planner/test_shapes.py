"""What a token costs in KV, by shape, format and parallelism."""

import pytest

from sluice.planner.memory import GIB, kv_bytes
from sluice.planner.model_config import shape_from_config
from sluice.planner.names import CannotPlan
from sluice.planner.question import default_precision
from sluice.planner.shapes import HeadLayers
from sluice.planner.tables import own_tables

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("kv_format", "per_token", "gib"),
    [("bf16", 131072, 16.0), ("fp8", 65536, 8.0), ("q8_0", 69632, 8.5), ("q4_0", 36864, 4.5)],
)
def test_d25_kv_counts_grouped_heads_in_the_format_of_the_cache(kv_format, per_token, gib):
    shape = shape_from_config("llama", LLAMA)
    assert kv_bytes(shape, kv_format, [1]) == per_token
    assert kv_bytes(shape, kv_format, [8192] * 16) == gib * GIB


def test_d25_an_explicit_head_size_counts_and_not_hidden_over_heads():
    config = LLAMA | {
        "num_hidden_layers": 26,
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "head_dim": 256,
    }
    assert kv_bytes(shape_from_config("m", config), "bf16", [1]) == 212_992


def test_d25_sliding_layers_keep_their_window_only():
    layers = ["full_attention", "sliding_attention"] * 24
    config = LLAMA | {"num_hidden_layers": 48, "layer_types": layers, "sliding_window": 1024}
    held = kv_bytes(shape_from_config("m", config), "bf16", [32768])
    assert held / GIB == pytest.approx(3.09, abs=0.005)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"layer_types": ["mystery"] * 32}, "'mystery' is not known"),
        ({"hybrid_override_pattern": "MEM*"}, "not modelled"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers is .* not modelled"),
        ({"attn_layer_period": 8}, "attn_layer_period is .* not modelled"),
        ({"mamba_d_state": 16}, "mamba_d_state is .* not modelled"),
        ({"num_hidden_layers": "many"}, "not a whole number"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    ],
)
def test_d25_what_is_not_understood_is_said_and_not_guessed(change, words):
    with pytest.raises(CannotPlan, match=words) as refused:
        shape_from_config("m", LLAMA | change)
    assert "cannot estimate" in str(refused.value)


def test_a_shared_expert_has_its_own_size():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1000}
    none, one, own = (
        shape_from_config("m", LLAMA | experts | change).feed_forward_params
        for change in ({}, {"n_shared_experts": 1}, {"shared_expert_intermediate_size": 5000})
    )
    assert one - none == 32 * 3 * 4096 * 1000
    assert own - none == 5 * (one - none)


@pytest.mark.parametrize(
    ("change", "full", "window"),
    [
        ({"model_type": "mistral"}, 0, 32),
        ({"model_type": "gemma2"}, 16, 16),
        ({"model_type": "qwen2", "max_window_layers": 28}, 28, 4),
        ({"model_type": "qwen2", "use_sliding_window": False}, 32, 0),
        ({"sliding_window_pattern": 4}, 8, 24),
        ({"model_type": "new", "max_position_embeddings": 4096}, 32, 0),
    ],
)
def test_d25_which_layers_have_the_window_is_what_the_family_does(change, full, window):
    shape = shape_from_config("m", LLAMA | {"sliding_window": 4096} | change)
    layers = {each.window: each.layers for each in shape.attention if isinstance(each, HeadLayers)}
    assert layers.get(None, 0) == full
    assert layers.get(4096, 0) == window


def test_d25_a_window_of_unknown_layers_is_not_guessed():
    with pytest.raises(CannotPlan, match="does not say in which layers"):
        shape_from_config("m", LLAMA | {"model_type": "new", "sliding_window": 4096})


@pytest.mark.parametrize(
    ("quantised", "precision"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_quantised_weights_are_planned_in_their_precision(quantised, precision):
    shape = shape_from_config("m", LLAMA | {"quantization_config": quantised})
    assert default_precision(shape, own_tables().accelerator("h100")) == precision
    assert shape.approximate is None


def test_a_quantisation_that_is_not_understood_is_said():
    shape = shape_from_config("m", LLAMA | {"quantization_config": {"quant_method": "odd"}})
    assert "not understood" in str(shape.approximate)


def test_an_unknown_model_type_with_the_usual_keys_has_a_shape():
    assert shape_from_config("new", LLAMA | {"model_type": "never-seen"}).params > 7e9


def test_a_text_model_inside_a_multimodal_configuration_is_found():
    assert shape_from_config("m", {"text_config": LLAMA}).layers == 32


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-405b", 405.85),
        ("mixtral-8x7b", 46.7),
        ("deepseek-r1", 671.0),
        ("gpt-oss-120b", 116.8),
        ("qwen3-0.6b", 0.6),
        ("llama-4-maverick", 400.7),
    ],
)
def test_parameters_are_those_that_are_published(name, billions):
    assert own_tables().model(name).params / 1e9 == pytest.approx(billions, rel=0.01)


def test_tensor_parallelism_divides_grouped_heads_down_to_one():
    shape = own_tables().model("llama-3.1-70b")
    per_token = [shape.kv_values(1, tensor) for tensor in (1, 2, 8, 16)]
    assert per_token == [163840, 81920, 20480, 20480]


def test_tensor_parallelism_does_not_divide_latent_attention():
    shape = own_tables().model("deepseek-r1")
    assert shape.kv_values(1, 1) == shape.kv_values(1, 8) == 61 * 576


def test_linear_layers_keep_a_state_that_does_not_grow():
    shape = own_tables().model("qwen3.5-397b-a17b")
    state = shape.kv_values(0)
    assert state > 0
    assert shape.kv_values(2000) - state == 2 * (shape.kv_values(1000) - state)
