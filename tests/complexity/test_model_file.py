"""A model file holds what was trained, and is refused in words when it is anything else."""

from dataclasses import replace
from hashlib import sha256

import msgspec
import numpy as np
import pytest

from sluice.complexity.classifier import Card, Classifier, Linear
from sluice.complexity.familiar import BITS, Familiar
from sluice.complexity.features import FAMILIES, SHAPE_NAMES
from sluice.complexity.model_file import (
    FILE_BYTES_MAX,
    VERSION,
    BadModelFile,
    default_model,
    packed_model,
    read_model,
    unpacked_model,
    write_model,
)


def classifier(weight=0.25):
    shape = np.linspace(-1, 1, len(SHAPE_NAMES)).astype(np.float32)
    grams = np.random.default_rng(1).normal(0, weight, (FAMILIES, 256)).astype(np.float32)
    linear = Linear(grams, shape, shape - 3, shape + 9, 0.5)
    card = Card("mine", ("a.csv",), 3, 2, 0.5, (0.6, 0.5, 0.7), None, (0.9, 0.1), ("a note",))
    words = np.random.default_rng(2).random(1 << BITS) < 0.1
    fingerprints = np.array([5, 2**63], dtype=np.uint64)
    return Classifier(linear, 2.0, -1.0, card, Familiar(words, 0.625), fingerprints)


def sealed(body):
    return body + sha256(body).digest()


def test_what_is_written_is_read_again(tmp_path):
    made, path = classifier(), tmp_path / "m.route"
    assert write_model(made, path) == path.stat().st_size
    found = read_model(path)
    assert found.card == made.card
    assert found.familiar.share_min == 0.625
    assert np.array_equal(found.familiar.words, made.familiar.words)
    assert found.trained_on.tolist() == made.trained_on.tolist()
    assert np.allclose(found.linear.grams, made.linear.grams, rtol=1e-3, atol=1e-6)
    assert found.score("some text") == pytest.approx(made.score("some text"), abs=1e-3)
    assert [file.name for file in tmp_path.iterdir()] == ["m.route"]


def test_a_file_of_another_version_says_to_train_again():
    body = bytearray(packed_model(classifier())[:-32])
    body[8:12] = (VERSION + 1).to_bytes(4, "little")
    with pytest.raises(BadModelFile, match=f"version {VERSION + 1} .* reads {VERSION}: train it"):
        unpacked_model(sealed(bytes(body)), "m")


@pytest.mark.parametrize("size", [0, 7, 12, 40, 500, -1], ids=lambda size: f"first {size}")
def test_a_file_that_was_cut_is_refused(size):
    with pytest.raises(BadModelFile):
        unpacked_model(packed_model(classifier())[:size], "m")


@pytest.mark.parametrize("at", [20, 400, 3000, -1])
def test_a_changed_byte_is_noticed(at):
    packed = bytearray(packed_model(classifier()))
    packed[at] ^= 1
    with pytest.raises(BadModelFile, match="damaged"):
        unpacked_model(bytes(packed), "m")


def test_arrays_that_are_not_as_long_as_the_header_says_are_refused():
    with pytest.raises(BadModelFile, match="arrays of"):
        unpacked_model(sealed(packed_model(classifier())[:-40]), "m")


def test_a_header_that_is_something_else_is_refused():
    header = msgspec.msgpack.encode({"families": "many"})
    body = b"sluiceRT" + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    with pytest.raises(BadModelFile, match="header that cannot be read"):
        unpacked_model(sealed(body), "m")


def test_weights_that_are_not_finite_are_refused():
    with (
        np.errstate(over="ignore"),
        pytest.raises(BadModelFile, match="not finite"),
    ):
        unpacked_model(packed_model(classifier(weight=1e9)), "m")


def test_thresholds_that_are_not_finite_are_refused():
    made = classifier()
    card = replace(made.card, thresholds=(0.1, float("nan")))
    with pytest.raises(BadModelFile, match="not finite"):
        unpacked_model(packed_model(replace(made, card=card)), "m")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<html>not found</html>")
    with pytest.raises(BadModelFile, match="is not a file that sluice route train wrote"):
        read_model(path)
    with pytest.raises(BadModelFile, match="No such file"):
        read_model(tmp_path / "none")


def test_the_default_model_is_small_and_says_where_it_comes_from():
    found = default_model()
    assert len(packed_model(found)) < FILE_BYTES_MAX / 8
    assert found.card.rows > 10_000
    assert found.card.apgr is not None
    assert any("length" in note for note in found.card.notes)


@pytest.mark.parametrize("text", ["", "\0" * 5000, "a " * 200_000, "\ud800", "漢字" * 3000])
def test_the_default_model_gives_a_probability_of_anything(text):
    assert 0.0 < default_model().score(text) < 1.0
