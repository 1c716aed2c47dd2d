"""Writing the weights of Q4_1 files into the IR as they are, for the conversion process only.

Decided here: which matrices of a converted model are replaced, and by what. Called by
``openvino_convert``. How channels are evened out before is decided in ``openvino_smoothing``.

OpenVINO GenAI turns Q4_1 into 4-bit codes with 4-bit zero points, which rounds the minimum of each
block to a multiple of its scale. On SmolLM2-135M-Instruct this moves weights by 9 % (root mean
square) and raises perplexity by 18 %. Eight bits with one scale per output row keep the weights
within 1.2 % and perplexity within 0.3 %, and let activations be quantised in larger groups, which
is faster. The price is memory: 8 bits for 5.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as opset

from sluice.executors.gguf import Tensor, read_gguf
from sluice.executors.gguf_weights import Q4_1, Q8_0, Matrix, Weights
from sluice.executors.openvino_graph import SMOOTHED, dequantised, packed_weight
from sluice.executors.openvino_smoothing import smooth

# A matrix of the IR and one of the file are the same if they differ by less than this, relative to
# their size. GenAI's rounding moves them by about 0.1; unrelated matrices differ by about 1.4.
_DIFFERENCE_MAX = 0.3

_SAMPLE_ROWS = 128


def restore_weights(folder: Path, gguf: Path) -> bool:
    """Rewrite the IR in ``folder`` if the file holds Q4_1 matrices; say whether it was rewritten.

    A model in which some product cannot be matched to a matrix of the file is left as it is.
    """
    weights = Weights(read_gguf(gguf))
    if not any(tensor.encoding == Q4_1 for tensor in weights.gguf.tensors):
        return False
    model = ov.Core().read_model(folder / "openvino_model.xml")
    products = [node for node in model.get_ordered_ops() if packed_weight(node) is not None]
    matrices = match_matrices(products, weights)
    if matrices is None:
        return False
    for product, matrix in zip(products, smooth(model, products, matrices), strict=True):
        product.input(1).replace_source_output(_eight_bit(matrix).output(0))
    model.validate_nodes_and_infer_types()
    model.set_rt_info("true", SMOOTHED)
    # Under another name first: the model still maps the file that it was read from.
    ov.save_model(model, folder / "restored.xml", compress_to_fp16=False)
    del model, products, product
    for suffix in (".bin", ".xml"):
        (folder / "restored").with_suffix(suffix).replace(folder / f"openvino_model{suffix}")
    return True


def match_matrices(products: list[Any], weights: Weights) -> list[Matrix] | None:
    """Return the file's matrix for each product, ``None`` if one has no match."""
    unused = sorted(
        (t for t in weights.gguf.tensors if t.encoding in {Q4_1, Q8_0} and len(t.shape) == 2),
        key=_layer,
    )
    heads = [
        int(count)
        for name, count in weights.gguf.values.items()
        if name.endswith((".attention.head_count", ".attention.head_count_kv"))
    ]
    matrices = []
    for product in products:
        known = dequantised(product)
        found = next(_matches(known, unused, weights, heads), None)
        if found is None:
            return None
        tensor, matrix = found
        unused.remove(tensor)
        matrices.append(matrix)
    return matrices


def _layer(tensor: Tensor) -> int:
    parts = tensor.name.split(".")
    return int(parts[1]) if parts[0] == "blk" else 0


def _matches(
    known: Matrix, tensors: list[Tensor], weights: Weights, heads: list[int]
) -> Iterator[tuple[Tensor, Matrix]]:
    norm = float(np.sqrt((known[:_SAMPLE_ROWS] ** 2).mean()))
    for tensor in tensors:
        if tensor.shape != known.shape:
            continue
        matrix = weights.decode(tensor)
        for order in _row_orders(matrix.shape[0], heads):
            ordered = matrix if order is None else matrix[order]
            difference = ordered[:_SAMPLE_ROWS] - known[:_SAMPLE_ROWS]
            if float(np.sqrt((difference**2).mean())) < _DIFFERENCE_MAX * norm:
                yield tensor, ordered


def _row_orders(rows: int, heads: list[int]) -> Iterator[Any]:
    """Yield the orders in which rows may lie: as they are, and paired for rotary embedding.

    Llama files keep query and key rows with the halves of each head interleaved.
    """
    yield None
    for count in heads:
        if rows % (2 * count) == 0:
            pairs = np.arange(rows).reshape(count, rows // count // 2, 2)
            yield pairs.swapaxes(1, 2).reshape(-1)


def _eight_bit(matrix: Matrix) -> Any:
    """Return the node that decodes signed 8-bit codes with one float16 scale per row."""
    scales = (np.abs(matrix).max(axis=1, keepdims=True) / 127).astype(np.float16)
    divisors = np.maximum(scales.astype(np.float32), np.finfo(np.float16).tiny)
    codes = np.clip(np.rint(matrix / divisors), -127, 127).astype(np.int8)
    scaled = opset.multiply(opset.convert(opset.constant(codes), "f16"), opset.constant(scales))
    return opset.convert(scaled, "f32")
