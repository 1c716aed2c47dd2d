"""Tokens of models without a vocabulary: how many, and what they turn back into."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.errors import InvalidRequest
from sluice.core.step import StopReason
from sluice.runtime.model_folder import read_model_folder
from sluice.runtime.output import OutputRules
from sluice.runtime.tokenizing import Tokenizer
from sluice.runtime.word_pieces import (
    ANSWER_VOCABULARY,
    END_TOKEN,
    WORDS,
    MadeUpOutputs,
    WordPieces,
    made_up_facts,
)

PIECES = WordPieces(made_up_facts("m", 8192, 128_256))
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.model
@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/overload.md", "src/sluice/core/pools.py", "tests/executors/prose.txt"],
)
def test_counts_are_within_15_percent_of_a_real_tokenizer(smollm2_folder, name):
    text = (ROOT / name).read_text()
    real = len(Tokenizer.load(read_model_folder(smollm2_folder)).encode_text(text))
    assert len(PIECES.encode_text(text)) == pytest.approx(real, rel=0.15)


@given(st.text())
def test_every_character_is_in_a_token_and_none_has_more_than_the_bound(text):
    tokens = PIECES.encode_text(text)
    assert len(tokens) >= PIECES.tokens_min(len(text.encode()))
    assert len(tokens) <= len(text)
    assert all(0 < token < PIECES.facts.vocab_size for token in tokens)
    assert bool(tokens) == bool(text)


def test_prompts_that_begin_alike_share_their_first_tokens():
    first = PIECES.encode_text("The same beginning, then one thing.")
    second = PIECES.encode_text("The same beginning, then another.")
    assert first[:6] == second[:6]
    assert first != second


def test_an_answer_that_comes_back_has_the_tokens_it_was_made_of():
    answer = tuple(range(1, ANSWER_VOCABULARY))
    text = "".join(WORDS)
    assert PIECES.encode_text(text) == answer
    assert b"".join(PIECES.table.raw[token] for token in answer).decode() == text


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(InvalidRequest, match="surrogate"):
        PIECES.encode_text("a \ud800 b")


def test_outputs_show_words_and_stop_at_the_end_token():
    output, mask = MadeUpOutputs().open(0, OutputRules(), None)
    assert mask is None
    pushed = [output.push(token) for token in (1, 2, END_TOKEN)]
    texts = [push.delta.text for push in pushed if push.delta is not None]
    assert "".join(texts) == WORDS[0].strip() + WORDS[1]
    assert pushed[2].stop is StopReason.END_TOKEN
