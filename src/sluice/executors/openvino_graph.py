"""From OpenVINO IR to a graph that computes one step over a paged KV pool.

Decided here: how the model is rewritten before it is compiled, and with which settings. Called by
``openvino`` when it loads. Running steps, owning the KV pool and choosing tokens must not live
here.

Rewrites, in order: matrix products that share an input are joined into one (fewer, larger kernels;
each output is the same sum of products as before); attention becomes OpenVINO's paged attention;
and only sampled rows reach the language-model head, through a Gather on its input, since a step
needs logits for one position in hundreds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino as ov
from openvino import opset13 as opset
from openvino._offline_transformations import paged_attention_transformation

from sluice.core.errors import ModelLoadError

Numerics = Literal["fast", "exact"]

# Cells of a KV block. OpenVINO's CPU plugin fixes it; see PagedAttention in its documentation.
BLOCK_SIZE = 32

SAMPLED_ROWS = "sampled_rows"

_EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "KV_CACHE_PRECISION": "f32",
}
# 16-bit KV: 8-bit makes a decode step slower and saves only 40 % of the memory, because each block
# carries its scales. The plugin takes bfloat16 KV with bfloat16 activations only.
_FAST_BF16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
_FAST_F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}

# Threads that are free to move lose nothing alone, and two replicas that each pin theirs would share
# the first cores.
_UNPINNED = {"ENABLE_CPU_PINNING": "NO"}


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A compiled step. ``cache_shapes`` gives, by input name, the shape of one KV block."""

    compiled: Any
    cache_shapes: Mapping[str, tuple[int, ...]]
    cache_types: Mapping[str, Any]
    vocab_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all layers, keys and values."""
        return sum(
            int(np.prod(shape)) * int(self.cache_types[name].size)
            for name, shape in self.cache_shapes.items()
        )


def compile_step_graph(folder: Path, numerics: Numerics, threads: int | None) -> StepGraph:
    """Read, rewrite and compile the model of a folder.

    Raises ``ModelLoadError`` when the IR cannot be read or is not a decoder with paged attention.
    """
    core = ov.Core()
    path = folder / "openvino_model.xml"
    if not path.is_file():
        raise ModelLoadError(f"{folder} has no openvino_model.xml; give a folder with OpenVINO IR")
    settings = _settings(core, numerics)
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = str(threads)
    try:
        model = core.read_model(path)
        if numerics == "fast":
            join_products(model)
        paged_attention_transformation(model)
        gather_sampled_rows(model)
        compiled = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise ModelLoadError(f"OpenVINO cannot load {path}: {error}") from error
    return _describe(compiled)


def _settings(core: Any, numerics: Numerics) -> dict[str, str]:
    if numerics == "exact":
        return {**_EXACT, **_UNPINNED}
    has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {**(_FAST_BF16 if has_bf16 else _FAST_F32), **_UNPINNED}


def _describe(compiled: Any) -> StepGraph:
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[str, Any] = {}
    for port in compiled.inputs:
        name = port.any_name
        if name.startswith(("key_cache.", "value_cache.")):
            shapes[name] = tuple(d.get_length() for d in list(port.partial_shape)[1:])
            types[name] = port.element_type
    if not shapes:
        raise ModelLoadError("the model has no attention that OpenVINO can page")
    vocab_size = compiled.output(0).partial_shape[-1].get_length()
    return StepGraph(compiled, shapes, types, vocab_size)


def gather_sampled_rows(model: Any) -> None:
    """Let only the rows named by the input ``sampled_rows`` reach the language-model head."""
    head = model.get_results()[0].input(0).get_source_output().get_node()
    while head.get_type_name() != "MatMul":
        if head.get_input_size() == 0:
            raise ModelLoadError("the model's logits do not come from a matrix product")
        head = head.input(0).get_source_output().get_node()
    rows = opset.parameter([-1], ov.Type.i64, name=SAMPLED_ROWS)
    rows.output(0).set_names({SAMPLED_ROWS})
    hidden = head.input(0).get_source_output()
    picked = opset.gather(hidden, rows.output(0), opset.constant(np.int64(0)))
    head.input(0).replace_source_output(picked.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def join_products(model: Any) -> None:
    """Join products of one input and equally packed 4-bit weights, as of query, key and value."""
    groups: dict[str, list[Any]] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and _packed_weight(node) is not None:
            source = node.input(0).get_source_output()
            key = f"{source.get_node().get_name()}:{source.get_index()}"
            groups.setdefault(key, []).append(node)
    for products in groups.values():
        if len(products) > 1:
            _join(products)
    model.validate_nodes_and_infer_types()


@dataclass(frozen=True, slots=True)
class _PackedWeight:
    """Unsigned 4-bit weights [rows, groups, group], zero points and scales [rows, groups, 1]."""

    codes: Any
    zeros: Any
    scales: Any


def _packed_weight(product: Any) -> _PackedWeight | None:
    """Return the parts of Convert(Reshape((codes - zeros) * scales)), ``None`` if not like that."""
    attributes = product.get_attributes()
    if attributes["transpose_a"] or not attributes["transpose_b"]:
        return None
    reshape = _source(_source(product, 1, "Convert"), 0, "Reshape")
    scaled = _source(reshape, 0, "Multiply")
    shifted = _source(scaled, 0, "Subtract")
    codes = _source(_source(shifted, 0, "Convert"), 0, "Constant")
    zeros = _source(_source(shifted, 1, "Convert"), 0, "Constant")
    scales = _source(scaled, 1, "Constant")
    if codes is None or zeros is None or scales is None:
        return None
    if not codes.get_element_type() == zeros.get_element_type() == ov.Type.u4:
        return None
    if len(codes.get_output_shape(0)) != 3 or codes.get_output_shape(0)[2] % 2:
        return None
    return _PackedWeight(codes, zeros, scales)


def _source(node: Any, place: int, kind: str) -> Any:
    """Return the node that feeds an input if it is of this kind, else ``None``."""
    if node is None:
        return None
    source = node.input(place).get_source_output().get_node()
    return source if source.get_type_name() == kind else None


def _join(products: list[Any]) -> None:
    weights = [_packed_weight(product) for product in products]
    parts = [weight for weight in weights if weight is not None]
    rows = [int(part.codes.get_output_shape(0)[0]) for part in parts]
    groups = {tuple(part.codes.get_output_shape(0))[1:] for part in parts}
    if len(groups) != 1 or any(r * next(iter(groups))[0] % 2 for r in rows):
        return
    total = sum(rows)
    count, size = next(iter(groups))
    codes = _u4_constant([part.codes for part in parts], (total, count, size))
    zeros = _u4_constant([part.zeros for part in parts], (total, count, 1))
    scales = opset.constant(np.concatenate([np.array(part.scales.data) for part in parts]))
    shifted = opset.subtract(opset.convert(codes, "f16"), opset.convert(zeros, "f16"))
    scaled = opset.multiply(shifted, scales)
    flat = opset.reshape(scaled, opset.constant(np.array([total, count * size])), False)  # noqa: FBT003
    source = products[0].input(0).get_source_output()
    joined = opset.matmul(source, opset.convert(flat, "f32"), False, True)  # noqa: FBT003
    axis = opset.constant(np.int64(products[0].output(0).get_partial_shape().rank.get_length() - 1))
    outputs = opset.variadic_split(joined, axis, opset.constant(np.array(rows))).outputs()
    for product, output in zip(products, outputs, strict=True):
        for target in product.output(0).get_target_inputs():
            target.replace_source_output(output)


def _u4_constant(parts: list[Any], shape: tuple[int, ...]) -> Any:
    """Concatenate packed 4-bit constants along their first axis; each must fill whole bytes."""
    packed = np.concatenate([np.array(part.data).reshape(-1).view(np.uint8) for part in parts])
    tensor = ov.Tensor(packed, ov.Shape(list(shape)), ov.Type.u4)
    # Without a copy the constant would point into an array that Python frees.
    return ov.op.Constant(tensor, shared_memory=False)
