"""Formats and schemas as grammars over tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.errors import InvalidRequest
from sluice.runtime.generation import ChatPrompt, OutputFormat
from sluice.runtime.grammar import (
    CALLS_MAX,
    OPENED_MAX,
    SCHEMA_BYTES_MAX,
    GrammarOpener,
    format_grammar,
    tool_grammar,
)
from sluice.runtime.tools import HERMES, LLAMA, MISTRAL
from tests.runtime.gguf_files import byte_level_values, tokenizer_of

TINY = tokenizer_of(byte_level_values())
OPENER = GrammarOpener(TINY)
END, PAD, START = 264, 265, 263

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def grammar_of(output_format):
    grammar = format_grammar(output_format)
    assert grammar is not None
    return grammar


def schema_format(schema):
    return OutputFormat("json_schema", schema)


def allowed(grammar, size_words=9):
    words = memoryview(bytearray(b"\xff" * 4 * size_words)).cast("I")
    grammar.fill(words)
    return {i for i in range(32 * size_words) if words[i >> 5] >> (i & 31) & 1}


def follow(grammar_text, text):
    """Whether the grammar allows the text, token by token, and is complete after it."""
    grammar = OPENER.open(grammar_text)
    complete = False
    for token in text if isinstance(text, tuple) else TINY.encode_text(text):
        if token not in allowed(grammar):
            return "refused"
        complete = grammar.accept(token)
    return "complete" if complete else "open"


def test_plain_text_has_no_grammar():
    assert format_grammar(OutputFormat()) is None


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"a": [1, 2, {"b": null}], "é": "x\\n"}', "complete"),
        ("{}", "complete"),
        ('{"a": ', "open"),
        ("[1]", "refused"),
        ("hello", "refused"),
        ('{"a" 1', "refused"),
    ],
)
def test_json_object_allows_objects_only(text, verdict):
    assert follow(grammar_of(OutputFormat("json_object")), text) == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"name": "Ada", "age": 36}', "complete"),
        ('{\n  "name": "Ada",\n  "age": 36\n}', "complete"),
        ('{"name": "Ada"}', "refused"),
        ('{"name": "Ada", "age": "x"', "refused"),
        ('{"name": "Ada",' + " " * 30, "refused"),
    ],
)
def test_a_schema_is_followed(text, verdict):
    assert follow(grammar_of(schema_format(PERSON)), text) == verdict


# The grammar wants DEL escaped, which JSON leaves open.
strings = st.text(alphabet=st.characters(exclude_characters="\x7f", codec="utf-8"), max_size=5)


@given(st.dictionaries(strings, st.integers() | strings | st.none(), max_size=3))
def test_every_object_that_json_writes_is_allowed(value):
    text = json.dumps(value, ensure_ascii=False)
    assert follow(grammar_of(OutputFormat("json_object")), text) == "complete"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"enum": ["x" * SCHEMA_BYTES_MAX]}, "at most 65536"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"const": float("nan")}, "JSON"),
        ({"type": {1, 2}}, "not JSON"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(schema, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        format_grammar(schema_format(schema))
    assert refused.value.param == "response_format"


def nested(depth):
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("depth", [150, 5000])
def test_a_schema_nested_too_deeply_is_refused(depth):
    with pytest.raises(InvalidRequest, match="recursion"):
        format_grammar(schema_format(nested(depth)))


def test_end_tokens_are_allowed_when_the_output_may_end():
    grammar = OPENER.open(grammar_of(schema_format({"type": "integer"})))
    assert not {END, PAD} & allowed(grammar)
    grammar.accept(TINY.encode_text("1")[0])
    assert {END, PAD} <= allowed(grammar)
    assert not {START} & allowed(grammar)


def test_padding_beyond_the_vocabulary_is_never_allowed():
    grammar = OPENER.open(grammar_of(OutputFormat("json_object")))
    assert max(allowed(grammar, size_words=20)) < 267


def test_a_token_outside_the_grammar_is_an_error_and_later_masks_allow_the_end_only():
    grammar = OPENER.open(grammar_of(OutputFormat("json_object")))
    with pytest.raises(InvalidRequest, match="cannot follow"):
        grammar.accept(TINY.encode_text("x")[0])
    assert allowed(grammar) == {END, PAD}
    with pytest.raises(InvalidRequest):
        grammar.accept(END)


def test_sequences_with_the_same_grammar_do_not_share_its_state():
    text = grammar_of(schema_format(PERSON))
    first, second = OPENER.open(text), OPENER.open(text)
    before = allowed(second)
    first.accept(TINY.encode_text("{")[0])
    assert allowed(second) == before
    assert allowed(first) != before


def test_the_number_of_grammars_kept_is_bounded():
    for i in range(OPENED_MAX + 5):
        OPENER.open(grammar_of(schema_format({"const": i})))
    assert len(OPENER._opened) == OPENED_MAX


def test_a_grammar_that_is_none_is_refused_on_opening():
    with pytest.raises(InvalidRequest):
        OPENER.open("start: nothing")


# ------------------------------------------------------------------------------------- tool calls

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def prompt(choice, *tools):
    return ChatPrompt([{"role": "user", "content": "x"}], tools or (WEATHER, CLOCK), choice)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_free_choice_has_no_grammar(choice):
    assert tool_grammar(prompt(choice), HERMES, None) is None


CALL = '{"name": "weather", "arguments": {"place": "Oslo"}}'
OTHER = '{"name": "clock", "arguments": {"zone": 1}}'


@pytest.mark.parametrize(
    ("choice", "text", "verdict"),
    [
        ("weather", f"<tool_call>\n{CALL}\n</tool_call>", "complete"),
        ("weather", f"<tool_call>\n{OTHER}", "refused"),
        ("weather", "Sure", "refused"),
        ("weather", '<tool_call>\n{"name": "weather", "arguments": {"town"', "refused"),
        ("required", f"<tool_call>\n{OTHER}\n</tool_call>", "open"),
        (
            "required",
            f"<tool_call>\n{OTHER}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
            "open",
        ),
    ],
)
def test_a_demanded_call_is_held_to_its_tools_parameters(choice, text, verdict):
    grammar = tool_grammar(prompt(choice), HERMES, None)
    tokens = tuple(
        token
        for part in text.replace("</tool", "\0</tool").split("\0")
        for token in TINY.encode_text(part)
    )
    assert follow(grammar, tokens) == verdict


@pytest.mark.parametrize(
    ("form", "begin", "between", "end"),
    [(HERMES, "", "\n", ""), (MISTRAL, "[TOOL_CALLS][", ", ", "]")],
)
def test_the_number_of_demanded_calls_is_bounded(form, begin, between, end):
    one = f"<tool_call>\n{OTHER}\n</tool_call>" if form is HERMES else OTHER
    grammar = tool_grammar(prompt("required"), form, None)
    assert follow(grammar, begin + between.join([one] * CALLS_MAX) + end) == "complete"
    assert follow(grammar, begin + between.join([one] * (CALLS_MAX + 1))) == "refused"


def test_calls_of_other_families_are_held_to_their_form():
    llama = '{"name": "weather", "parameters": {"place": "Oslo"}}'
    assert follow(tool_grammar(prompt("weather"), LLAMA, None), llama) == "complete"
    assert (
        follow(tool_grammar(prompt("weather"), MISTRAL, None), f"[TOOL_CALLS][{CALL}]")
        == "complete"
    )
    marked = (START, *TINY.encode_text(f"[{CALL}, {OTHER}]"))
    assert follow(tool_grammar(prompt("required"), MISTRAL, START), marked) == "complete"


def test_a_tool_that_is_not_on_offer_cannot_be_demanded():
    with pytest.raises(InvalidRequest, match="'unknown'") as refused:
        tool_grammar(prompt("unknown"), HERMES, None)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("parameters", "message"), [({"type": "foo"}, "foo"), (nested(5000), "nested too deeply")]
)
def test_parameters_that_cannot_be_followed_are_refused(parameters, message):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(InvalidRequest, match=message) as refused:
        tool_grammar(prompt("required", tool), HERMES, None)
    assert refused.value.param == "tools"
