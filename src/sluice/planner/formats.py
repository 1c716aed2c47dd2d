"""Number formats of weights, activations and KV: bytes per value, and which peak rate they use.

Pure tables. A precision names all three, because a format that saves bytes does not always save
arithmetic: 4-bit weights with 16-bit activations are read fast and multiplied at the 16-bit peak.
"""

from dataclasses import dataclass

from sluice.planner.names import chosen

# Bytes per value with the scales that belong to it: NVFP4 has one byte per 16 values, MXFP4 one
# per 32, q8_0 and q4_0 two per 32, int4 two and a half per 128.
BYTES_PER_VALUE = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "int4": 0.53,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
}


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats of the weights, of the values that are multiplied with them, and of the KV cache.

    ``attention`` is the format of the attention and head weights where it is not that of the rest.
    """

    weights: str
    activations: str
    kv: str
    attention: str | None = None


PRECISIONS = {
    "bf16": Precision("bf16", "bf16", "bf16"),
    "fp16": Precision("fp16", "bf16", "fp16"),
    "fp8": Precision("fp8", "fp8", "fp8"),
    "fp4": Precision("nvfp4", "fp4", "fp8"),
    "nvfp4": Precision("nvfp4", "fp4", "fp8"),
    "mxfp4": Precision("mxfp4", "mxfp8", "fp8"),
    "int8": Precision("int8", "int8", "bf16"),
    "int4": Precision("int4", "bf16", "bf16"),
    "q8_0": Precision("q8_0", "bf16", "bf16"),
    "q4_0": Precision("q4_0", "bf16", "bf16"),
}


def precision_named(name: str, kv: str | None = None) -> Precision:
    """The precision of that name, with another KV format where one is given.

    Raises ``CannotPlan`` with the nearest name for an unknown one.
    """
    precision = PRECISIONS[chosen("precision", name, PRECISIONS)]
    if kv is None:
        return precision
    kv_format = chosen("KV format", kv, BYTES_PER_VALUE)
    return Precision(precision.weights, precision.activations, kv_format, precision.attention)
