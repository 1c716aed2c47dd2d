"""Reading matrices of a GGUF file, for the conversion process only.

Decided here: which encodings are understood. Called by ``openvino_weights``. The text side of a
GGUF (tokenizer, template, facts) is in ``runtime/gguf``; this module skips over it.

The layout is that of the GGUF specification (ggml, docs/gguf.md): a header, key-value pairs, tensor
descriptions, then the tensors at aligned offsets. Blocks of 32 weights: Q4_1 is scale, minimum
(float16) and 16 bytes whose low halves come first; Q8_0 is a scale (float16) and 32 signed bytes.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

Q4_1 = 3
Q8_0 = 8

_BLOCK = 32
_BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies. ``shape`` is rows first; ``encoding`` is GGUF's type number."""

    name: str
    shape: tuple[int, ...]
    encoding: int
    offset: int


class Weights:
    """The tensors of one GGUF file, mapped into memory and decoded one at a time.

    ``numbers`` holds the numeric facts of the header by name. Raises ``ValueError`` for a file that
    is not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        reader = _Reader(self._bytes)
        if reader.take(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        reader.number("I")  # version; 2 and 3 differ in byte order only
        tensors_total, facts_total = reader.number("Q"), reader.number("Q")
        self.numbers: dict[str, float] = {}
        for _ in range(facts_total):
            name = reader.text()
            value = reader.value(reader.number("I"))
            if isinstance(value, int | float):
                self.numbers[name] = value
        self.tensors = [_tensor(reader) for _ in range(tensors_total)]
        alignment = int(self.numbers.get("general.alignment", _ALIGNMENT))
        self._start = -(-reader.place // alignment) * alignment

    def decode(self, tensor: Tensor) -> Matrix:
        """Return the matrix in float32. Raises ``ValueError`` for other encodings."""
        size = _BLOCK_BYTES.get(tensor.encoding)
        if size is None:
            raise ValueError(f"{tensor.name} has encoding {tensor.encoding}")
        count = int(np.prod(tensor.shape)) // _BLOCK
        start = self._start + tensor.offset
        blocks = self._bytes[start : start + count * size].reshape(count, size)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if tensor.encoding == Q8_0:
            decoded = blocks[:, 2:].copy().view(np.int8) * scales
        else:
            minima = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
            codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            decoded = codes * scales + minima
        matrix: Matrix = decoded.reshape(tensor.shape)
        return matrix


class _Reader:
    """Reads the header from its beginning."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content = content
        self.place = 0

    def take(self, size: int) -> bytes:
        self.place += size
        return self._content[self.place - size : self.place].tobytes()

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.number("I"), self.number("Q")
            if element in _SCALARS:
                self.take(count * struct.calcsize("<" + _SCALARS[element]))
            else:
                for _ in range(count):
                    self.value(element)
            return None
        return self.number(_SCALARS[kind])


def _tensor(reader: _Reader) -> Tensor:
    name = reader.text()
    dimensions = [reader.number("Q") for _ in range(reader.number("I"))]
    return Tensor(name, tuple(dimensions[::-1]), reader.number("I"), reader.number("Q"))
