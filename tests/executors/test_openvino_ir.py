"""Converting a GGUF: what is left behind when it works, and when it does not."""

import sys

import pytest

from sluice.core.errors import ModelLoadError
from sluice.executors import openvino_ir
from sluice.executors.openvino_ir import prepare_ir


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
