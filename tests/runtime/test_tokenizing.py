"""Text to tokens and back, over small vocabularies."""

import json
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.errors import InvalidRequest, ModelLoadError
from sluice.runtime.model_folder import ModelFolder
from sluice.runtime.tokenizing import Tokenizer
from tests.runtime.gguf_files import (
    byte_level_values,
    facts_of,
    sentencepiece_values,
    tokenizer_of,
)

TINY = tokenizer_of(byte_level_values())
QWEN = tokenizer_of(byte_level_values(pre="qwen2"))
SPACED = tokenizer_of(sentencepiece_values())
START, END, PAD, TOOL = 263, 264, 265, 266

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["hello world", "<|im_end|>", "a<|start|>b", "é 👩‍👩‍👧 1234\n\n\t", "  two  spaces ", "e\u0301"]
)


def test_merges_and_digits_are_applied():
    assert [TINY.table.raw[token] for token in TINY.encode_text("hello 12")] == [
        b"hello",
        b" ",
        b"1",
        b"2",
    ]


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", " x", "\n\n", " y"]),
        ("smollm", ["I", "'", "LL", " pay", " ", *"12345", " x", "\n\n", " y"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", " x", "\n\n", " y"]),
        ("qwen2", ["I", "'LL", " pay", " ", *"12345", " x", "\n\n", " y"]),
        ("gpt-4o", ["I'LL", " pay", " ", "123", "45", " x", "\n\n", " y"]),
        ("tekken", ["I", "'LL", " pay", " ", *"12345", " x", "\n\n", " y"]),
    ],
)
def test_each_family_cuts_text_in_its_way(pre, cuts):
    cut = tokenizer_of(byte_level_values(pre=pre))._rust.pre_tokenizer
    pieces = [piece for piece, _ in cut.pre_tokenize_str("I'LL pay 12345 x\n\n y")]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in pieces] == cuts


def test_sentencepiece_merges_the_pair_with_the_best_score_first():
    pieces = [SPACED.table.raw[token] for token in SPACED.encode_text("lor")]
    assert pieces == [b"<s>", b" ", b"lo", b"r"]


def test_composed_and_decomposed_text_are_one_where_the_family_says_so():
    assert QWEN.encode_text("e\u0301") == QWEN.encode_text("é")
    assert TINY.encode_text("e\u0301") != TINY.encode_text("é")


def test_words_of_the_vocabulary_come_before_merges_in_families_that_say_so():
    values = byte_level_values(pre="llama-bpe")
    values["tokenizer.ggml.tokens"][0] = "hexagon"
    assert tokenizer_of(values).encode_text("hexagon") == (0,)


@pytest.mark.parametrize(("pre", "adds"), [("smollm", False), ("llama-bpe", True)])
def test_a_file_without_the_flag_follows_the_rule_of_its_family(pre, adds):
    values = byte_level_values(pre=pre)
    del values["tokenizer.ggml.add_bos_token"]
    assert facts_of(values).add_bos is adds
    assert facts_of(sentencepiece_values()).add_bos


def test_special_tokens_are_recognised_in_rendered_chats_only():
    text = "<|start|>hello<|im_end|>"
    assert TINY.encode_chat(text) == (START, 259, END)
    plain = TINY.encode_text(text)
    assert not {START, END} & set(plain)
    assert b"".join(TINY.table.raw[token] for token in plain).decode() == text


def test_a_beginning_of_sequence_token_is_put_in_front_once():
    tokenizer = Tokenizer(TINY._rust, replace(TINY.facts, add_bos=True))
    assert tokenizer.encode_text("hello") == (START, 259)
    assert tokenizer.encode_chat("hello") == (START, 259)
    assert tokenizer.encode_chat("<|start|>hello") == (START, 259)
    assert tokenizer.encode_text("") == (START,)
    assert TINY.encode_text("") == ()


def test_every_token_has_its_bytes():
    assert TINY.vocab_size == len(TINY.table.raw) == 267
    assert sorted(TINY.table.raw[:256]) == [bytes([byte]) for byte in range(256)]
    assert TINY.table.raw[END] == b"<|im_end|>"
    assert TINY.table.shown[END] == b""
    assert TINY.table.shown[TOOL] == b"<tool_call>"
    assert SPACED.table.raw[3 + 0x41] == b"A"
    assert SPACED.table.raw[3 + 256 + 4] == b" hello"


def test_ids_that_only_pad_the_logits_have_no_bytes():
    padded = Tokenizer(TINY._rust, replace(TINY.facts, vocab_size=300))
    assert len(padded.table.raw) == 300
    assert padded.table.raw[299] == b""


@given(texts)
def test_decoding_gives_the_text_back(text):
    assert TINY.decode(TINY.encode_text(text)) == text
    assert SPACED.decode(SPACED.encode_text(text)) == text


@given(texts, st.integers(1, 50))
def test_a_text_never_has_fewer_tokens_than_the_bound(text, times):
    text *= times
    for tokenizer in (TINY, QWEN, SPACED):
        low = tokenizer.tokens_min(len(text.encode()))
        assert low <= len(tokenizer.encode_text(text))
        assert low <= len(tokenizer.encode_chat(text))
    if text:
        assert TINY.tokens_min(len(text.encode())) > 0


def test_the_bound_allows_for_composition_of_characters():
    assert TINY.tokens_min(3300) == 3300 // len("<tool_call>")
    assert QWEN.tokens_min(3300) == TINY.tokens_min(3300) // 3


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aaa"}, "content": ""}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    ],
)
def test_there_is_no_bound_where_text_can_vanish(part):
    changed = {**json.loads(TINY._rust.to_str()), **part}
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(changed)), TINY.facts)
    assert tokenizer.tokens_min(10**9) == 0


def test_truncation_and_padding_of_a_file_are_ignored():
    rust = tokenizers.Tokenizer.from_str(TINY._rust.to_str())
    rust.enable_truncation(3)
    rust.enable_padding(length=8)
    tokenizer = Tokenizer(rust, TINY.facts)
    assert tokenizer.encode_text("abcdef") == TINY.encode_text("abcdef")


def test_half_a_surrogate_pair_is_refused():
    for encode in (TINY.encode_text, TINY.encode_chat):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode("a\ud800b")


def test_tokens_are_found_by_their_text():
    assert TINY.token_id("<tool_call>") == TOOL
    assert TINY.token_id("<nothing>") is None


def test_end_tokens_are_those_named_and_those_that_end_a_turn():
    assert facts_of(byte_level_values()).end_tokens == (PAD, END)


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": {"type": "Magic"}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_a_load_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(ModelFolder(tmp_path, TINY.facts))


def test_a_missing_tokenizer_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be read"):
        Tokenizer.load(ModelFolder(tmp_path, TINY.facts))
