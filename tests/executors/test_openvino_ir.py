"""Converting a GGUF: what is left behind when it works, and when it does not."""

import struct
import sys

import numpy as np
import openvino as ov
import pytest

from sluice.core.errors import ModelLoadError
from sluice.executors import openvino_ir
from sluice.executors.gguf import read_gguf
from sluice.executors.gguf_weights import Q4_1, Q8_0, Weights
from sluice.executors.openvino_graph import dequantised, packed_weight
from sluice.executors.openvino_ir import prepare_ir
from sluice.executors.openvino_weights import _row_orders


@pytest.mark.model
def test_converted_weights_are_those_of_the_file_but_for_the_size_of_columns(
    smollm2_gguf, smollm2_folder
):
    model = ov.Core().read_model(smollm2_folder / "openvino_model.xml")
    products = [node for node in model.get_ordered_ops() if packed_weight(node) is not None]
    assert len(products) == 30 * 7 + 1
    weights = Weights(read_gguf(smollm2_gguf))
    parts = [(f"blk.{layer}.", products[7 * layer : 7 * layer + 7]) for layer in (0, 10, 20, 29)]
    for name, nodes in [*parts, ("token_embd", products[-1:])]:
        tensors = [t for t in weights.gguf.tensors if t.name.startswith(name) and len(t.shape) == 2]
        matrices = [weights.decode(tensor) for tensor in tensors]
        for known in map(dequantised, nodes):
            differences = [
                difference(known, matrix if order is None else matrix[order])
                for matrix in matrices
                if matrix.shape == known.shape
                for order in _row_orders(known.shape[0], [9, 3])
            ]
            assert min(differences) < 0.02


def difference(known: np.ndarray, matrix: np.ndarray) -> float:
    """Root mean square of what differs, however the columns were scaled, relative to all."""
    factors = (known * matrix).sum(axis=0) / (matrix**2).sum(axis=0)
    return float(np.sqrt(((known - matrix * factors) ** 2).mean() / (known**2).mean()))


def test_q4_1_and_q8_0_blocks_decode_to_the_values_of_the_format(tmp_path):
    codes = np.arange(32) % 16
    low_first = (codes[:16] | codes[16:] << 4).astype(np.uint8).tobytes()
    q4_1 = np.array([0.5, -3.0], np.float16).tobytes() + low_first
    q8_0 = np.array([0.25], np.float16).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 2)
    header += text("skipped") + struct.pack("<IIQ", 9, 8, 1) + text("word")
    header += text("x.attention.head_count") + struct.pack("<II", 4, 9)
    header += text("a") + struct.pack("<IQQIQ", 2, 32, 1, Q4_1, 0)
    header += text("b") + struct.pack("<IQQIQ", 2, 32, 1, Q8_0, 32)
    content = header + bytes(-len(header) % 32) + q4_1.ljust(32, b"\0") + q8_0
    (tmp_path / "x.gguf").write_bytes(content)
    weights = Weights(read_gguf(tmp_path / "x.gguf"))
    first, second = (weights.decode(tensor) for tensor in weights.gguf.tensors)
    assert weights.gguf.number("x.attention.head_count") == 9
    assert first.tolist() == [(codes * 0.5 - 3).tolist()]
    assert second.tolist() == [(np.arange(-16, 16) * 0.25).tolist()]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.model
@pytest.mark.slow
def test_a_gguf_becomes_a_folder_with_ir_and_nothing_else(smollm2_gguf, tmp_path):
    told: list[str] = []
    prepare_ir(smollm2_gguf, tmp_path / "ir", told.append)
    names = {file.name for file in (tmp_path / "ir").iterdir()}
    assert {"openvino_model.xml", "openvino_model.bin"} <= names
    assert all(name.startswith("openvino_") for name in names)
    assert told


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path):
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match="cannot convert"):
        prepare_ir(source, tmp_path / "ir", lambda _: None)
    assert list((tmp_path / "ir").iterdir()) == []


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist"):
        prepare_ir(tmp_path / "none.gguf", tmp_path / "ir", lambda _: None)


def test_a_converter_that_is_killed_is_reported_as_such(tmp_path, monkeypatch):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"")
    killer = tmp_path / "killer"
    killer.write_text("#!/bin/sh\nkill -9 $$\n")
    killer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killer))
    with pytest.raises(ModelLoadError, match="signal 9"):
        prepare_ir(source, tmp_path / "ir", lambda _: None)


def test_a_converter_that_does_not_end_is_given_up(tmp_path, monkeypatch):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"")
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(openvino_ir, "_CONVERSION_S_MAX", 0.2)
    with pytest.raises(ModelLoadError, match="did not end"):
        prepare_ir(source, tmp_path / "ir", lambda _: None)
