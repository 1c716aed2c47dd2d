"""Channels evened out and products joined, on a graph of a few nodes."""

from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as opset

from sluice.executors.openvino_graph import (
    SMOOTHED,
    _activation_groups,
    join_products,
    packed_weight,
)
from sluice.executors.openvino_smoothing import smooth
from sluice.executors.openvino_weights import _eight_bit

VOCAB, WIDTH, LOUD = 40, 384, 7
TOKENS = np.arange(VOCAB)[None]


def small_model(*, other_reader: bool = False, gate: bool = False) -> tuple[ov.Model, list[Any]]:
    """An embedding, a gain per channel of which one is loud, and three products that read it."""
    random = np.random.default_rng(0)
    ids = opset.parameter([1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    embedding = opset.constant(random.normal(size=(VOCAB, WIDTH)).astype(np.float32))
    gain = np.ones((1, 1, WIDTH), np.float32)
    gain[..., LOUD] = 100
    gained = opset.multiply(opset.gather(embedding, ids, np.int64(0)), opset.constant(gain))
    matrices = [random.normal(size=(VOCAB, WIDTH)).astype(np.float32) for _ in range(3)]
    products = [
        opset.matmul(gained, _eight_bit(matrix), transpose_a=False, transpose_b=True)
        for matrix in matrices
    ]
    first = opset.swish(products[0], np.float32(1)) if gate else products[0]
    total = opset.add(opset.add(first, products[1]), products[2])
    if other_reader:
        total = opset.add(total, opset.reduce_max(gained, np.array([2]), keep_dims=True))
    return ov.Model([opset.result(total)], [ids]), matrices


def products_of(model: ov.Model) -> list[Any]:
    return [node for node in model.get_ordered_ops() if packed_weight(node) is not None]


def in_order(model: ov.Model, matrices: list[Any]) -> list[Any]:
    """Matrices in the order of the model's nodes, found by their codes."""
    weights = [packed_weight(product) for product in products_of(model)]
    codes = [np.array(weight.codes.data) for weight in weights if weight is not None]
    packed = [np.array(packed_weight_of(m)) for m in matrices]
    return [matrices[next(n for n, q in enumerate(packed) if (q == c).all())] for c in codes]


def packed_weight_of(matrix: np.ndarray) -> np.ndarray:
    scales = (np.abs(matrix).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes: np.ndarray = np.clip(np.rint(matrix / scales.astype(np.float32)), -127, 127)
    return codes.astype(np.int8)


def answers(model: ov.Model) -> np.ndarray:
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    answer: np.ndarray = ov.Core().compile_model(model, "CPU", settings)(TOKENS)[0]
    return answer


def smoothed(model: ov.Model, matrices: list[Any]) -> list[Any]:
    products = products_of(model)
    changed = smooth(model, products, in_order(model, matrices))
    for product, matrix in zip(products, changed, strict=True):
        product.input(1).replace_source_output(opset.constant(matrix).output(0))
    model.validate_nodes_and_infer_types()
    return changed


def test_a_smoothed_model_gives_the_same_answers():
    model, matrices = small_model()
    before = answers(model)
    changed = smoothed(model, matrices)
    assert len(model.outputs) == 1
    exact = answers(model)
    assert np.abs(exact - before).max() < 0.02 * np.abs(before).max()  # eight bits in the first
    assert not any((a == b).all() for a, b in zip(changed, matrices, strict=True))


def test_a_loud_channel_gives_part_of_its_size_to_the_matrices():
    model, matrices = small_model()
    changed = smoothed(model, matrices)
    columns = np.max([np.abs(matrix).max(axis=0) for matrix in changed], axis=0)
    assert columns.argmax() == LOUD
    before = np.max([np.abs(matrix).max(axis=0) for matrix in matrices], axis=0)
    # As much as the bound allows: its square root would be ten.
    assert columns[LOUD] / before[LOUD] == pytest.approx(3)


def test_a_normalisation_that_something_else_reads_is_left():
    model, matrices = small_model(other_reader=True)
    ordered = in_order(model, matrices)
    changed = smooth(model, products_of(model), ordered)
    assert all((a == b).all() for a, b in zip(changed, ordered, strict=True))


@pytest.mark.parametrize(("gate", "left"), [(False, 1), (True, 3)])
def test_products_of_one_input_are_joined_unless_one_feeds_a_gate(gate, left):
    model, _ = small_model(gate=gate)
    before = answers(model)
    join_products(model)
    assert len(products_of(model)) == left
    assert np.abs(answers(model) - before).max() < 1e-4 * np.abs(before).max()


def test_only_smoothed_models_get_the_largest_groups():
    model, _ = small_model()
    assert _activation_groups(model) == {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"}
    model.set_rt_info("true", SMOOTHED)
    assert _activation_groups(model) == {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "192"}
