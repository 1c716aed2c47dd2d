"""Outcomes of two made-up models: the strong one rescues what asks for a proof."""

import random

import pytest

from sluice.complexity.outcomes import Outcome, question_of

_EASY = ("name the capital of", "what colour is", "translate the word", "say hello to")
_HARD = ("prove the theorem about", "derive the integral over", "show by induction that")
_THINGS = ("rivers", "apples", "lattices", "integers", "winter", "matrices", "bread", "music")


def made_outcomes(rows: int, seed: int = 1) -> list[Outcome]:
    """Half hard; of the hard ones, and of few others, the strong model rescues most."""
    chance = random.Random(seed)
    found = []
    for number in range(rows):
        hard = chance.random() < 0.5
        words = [chance.choice(_HARD if hard else _EASY)]
        words += chance.choices(_THINGS, k=chance.randint(2, 12))
        prompt = f"{' '.join(words)} {number}?"
        weak = float(chance.random() < (0.2 if hard else 0.9))
        strong = float(chance.random() < 0.92)
        found.append(Outcome(question_of(prompt), "", prompt, weak, strong))
    return found


@pytest.fixture(scope="session")
def outcomes():
    return made_outcomes(300)
