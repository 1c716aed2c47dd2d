"""Reading the header of a GGUF file: what it says about the model, and where its tensors lie.

Decides whether a file is a whole GGUF: the end of the last tensor shows whether it was cut short.
Tensor data is read in ``gguf_weights``. Used when a model is prepared, by processes that must stay
small: nothing about tokenizers or engines lives here, and numpy is not imported.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sluice.core.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far above any published model; a damaged count is refused before memory is asked for.
ENTRIES_MAX = 1_000_000

_STRING = 8
_ARRAY = 9
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

# Tensor type -> (elements in a block, bytes of a block).
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20),
    6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies, ``start`` in bytes of the file.

    ``shape`` is rows first; ``encoding`` is GGUF's type number.
    """

    name: str
    shape: tuple[int, ...]
    encoding: int
    start: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """The header of one file. ``values`` maps keys such as ``general.architecture``."""

    path: Path
    values: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()

    def text(self, key: str) -> str | None:
        """The string at ``key``, ``None`` where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """The integer at ``key``, ``None`` where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_gguf(path: Path) -> Gguf:
    """Read the header of ``path``; raises ``ModelLoadError`` for a damaged or truncated file."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """One pass over the header, with every length checked against what is left of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size

    def read(self) -> Gguf:
        magic = self._file.read(4)
        if magic != MAGIC:
            raise ModelLoadError(f"{self._path} is not a GGUF file: it begins with {magic!r}")
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            known = " or ".join(str(v) for v in VERSIONS)
            raise ModelLoadError(
                f"{self._path} is GGUF version {version}; version {known} is read (little-endian)"
            )
        tensors, entries = self._unpack("<QQ")
        if tensors > ENTRIES_MAX or entries > ENTRIES_MAX:
            raise self._damaged(f"{entries} metadata entries and {tensors} tensors are claimed")
        values: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            (kind,) = self._unpack("<I")
            values[key] = self._value(kind)
        return Gguf(self._path, values, self._tensors(tensors, _alignment(values)))

    def _tensors(self, count: int, alignment: int) -> tuple[Tensor, ...]:
        table: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = self._string()
            (dimensions,) = self._unpack("<I")
            if dimensions > 8:
                raise self._damaged(f"a tensor of {dimensions} dimensions")
            shape = self._unpack(f"<{dimensions}Q")
            table.append((name, shape[::-1], *self._unpack("<IQ")))
        start = -(-self._file.tell() // alignment) * alignment
        tensors = tuple(
            Tensor(name, shape, encoding, start + offset) for name, shape, encoding, offset in table
        )
        needed = max((t.start + _tensor_bytes(t.shape, t.encoding) for t in tensors), default=start)
        if needed > self._size:
            raise ModelLoadError(
                f"{self._path} is truncated: its tensors end at byte {needed}, the file has"
                f" {self._size} bytes; fetch it again"
            )
        return tensors

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._unpack("<IQ")
            return self._array(element, count)
        return self._unpack("<" + self._scalar(kind))[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            raise self._damaged("an array of arrays")
        values = array(self._scalar(kind)) if kind != 7 else array("B")
        values.frombytes(self._bytes(count * values.itemsize))
        return values.tolist()

    def _scalar(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise self._damaged(f"value type {kind}") from None

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        return self._bytes(size).decode("utf-8", "surrogateescape")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def _bytes(self, size: int) -> bytes:
        at = self._file.tell()
        if size > self._size - at:
            raise ModelLoadError(
                f"{self._path} is truncated or damaged: {size} bytes are needed at byte {at}, the"
                f" file has {self._size} bytes; fetch it again"
            )
        return self._file.read(size)

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is damaged near byte {self._file.tell()}: {what}")


def _alignment(values: Mapping[str, Any]) -> int:
    alignment = values.get("general.alignment", 32)
    return alignment if isinstance(alignment, int) and alignment > 0 else 32


def _tensor_bytes(shape: tuple[int, ...], kind: int) -> int:
    """Size of a tensor, 0 for a type that is not in the table (its end is then not checked)."""
    elements = 1
    for size in shape:
        elements *= size
    per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
    return elements // per_block * block_bytes
