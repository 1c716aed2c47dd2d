"""A text of other words than those of the training is noticed."""

import numpy as np
import pytest

from sluice.complexity.familiar import familiar_of, words_of
from sluice.complexity.features import _flat, seen
from sluice.complexity.model_file import default_model
from tests.complexity.conftest import made_outcomes


def test_texts_like_those_of_the_training_are_familiar_and_others_are_not():
    prompts = [one.prompt for one in made_outcomes(300)]
    familiar = familiar_of(prompts, np.arange(300) % 5)
    fresh = [one.prompt for one in made_outcomes(300, seed=9)]
    assert np.mean([familiar.knows(words_of(seen(text).grams)) for text in fresh]) > 0.95
    assert not familiar.knows(words_of(seen("Wie viel kostet ein Fahrrad in Bremen?").grams))
    assert not familiar.knows(words_of(seen("").grams))


@pytest.mark.parametrize(
    ("text", "is_familiar"),
    [
        ("What is the capital of France?", True),
        ("A train travels 60 miles in 2 hours. How fast is it?", True),
        ("Bonjour, pouvez-vous m'aider avec ma facture du mois dernier?", False),
        ("请证明没有最大的素数", False),
        ("zxqv wklm pqrt bnmz", False),
    ],
)
def test_the_default_model_knows_english_and_says_so_of_no_other_language(text, is_familiar):
    assert (default_model().judged(text) is not None) is is_familiar


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t x",
        "Hello  World\n\n{A} \\frac? 12",
        "\x1c\x1d a\x1fb\x85c",
        "日本 語 Text İ ẞ ΣΑΣ",
        "a\u00a0b  C\u2003d’s",
        "naïve café – “quoted”  TEXT",
        "\x00\x01A  b",
    ],
)
def test_bytes_are_folded_as_text_is(text):
    folded = " ".join(text.lower().split())
    assert _flat(text) == (folded.encode(), len(folded))
