"""The file of a trained classifier: written by ``sluice route train``, read where it scores.

Eight bytes that name the format, four of version and four of the header's length, the header as
MessagePack, the arrays one after another, and the SHA-256 of all that. Little-endian. Weights are
16-bit floats, which changes no APGR in the fourth digit and keeps the file near half a megabyte.
What a file says about itself is checked before anything is made of it.
"""

import os
from hashlib import sha256
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from sluice.complexity.classifier import Card, Classifier, Linear
from sluice.complexity.familiar import BITS, Familiar
from sluice.complexity.features import FAMILIES, SHAPE_NAMES

MAGIC = b"sluiceRT"
VERSION = 2
FILE_BYTES_MAX = 8 * 1024**2
DEFAULT_NAME = "default"
_FRAME_BYTES, _SUM_BYTES = 16, 32
_BITS_MAX = 18


class BadModelFile(ValueError):
    """A file that is no classifier of this version; the message says what to do."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is not an array, and how long the arrays are."""

    families: int
    bits: int
    shapes: tuple[str, ...]
    bias: float
    slope: float
    offset: float
    fingerprints: int
    familiar_share_min: float
    card: Card


def write_model(classifier: Classifier, path: Path) -> int:
    """Write a file in one piece, or leave what was there; returns its bytes. Raises ``OSError``."""
    packed = packed_model(classifier)
    if path.exists() and not path.is_file():  # a device stays one
        return path.write_bytes(packed)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(packed)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return len(packed)


def read_model(path: Path) -> Classifier:
    """The classifier of a file. Raises ``BadModelFile``."""
    if path.exists() and not path.is_file():
        raise BadModelFile(f"{path} is no regular file")  # reading a pipe might never end
    try:
        with path.open("rb") as file:
            packed = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadModelFile(f"cannot read {path}: {error.strerror}") from None
    return unpacked_model(packed, str(path))


def default_model() -> Classifier:
    """The classifier that comes with sluice."""
    file = resources.files("sluice.complexity") / "own" / "default.route"
    return unpacked_model(file.read_bytes(), "the default model")


def packed_model(classifier: Classifier) -> bytes:
    """The bytes of a file."""
    linear = classifier.linear
    header = msgspec.msgpack.encode(
        _Header(
            families=linear.grams.shape[0],
            bits=linear.grams.shape[1].bit_length() - 1,
            shapes=SHAPE_NAMES,
            bias=linear.bias,
            slope=classifier.slope,
            offset=classifier.offset,
            fingerprints=len(classifier.trained_on),
            familiar_share_min=classifier.familiar.share_min,
            card=classifier.card,
        )
    )
    body = b"".join(
        (
            MAGIC,
            VERSION.to_bytes(4, "little"),
            len(header).to_bytes(4, "little"),
            header,
            linear.grams.astype("<f2").tobytes(),
            *(part.astype("<f4").tobytes() for part in _shape_arrays(linear)),
            classifier.trained_on.astype("<u8").tobytes(),
            np.packbits(classifier.familiar.words).tobytes(),
        )
    )
    return body + sha256(body).digest()


def unpacked_model(packed: bytes, name: str) -> Classifier:
    """What ``packed_model`` packed; ``name`` is for messages. Raises ``BadModelFile``."""
    if not packed.startswith(MAGIC):
        raise BadModelFile(f"{name} is not a file that sluice route train wrote")
    version = int.from_bytes(packed[8:12], "little")
    if version != VERSION:
        raise BadModelFile(
            f"{name} has version {version} of the format and this sluice reads {VERSION}: "
            f"train it again with sluice route train"
        )
    body, found = packed[:-_SUM_BYTES], packed[-_SUM_BYTES:]
    if len(packed) > FILE_BYTES_MAX or sha256(body).digest() != found:
        raise BadModelFile(f"{name} is damaged: it is not as long or not the same as when written")
    arrays_at = _FRAME_BYTES + int.from_bytes(packed[12:16], "little")
    try:
        header = msgspec.msgpack.decode(body[_FRAME_BYTES:arrays_at], type=_Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadModelFile(f"{name} has a header that cannot be read: {error}") from None
    if (header.families, header.shapes) != (
        FAMILIES,
        SHAPE_NAMES,
    ) or not 1 <= header.bits <= _BITS_MAX:
        raise BadModelFile(f"{name} was trained with other features: train it again")
    return _classifier(header, body[arrays_at:], name)


def _classifier(header: _Header, arrays: bytes, name: str) -> Classifier:
    grams, shapes = header.families << header.bits, len(header.shapes)
    lengths = [2 * grams, *[4 * shapes] * 3, 8 * header.fingerprints, (1 << BITS) // 8]
    if header.fingerprints < 0 or sum(lengths) != len(arrays):
        raise BadModelFile(f"{name} has arrays of {len(arrays)} bytes instead of {sum(lengths)}")
    ends = np.cumsum(lengths).tolist()
    parts = [arrays[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    weights = np.frombuffer(parts[0], dtype="<f2").astype(np.float32)
    shape, low, high = (np.frombuffer(part, "<f4").astype(np.float32) for part in parts[1:4])
    numbers = np.concatenate(
        (weights, shape, low, high, (header.bias, header.slope, header.offset))
    )
    words = np.unpackbits(np.frombuffer(parts[5], np.uint8)).astype(bool)
    bounds = np.array((header.familiar_share_min, *header.card.thresholds))
    if not (np.isfinite(numbers).all() and np.isfinite(bounds).all()):
        raise BadModelFile(f"{name} has weights or thresholds that are not finite")
    return Classifier(
        linear=Linear(weights.reshape(header.families, -1), shape, low, high, header.bias),
        slope=header.slope,
        offset=header.offset,
        card=header.card,
        familiar=Familiar(words, header.familiar_share_min),
        trained_on=np.frombuffer(parts[4], "<u8").astype(np.uint64),
    )


def _shape_arrays(linear: Linear) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return linear.shape, linear.shape_low, linear.shape_high
