"""The same text gives the same features wherever it stands; no text is too odd or too long."""

import numpy as np
import pytest

from sluice.complexity.features import (
    BYTES_MAX,
    FAMILIES,
    HEAD_CHARS,
    SHAPE_NAMES,
    TAIL_CHARS,
    buckets,
    seen,
)

ODD = {
    "empty": "",
    "one": "a",
    "spaces": " \n\t ",
    "null bytes": "\0" * 50,
    "lone surrogate": "a\ud800b",
    "right to left": "مرحبا بالعالم",
    "longer in lower case": "İ" * 4000,
    "huge": "word " * 400_000,
    "no spaces": "x" * 100_000,
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_any_text_has_finite_features_of_bounded_size(text):
    found = seen(text)
    assert len(found.grams) == FAMILIES
    assert found.shape.shape == (len(SHAPE_NAMES),)
    assert np.isfinite(found.shape).all()
    assert all(len(grams) <= BYTES_MAX for grams in found.grams)


def test_hashes_are_these_on_every_platform():
    found = seen("Ab 1")
    assert [grams.tolist() for grams in found.grams] == [
        [1350204586, 862555579],
        [2106049498],
        [],
        [1726705639, 3872769594],
        [3177197834],
    ]


def test_a_word_has_one_hash_wherever_it_stands():
    early, late = seen("needle in a stack of hay"), seen("a long way down there is a needle")
    assert set(early.grams[3].tolist()) & set(late.grams[3].tolist()) == {
        *seen("needle").grams[3].tolist(),
        *seen("a").grams[3].tolist(),
    }


def test_the_slope_of_length_changes_at_its_bends():
    shape = dict(zip(SHAPE_NAMES, seen("x" * 600).shape.tolist(), strict=True))
    assert shape["beyond_300_characters"] == pytest.approx(np.log(2))
    assert shape["beyond_1000_characters"] == 0.0


def test_a_pair_of_words_depends_on_their_order():
    assert seen("man bites").grams[4].tolist() != seen("bites man").grams[4].tolist()


def test_case_and_white_space_leave_the_ngrams_as_they_are():
    for one, other in zip(seen("Hello  World\n").grams, seen("hello world").grams, strict=True):
        assert one.tolist() == other.tolist()


def test_padding_in_the_middle_changes_nothing():
    head, tail = "start " * HEAD_CHARS, "end. " * TAIL_CHARS
    one, other = seen(head + tail), seen(head + "padding " * 10_000 + tail)
    assert one.shape.tolist() == other.shape.tolist()
    assert one.grams[0].tolist() == other.grams[0].tolist()


def test_shape_counts_what_it_names():
    shape = dict(zip(SHAPE_NAMES, seen("AB c1?\n{").shape.tolist(), strict=True))
    assert shape["digits"] == pytest.approx(1 / 8)
    assert shape["beyond_100_characters"] == 0.0
    assert shape["symbols"] == pytest.approx(2 / 8)
    assert shape["question_marks"] == shape["lines"] == shape["braces"] == pytest.approx(np.log(2))


def test_buckets_are_spread_evenly():
    text = " ".join(f"w{number}" for number in range(600))
    counts = np.bincount(buckets(seen(text).grams[3], 6), minlength=64)
    assert counts.max() < 30
