"""Evening out what matrix products read, for the conversion process only.

Decided here: which channels are scaled before weights are packed, and by how much. Called by
``openvino_weights``; how weights are packed must not be decided here.

A normalisation ends in a gain per channel, and the matrices that read it have a column per channel.
Dividing the gain and multiplying the columns by one number leaves the product as it is, but not
its rounding: activations share a scale in groups, so a channel much larger than its neighbours
leaves few of the eight bits to them. SmoothQuant (Xiao et al., ICML 2023, equation 4) chooses the
numbers so that both sides carry half of the unevenness. On SmolLM2-135M-Instruct groups of 192
are then more precise than groups of 96 without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as opset

from sluice.executors.gguf_weights import Matrix

# Exponents of activation and weight are alike in equation 4.
_MIGRATION = 0.5

# A column much larger than the others takes the scale of its row for itself. Without a bound the
# squared error that rounding weights causes grew by half, with this one it did not grow.
_FACTOR_MAX = 3.0

# Tokens at random find the large channels about as well as text does (the squared error of a
# token's log-probability is 10 % higher), and need no text.
_TOKENS = 512

# Below this a channel is as good as unused; a quotient of it would say nothing.
_LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class _Norm:
    """A normalisation: where it takes its gain, that gain, and the places of its readers."""

    gain_input: Any
    gain: Any
    readers: tuple[int, ...]

    @property
    def output(self) -> Any:
        return self.gain_input.get_node().output(0)


def smooth(model: Any, products: Sequence[Any], matrices: Sequence[Matrix]) -> list[Matrix]:
    """Divide the gains in ``model``; return each product's matrix, its columns multiplied.

    Normalisations that something else reads, and matrices that read something else, are left.
    """
    norms = _norms(products)
    smoothed = list(matrices)
    for norm, activations in zip(norms, _largest_activations(model, norms), strict=True):
        columns = np.max([np.abs(matrices[place]).max(axis=0) for place in norm.readers], axis=0)
        factors = np.maximum(activations, _LEAST) ** _MIGRATION
        factors /= np.maximum(columns, _LEAST) ** (1 - _MIGRATION)
        factors /= np.exp(np.log(factors).mean())
        factors = np.clip(factors, 1 / _FACTOR_MAX, _FACTOR_MAX)
        gain = np.array(norm.gain.data).astype(np.float32)
        divided = opset.constant((gain / factors.reshape(gain.shape)).astype(np.float32))
        norm.gain_input.replace_source_output(divided.output(0))
        for place in norm.readers:
            smoothed[place] = matrices[place] * factors.astype(np.float32)
    return smoothed


def _norms(products: Sequence[Any]) -> list[_Norm]:
    readers: dict[tuple[str, int], list[int]] = {}
    for place, product in enumerate(products):
        source = product.input(0).get_source_output()
        readers.setdefault((source.get_node().get_name(), source.get_index()), []).append(place)
    norms = []
    for places in readers.values():
        output = products[places[0]].input(0).get_source_output()
        targets = {target.get_node().get_name() for target in _values_read(output)}
        gain_input = _gain_input(output)
        if gain_input is not None and targets == {products[n].get_name() for n in places}:
            norms.append(_Norm(gain_input, _constant(gain_input), tuple(places)))
    return norms


def _values_read(output: Any) -> list[Any]:
    """Return the inputs that read values; the shape is the same however channels are scaled."""
    return [t for t in output.get_target_inputs() if t.get_node().get_type_name() != "ShapeOf"]


def _gain_input(output: Any) -> Any:
    """Return the input where a gain per channel is multiplied, ``None`` where there is none."""
    node = output.get_node()
    if node.get_type_name() != "Multiply":
        return None
    channels = output.get_partial_shape()[-1]
    for gain_input in node.inputs():
        constant = _constant(gain_input)
        if constant is not None and channels == np.array(constant.data).size:
            return gain_input
    return None


def _constant(target: Any) -> Any:
    """Return the constant behind an input, also through a conversion, ``None`` for other nodes."""
    node = target.get_source_output().get_node()
    if node.get_type_name() == "Convert":
        node = node.input(0).get_source_output().get_node()
    return node if node.get_type_name() == "Constant" else None


def _largest_activations(model: Any, norms: Sequence[_Norm]) -> list[Any]:
    """Run the model once; return the largest size of each channel, one array per norm."""
    results = []
    for norm in norms:
        axes = opset.constant(np.arange(norm.output.get_partial_shape().rank.get_length() - 1))
        results.append(opset.result(opset.reduce_max(opset.absolute(norm.output), axes)))
    first = len(model.outputs)
    model.add_results(results)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    logits = model.output(0).get_partial_shape()
    tokens = np.random.default_rng(0).integers(logits[-1].get_length(), size=(1, _TOKENS))
    given = {
        "input_ids": tokens,
        "attention_mask": np.ones((1, _TOKENS), np.int64),
        "position_ids": np.arange(_TOKENS)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    request.infer({port.any_name: given[port.any_name] for port in model.inputs})
    largest = [
        request.get_output_tensor(first + place).data.reshape(-1).copy()
        for place in range(len(norms))
    ]
    for result in results:
        model.remove_result(result)
    return largest
