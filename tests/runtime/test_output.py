"""What a client sees of one sequence, token by token."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.core.errors import InvalidRequest
from sluice.core.sampling import SampledLogprobs, TokenLogprob
from sluice.core.step import StopReason
from sluice.runtime.detokenizing import TokenTable
from sluice.runtime.generation import Delta
from sluice.runtime.output import OutputRules, SequenceOutput, all_but

END = 0


class Answer:
    """What a client of one choice has seen, given one piece of text per token."""

    def __init__(self, pieces, rules=None, *, ended=True, logprobs=False, grammar=None):
        raw = [b"<end>", *(p if isinstance(p, bytes) else p.encode() for p in pieces)]
        table = TokenTable(tuple(raw), special=frozenset({END}))
        self.output = SequenceOutput(3, table, (END,), rules or OutputRules(), grammar)
        self.deltas = []
        self.stop = None
        tokens = [*range(1, len(raw)), *([END] if ended else [])]
        for token in tokens:
            top = SampledLogprobs(TokenLogprob(token, -0.5), (TokenLogprob(END, -2.0),))
            delta, self.stop = self.output.push(token, top if logprobs else None)
            if delta is not None:
                self.deltas.append(delta)
            if self.stop is not None:
                break
        self.pushed = self.output.tokens
        rest = self.output.finish()
        if rest is not None:
            self.deltas.append(rest)

    @property
    def texts(self):
        return [delta.text for delta in self.deltas]

    @property
    def text(self):
        return "".join(self.texts)

    @property
    def tokens(self):
        return sum(delta.tokens for delta in self.deltas)


def test_plain_text_streams_a_piece_per_token_and_ends_with_the_end_token():
    answer = Answer(["Hel", "lo"])
    assert answer.texts == ["Hel", "lo", ""]
    assert [delta.tokens for delta in answer.deltas] == [1, 1, 1]
    assert {delta.choice for delta in answer.deltas} == {3}
    assert answer.stop is StopReason.END_TOKEN


# ------------------------------------------------------------------------------------------- D-01


def test_d01_a_the_beginning_of_a_stop_string_is_never_sent():
    answer = Answer(["ABC", "D", "EF", "G", "H"], OutputRules(stop=("DEFG",)))
    assert answer.text == "ABC"
    assert not any("D" in text for text in answer.texts)
    assert answer.stop is StopReason.STOP_STRING
    assert answer.tokens == answer.pushed == 4


def test_d01_b_text_held_for_a_stop_that_does_not_come_is_complete_at_the_end():
    answer = Answer(["ABC", "D", "EX"], OutputRules(stop=("DEFG",)))
    assert answer.texts == ["ABC", "DEX", ""]
    assert answer.stop is StopReason.END_TOKEN


def test_d01_b_a_natural_end_within_a_possible_stop_gives_the_held_text():
    answer = Answer(["ABC", "DE"], OutputRules(stop=("DEFG",)))
    assert answer.texts == ["ABC", "DE"]
    assert answer.tokens == 3


def test_d01_c_a_stop_within_one_piece_cuts_it():
    answer = Answer(["Answer\n\n"], OutputRules(stop=("\n",)))
    assert answer.text == "Answer"
    assert answer.stop is StopReason.STOP_STRING


def test_d01_d_of_two_stops_completed_together_the_earlier_start_counts():
    answer = Answer(["a", "xy", "z"], OutputRules(stop=("xyz", "yz")))
    assert answer.text == "a"


def test_d01_e_a_cut_by_length_gives_the_held_text():
    answer = Answer(["ABC", "D"], OutputRules(stop=("DEF",)), ended=False)
    assert answer.texts == ["ABC", "D"]
    assert answer.stop is None
    assert [delta.tokens for delta in answer.deltas] == [1, 1]


texts = st.text(alphabet="abcé😀\n", max_size=20)


@given(
    texts,
    st.lists(st.integers(1, 4), max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
)
@example("a😀", [], ["a"])
def test_d01_the_stream_is_valid_text_and_joins_to_the_same_answer(text, cuts, stops):
    """Tokens cut anywhere, also within characters, give the text that one token per character
    gives."""
    raw, at, pieces = text.encode(), 0, []
    for size in itertools.chain(cuts, itertools.repeat(3)):
        if at >= len(raw):
            break
        pieces.append(raw[at : at + size])
        at += size
    rules = OutputRules(stop=tuple(stops))
    answer, whole = Answer(pieces, rules), Answer(list(text), rules)
    assert answer.text == whole.text
    assert answer.stop == whole.stop
    assert answer.tokens == answer.pushed


# ------------------------------------------------------------------------------------- end tokens


def test_end_tokens_are_passed_over_where_they_are_to_be_ignored():
    rules = OutputRules(ignore_end_token=True)
    output = SequenceOutput(0, TokenTable((b"<e>", b"a"), frozenset({END})), (END,), rules)
    assert [output.push(t)[1] for t in (1, END, 1)] == [None, None, None]
    assert output.mask is None


def test_stop_tokens_end_an_output_and_are_no_part_of_it():
    answer = Answer(["a", "b", "c"], OutputRules(stop_tokens=(2,), ignore_end_token=True))
    assert answer.text == "a"
    assert answer.stop is StopReason.END_TOKEN
    assert answer.tokens == 2


def test_nothing_ends_an_output_before_its_minimum():
    table = TokenTable((b"<e>", b"ab"), frozenset({END}))
    rules = OutputRules(output_tokens_min=2, stop=("b",), stop_tokens=(9000,))
    output = SequenceOutput(0, table, (END,), rules)
    assert output.mask is output
    words = memoryview(bytearray(8)).cast("I")
    output.fill(words)
    assert words.tolist() == [0xFFFFFFFE, 0xFFFFFFFF]
    assert output.push(END).stop is None
    assert output.push(1) == (Delta(0, "ab", 2), None)
    output.fill(words)
    assert words.tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    assert output.push(1) == (Delta(0, "a", 1), StopReason.STOP_STRING)


def test_the_mask_of_many_end_tokens_is_made_once_for_all_tokens_and_choices():
    all_but.cache_clear()
    rules = OutputRules(output_tokens_min=100, stop_tokens=tuple(range(3, 4000)))
    words = memoryview(bytearray(500)).cast("I")
    for choice in range(2):
        output = SequenceOutput(choice, TokenTable((b"a",) * 4000), (END,), rules)
        for _ in range(20):
            output.fill(words)
            output.push(1)
    assert words.tolist() == [0b110] + [0] * 124
    assert all_but.cache_info().misses == 1


def test_an_end_token_ends_an_output_that_has_its_minimum():
    assert Answer(["a", "b"], OutputRules(output_tokens_min=2)).stop is StopReason.END_TOKEN
    assert Answer(["a", "b"], OutputRules(output_tokens_min=3)).stop is None


def test_finishing_twice_says_nothing_more():
    answer = Answer(["a", b"\xf0\x9f"], ended=False)
    assert answer.texts == ["a", "\ufffd"]
    assert answer.output.finish() is None


# ------------------------------------------------------------------------------------ grammars


class Countdown:
    """A grammar that is complete after a number of tokens, and breaks on token 9."""

    def __init__(self, tokens):
        self.left = tokens

    def fill(self, words):
        words.cast("B")[:] = b"\x0f" * words.nbytes

    def accept(self, token):
        if token == 9:
            raise InvalidRequest("cannot go on")
        self.left -= 1
        return self.left == 0


def test_a_completed_grammar_ends_an_output_with_all_its_text():
    answer = Answer(["{", "}", "x"], OutputRules(stop=("}!",)), grammar=Countdown(2))
    assert answer.text == "{}"
    assert answer.stop is StopReason.GRAMMAR


def test_a_grammar_and_a_minimum_share_the_mask():
    table = TokenTable((b"<e>", b"a"), frozenset({END}))
    output = SequenceOutput(0, table, (END,), OutputRules(output_tokens_min=1), Countdown(5))
    words = memoryview(bytearray(4)).cast("I")
    mask = output.mask
    assert mask is not None
    mask.fill(words)
    assert words[0] == 0x0F0F0F0E
    output.push(1)
    mask.fill(words)
    assert words[0] == 0x0F0F0F0F


def test_a_grammar_that_cannot_go_on_fails_this_output():
    output = SequenceOutput(0, TokenTable((b"x",) * 10), (END,), OutputRules(), Countdown(5))
    with pytest.raises(InvalidRequest):
        output.push(9)


# ------------------------------------------------------------------------------ log-probabilities


def shown(answer):
    return [[entry.sampled.text for entry in delta.logprobs] for delta in answer.deltas]


def test_each_shown_token_has_its_logprobs_with_its_text():
    answer = Answer(["Hel", "lo"], logprobs=True)
    assert shown(answer) == [["Hel"], ["lo"], []]
    entry = answer.deltas[0].logprobs[0]
    assert (entry.sampled.utf8, entry.sampled.logprob) == (b"Hel", -0.5)
    assert [(top.text, top.logprob) for top in entry.top] == [("<end>", -2.0)]


def test_logprobs_wait_for_held_text_and_go_with_it():
    answer = Answer(["a", "D", "EX"], OutputRules(stop=("DEFG",)), logprobs=True)
    assert shown(answer) == [["a"], ["D", "EX"], []]


def test_logprobs_of_a_stop_string_are_left_out():
    answer = Answer(["ab", "cD", "EF", "G"], OutputRules(stop=("DEFG",)), logprobs=True)
    assert shown(answer) == [["ab"], ["cD"], []]
    assert answer.tokens == 4
    answer = Answer(["ab", "D", "EFG"], OutputRules(stop=("DEFG",)), logprobs=True)
    assert shown(answer) == [["ab"], []]


def test_bytes_of_one_character_have_an_entry_each():
    answer = Answer([b"\xf0\x9f", b"\x98\x80", "!"], logprobs=True)
    assert shown(answer) == [["\ufffd", "\ufffd\ufffd"], ["!"], []]
    assert b"".join(e.sampled.utf8 for e in answer.deltas[0].logprobs).decode() == "😀"
