"""Bytes of the weights in files: the sum of their tensors, not parameters times nominal bits.

Quantised files keep some tensors wider and carry scales, so their size is read and not calculated.
"""

import json
from pathlib import Path

from sluice.core.errors import ModelLoadError
from sluice.executors.gguf import read_gguf
from sluice.planner.names import CannotPlan

_HEADER_BYTES_MAX = 200 << 20


def weights_bytes(path: Path) -> int:
    """Bytes of all tensors in a GGUF or safetensors file, or in all those of a folder.

    Raises ``CannotPlan`` where there is none, or where one cannot be read.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    if not files:
        raise CannotPlan(f"{path} holds no .safetensors and no .gguf file")
    return sum(_tensors_bytes(file) for file in files)


def _tensors_bytes(path: Path) -> int:
    try:
        if path.suffix == ".gguf":
            # Tensors lie one behind the other after the header, to the end of the file.
            return path.stat().st_size - min(tensor.start for tensor in read_gguf(path).tensors)
        return _safetensors_bytes(path)
    except OSError as error:
        raise CannotPlan(f"cannot read the weights {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CannotPlan(f"{path} is not a file of weights: {error}") from None
    except ModelLoadError as error:
        raise CannotPlan(f"{path} is not a file of weights: {error}") from None


def _safetensors_bytes(path: Path) -> int:
    """The header is a length of 8 bytes and a JSON object with the offsets of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_HEADER_BYTES_MAX, path.stat().st_size):
            raise ValueError("its header has no sensible length")
        header = json.loads(file.read(length))
    return sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    )
