"""Reading GGUF files, whole and damaged."""

import contextlib
import re

import pytest

from sluice.core.errors import ModelLoadError
from sluice.executors.gguf import read_gguf
from tests.runtime.gguf_files import byte_level_values, gguf_bytes

VALUES = {"general.architecture": "llama", "a.number": 7, "a.flag": True, "a.texts": ["x", "é"],
          "a.scores": [1.5, -2.0], "a.types": [1, 3]}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(content: bytes):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_values_are_read_with_their_types(write):
    gguf = read_gguf(write(gguf_bytes(VALUES)))
    assert dict(gguf.values) == VALUES
    assert gguf.text("general.architecture") == "llama"
    assert gguf.number("a.number") == 7
    assert gguf.number("a.flag") is None
    assert gguf.text("missing") is None


def test_a_file_cut_anywhere_is_refused(write):
    whole = gguf_bytes(VALUES)
    for size in range(len(whole)):
        with pytest.raises(ModelLoadError):
            read_gguf(write(whole[:size]))


def test_a_truncated_file_says_how_much_is_missing(write):
    whole = gguf_bytes(byte_level_values())
    expected = re.escape(f"end at byte {len(whole)}, the file has {len(whole) - 1}")
    with pytest.raises(ModelLoadError, match=expected):
        read_gguf(write(whole[:-1]))


def test_another_file_is_named_by_how_it_begins(write):
    with pytest.raises(ModelLoadError, match=r"not a GGUF file: it begins with b'PK"):
        read_gguf(write(b"PK\x03\x04" + bytes(100)))


def test_an_unknown_version_is_refused(write):
    with pytest.raises(ModelLoadError, match="GGUF version 9"):
        read_gguf(write(gguf_bytes(VALUES, version=9)))


def test_claimed_counts_beyond_the_file_are_refused_as_truncated(write):
    content = bytearray(gguf_bytes({"a.texts": ["x"]}))
    # The array's count: behind magic, version, two counts, the key, two type words.
    at = 4 + 4 + 16 + 8 + len("a.texts") + 4 + 4
    content[at : at + 8] = (2**60).to_bytes(8, "little")
    with pytest.raises(ModelLoadError, match="truncated or damaged"):
        read_gguf(write(bytes(content)))


def test_flipped_bytes_give_a_load_error_or_a_file(write):
    whole = gguf_bytes(VALUES)
    for at in range(4, len(whole) - 4 * 64):
        content = bytearray(whole)
        content[at] ^= 0xFF
        with contextlib.suppress(ModelLoadError):
            read_gguf(write(bytes(content)))


def test_a_missing_file_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf(tmp_path / "none.gguf")
