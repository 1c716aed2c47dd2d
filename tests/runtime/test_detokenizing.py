"""Tokens to text, one at a time and all at once."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.runtime.detokenizing import Detokenizer, TokenTable

BYTES = TokenTable(tuple(bytes([byte]) for byte in range(256)))
PIECES = TokenTable(
    (
        b"Hello",
        b" world",
        b"\xf0\x9f",
        b"\x98\x80",
        b"\xe2\x82",
        b"\xac",
        b"<s>",
        b"",
        b"\xff",
        b" ",
    ),
    special=frozenset({6}),
)
SPACED = TokenTable(
    (b" Hello", b" ", b"a", b"\xe2\x82", b"\xac", b"<s>"),
    special=frozenset({5}),
    strips_first_space=True,
)


def pieces(table, tokens, **how):
    detokenizer = Detokenizer(table, **how)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_joined_pieces_equal_the_whole_decoding_of_any_bytes(tokens):
    joined = "".join(pieces(BYTES, tokens))
    assert joined == bytes(tokens).decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_no_piece_holds_part_of_a_character(text):
    got = pieces(BYTES, text.encode("utf-8", "replace"))
    assert "".join(got) == text
    assert got[-1] == ""


@given(st.lists(st.integers(0, 9), max_size=30))
def test_special_tokens_are_no_text(tokens):
    expected = b"".join(PIECES.raw[token] for token in tokens if token != 6)
    assert "".join(pieces(PIECES, tokens)) == expected.decode("utf-8", "replace")


def test_bytes_of_a_character_wait_for_each_other():
    assert pieces(PIECES, [0, 2, 3, 4, 5]) == ["Hello", "", "😀", "", "€", ""]


def test_bytes_that_never_become_a_character_end_as_a_replacement():
    assert pieces(PIECES, [0, 2]) == ["Hello", "", "\ufffd"]
    assert pieces(PIECES, [2, 0]) == ["", "\ufffdHello", ""]


def test_a_special_token_between_the_bytes_of_a_character_does_not_break_it():
    assert pieces(PIECES, [2, 6, 3]) == ["", "", "😀", ""]


def test_special_tokens_that_are_asked_for_are_shown():
    assert pieces(PIECES, [0, 6], visible=frozenset({6})) == ["Hello", "<s>", ""]


def test_only_the_first_space_of_a_new_text_is_dropped():
    assert pieces(SPACED, [0, 0]) == ["Hello", " Hello", ""]
    assert pieces(SPACED, [1, 0]) == ["", " Hello", ""]
    assert pieces(SPACED, [2, 0]) == ["a", " Hello", ""]
    assert pieces(SPACED, [3, 4, 0]) == ["", "€", " Hello", ""]
    assert pieces(SPACED, [5, 0]) == ["", "Hello", ""]
    assert pieces(SPACED, [0], continues_text=True) == [" Hello", ""]
