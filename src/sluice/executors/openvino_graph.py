"""From OpenVINO IR to a graph that computes one step over a paged KV pool.

Decided here: how the model is rewritten before it is compiled, and with which settings. Called by
``openvino`` when it loads. Running steps, owning the KV pool and choosing tokens must not live
here.

Rewrites, in order: matrix products that share an input are joined into one (fewer, larger kernels;
each output is the same sum of products as before), except a gate's; attention becomes OpenVINO's
paged attention; and only sampled rows reach the language-model head, through a Gather on its input,
since a step needs logits for one position in hundreds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
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

# Where a model says that its activations were evened out; see ``openvino_smoothing``.
SMOOTHED = ["sluice", "smoothed"]

# Groups of activations that share a scale. Larger ones are faster and less precise: those of 192
# keep within 1 % of perplexity only where activations were evened out.
_ACTIVATION_GROUPS = (128, 96, 64)
_SMOOTHED_GROUPS = (192, *_ACTIVATION_GROUPS)

# Functions that a kernel applies to its own result, unless something else must be cut from it.
_FUSED_FUNCTIONS = {"Gelu", "Relu", "Sigmoid", "Swish"}

# Threads that are free to move lose nothing alone, and replicas that each pin theirs would share
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
            settings.update(_activation_groups(model))
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


def _activation_groups(model: Any) -> dict[str, str]:
    """Choose the largest groups in which activations can be quantised, where we have the choice.

    The kernels multiply in 8 bits only if groups of activations do not cross groups of weights:
    with weights scaled per row, groups that divide every row do. Where weights have groups the
    plugin's default is left.
    """
    nodes = model.get_ops()
    weights = [weight for node in nodes if (weight := packed_weight(node)) is not None]
    if not weights or not all(weight.per_row for weight in weights):
        return {}
    widths = {weight.row_shape[0] for weight in weights}
    sizes = _SMOOTHED_GROUPS if model.has_rt_info(SMOOTHED) else _ACTIVATION_GROUPS
    fitting = (size for size in sizes if all(width % size == 0 for width in widths))
    size = next(fitting, None)
    return {} if size is None else {"DYNAMIC_QUANTIZATION_GROUP_SIZE": str(size)}


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
    """Join products of one input and equally packed weights, as of query, key and value.

    A gate and the product beside it stay apart: joined, splitting them and applying the gate's
    function would take two more passes over the largest intermediate results of a step.
    """
    groups: dict[tuple[object, ...], list[Any]] = {}
    for node in model.get_ordered_ops():
        weight = packed_weight(node)
        if weight is not None:
            source = node.input(0).get_source_output()
            kind = str(weight.codes.get_element_type())
            key = (source.get_node().get_name(), source.get_index(), kind, weight.row_shape)
            groups.setdefault(key, []).append(node)
    for products in groups.values():
        if len(products) > 1 and not any(_feeds_function(product) for product in products):
            _join(products)
    model.validate_nodes_and_infer_types()


def _feeds_function(product: Any) -> bool:
    targets = product.output(0).get_target_inputs()
    return any(target.get_node().get_type_name() in _FUSED_FUNCTIONS for target in targets)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The constants behind a product's weights.

    Four bits: codes [rows, groups, group], zero points and scales [rows, groups, 1]. Eight bits:
    signed codes [rows, columns], no zero points, scales [rows, 1].
    """

    codes: Any
    zeros: Any | None
    scales: Any

    @property
    def per_row(self) -> bool:
        """Whether one scale covers a whole row."""
        return self.zeros is None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row of codes: [columns], or [groups, group]."""
        return tuple(int(size) for size in list(self.codes.get_output_shape(0))[1:])


def packed_weight(product: Any) -> PackedWeight | None:
    """Return the packed weights of a matrix product, ``None`` for other nodes and weights.

    Known are Convert(Reshape((codes - zeros) * scales)) with unsigned codes in groups, as GenAI
    writes them, and Convert(codes * scales) with signed codes, as ``openvino_weights`` does.
    """
    if product.get_type_name() != "MatMul":
        return None
    attributes = product.get_attributes()
    if attributes["transpose_a"] or not attributes["transpose_b"]:
        return None
    decoded = _source(product, 1, "Convert")
    reshape = _source(decoded, 0, "Reshape")
    scaled = _source(decoded if reshape is None else reshape, 0, "Multiply")
    scales = _source(scaled, 1, "Constant")
    if reshape is None:
        codes = _source(_source(scaled, 0, "Convert"), 0, "Constant")
        if codes is None or scales is None or codes.get_element_type() != ov.Type.i8:
            return None
        return PackedWeight(codes, None, scales)
    shifted = _source(scaled, 0, "Subtract")
    codes = _source(_source(shifted, 0, "Convert"), 0, "Constant")
    zeros = _source(_source(shifted, 1, "Convert"), 0, "Constant")
    if codes is None or zeros is None or scales is None or len(codes.get_output_shape(0)) != 3:
        return None
    if not {codes.get_element_type(), zeros.get_element_type()} <= {ov.Type.u4, ov.Type.u8}:
        return None
    return PackedWeight(codes, zeros, scales)


def dequantised(product: Any) -> npt.NDArray[np.float32]:
    """Return the weights of a product with packed weights, [rows, columns]."""
    weight = packed_weight(product)
    assert weight is not None
    values = _unpacked(weight.codes).astype(np.float32)
    if weight.zeros is not None:
        values -= _unpacked(weight.zeros)
    values *= np.array(weight.scales.data).astype(np.float32)
    return values.reshape(values.shape[0], -1)


def _source(node: Any, place: int, kind: str) -> Any:
    """Return the node that feeds an input if it is of this kind, else ``None``."""
    if node is None:
        return None
    source = node.input(place).get_source_output().get_node()
    return source if source.get_type_name() == kind else None


def _unpacked(constant: Any) -> npt.NDArray[Any]:
    """Return the elements of a constant; two 4-bit ones share a byte, the first in its low half."""
    shape = list(constant.get_output_shape(0))
    if constant.get_element_type() != ov.Type.u4:
        return np.array(constant.data).reshape(shape)
    packed = np.array(constant.data).reshape(-1).view(np.uint8)
    elements = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
    return elements[: int(np.prod(shape))].reshape(shape)


def _join(products: list[Any]) -> None:
    weights = [weight for product in products if (weight := packed_weight(product)) is not None]
    rows = [int(weight.codes.get_output_shape(0)[0]) for weight in weights]
    scales = opset.constant(np.concatenate([np.array(weight.scales.data) for weight in weights]))
    codes = opset.convert(_joined_constant([weight.codes for weight in weights]), "f16")
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    if zeros:
        shifted = opset.subtract(codes, opset.convert(_joined_constant(zeros), "f16"))
        columns = int(np.prod(weights[0].row_shape))
        shape = opset.constant(np.array([sum(rows), columns]))
        decoded = opset.reshape(opset.multiply(shifted, scales), shape, special_zero=False)
    else:
        decoded = opset.multiply(codes, scales)
    source = products[0].input(0).get_source_output()
    joined = opset.matmul(
        source, opset.convert(decoded, "f32"), transpose_a=False, transpose_b=True
    )
    axis = products[0].output(0).get_partial_shape().rank.get_length() - 1
    split = opset.variadic_split(joined, opset.constant(np.int64(axis)), opset.constant(rows))
    for product, output in zip(products, split.outputs(), strict=True):
        for target in product.output(0).get_target_inputs():
            target.replace_source_output(output)


def _joined_constant(parts: list[Any]) -> Any:
    """Concatenate constants along their first axis."""
    elements = np.concatenate([_unpacked(part) for part in parts])
    if parts[0].get_element_type() != ov.Type.u4:
        return opset.constant(elements)
    flat = elements.reshape(-1)
    flat = np.pad(flat, (0, flat.size % 2))
    packed = (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)
    tensor = ov.Tensor(packed, ov.Shape(list(elements.shape)), ov.Type.u4)
    # Without a copy the constant would point into an array that Python frees.
    return ov.op.Constant(tensor, shared_memory=False)
