"""Reading matrices of a GGUF file, for the conversion process only.

Decided here: which encodings are understood. Called by ``openvino_weights``. Blocks of 32 weights:
Q4_1 is scale, minimum (float16) and 16 bytes whose low halves come first; Q8_0 is a scale (float16)
and 32 signed bytes (ggml, docs/gguf.md and ggml-common.h).
"""

import numpy as np
import numpy.typing as npt

from sluice.executors.gguf import Gguf, Tensor

Matrix = npt.NDArray[np.float32]

Q4_1 = 3
Q8_0 = 8

_BLOCK = 32
_BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}


class Weights:
    """The tensors of one GGUF file, mapped into memory and decoded one at a time."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self._bytes: npt.NDArray[np.uint8] = np.memmap(gguf.path, np.uint8, mode="r")

    def decode(self, tensor: Tensor) -> Matrix:
        """Return the matrix in float32. Raises ``ValueError`` for other encodings."""
        size = _BLOCK_BYTES.get(tensor.encoding)
        if size is None:
            raise ValueError(f"{tensor.name} has encoding {tensor.encoding}")
        count = int(np.prod(tensor.shape)) // _BLOCK
        blocks = self._bytes[tensor.start : tensor.start + count * size].reshape(count, size)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if tensor.encoding == Q8_0:
            decoded = blocks[:, 2:].copy().view(np.int8) * scales
        else:
            minima = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
            codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            decoded = codes * scales + minima
        matrix: Matrix = decoded.reshape(tensor.shape)
        return matrix
