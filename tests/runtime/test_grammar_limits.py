"""Schemas that are short and ask for too much."""

import pytest

from sluice.core.errors import InvalidRequest
from sluice.runtime.generation import ChatPrompt, OutputFormat
from sluice.runtime.grammar import format_grammar, tool_grammar
from sluice.runtime.grammar_limits import PATTERN_SIZE_MAX, pattern_size
from sluice.runtime.tools import HERMES


def multiple(of):
    return {"type": "integer", "multipleOf": of}


def together(*of):
    return {"allOf": [multiple(one) for one in of]}


def named(schemas):
    return {"type": "object", "properties": {f"p{i}": one for i, one in enumerate(schemas)}}


COSTLY = [
    multiple(1_000_003),
    multiple(1e300),
    multiple(100_003.5),
    together(97, 101, 103, 107),
    named([multiple(9001)] * 40),
    {"$defs": {"x": {"items": together(97, 101, 103)}}, "$ref": "#/$defs/x"},
    named([together(97, 101), multiple(103)]),
    {"type": "string", "pattern": "^a{1000000}$"},
    {"type": "string", "pattern": "(((a|b|c){1,50}){1,50}){1,50}"},
    {"type": "object", "patternProperties": {"^a{1000000}$": {}}},
]


@pytest.mark.parametrize("schema", COSTLY)
def test_a_schema_that_takes_long_to_follow_is_refused(schema):
    with pytest.raises(InvalidRequest, match="cannot be followed") as refused:
        format_grammar(OutputFormat("json_schema", schema))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("schema", COSTLY)
def test_a_tool_whose_parameters_take_long_to_follow_is_refused(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": named([schema])}}
    with pytest.raises(InvalidRequest, match="cannot be followed") as refused:
        tool_grammar(ChatPrompt([], (tool,), "required"), HERMES, None)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        multiple(9973),
        together(97, 101),
        {"type": "number", "multipleOf": 0.01},
        {"type": "number", "multipleOf": 1e-7},
        named([multiple(5), multiple(10), multiple(1000), together(2, 3)]),
        named([{"type": "string"}, {"type": "string", "pattern": r"^[a-z{]{1,64}\{2\}$"}]),
        {"type": "object", "properties": {"multipleOf": {"type": "integer"}}},
    ],
)
def test_an_ordinary_schema_passes(schema):
    assert format_grammar(OutputFormat("json_schema", schema))


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        (r"\{5}", 3),
        ("a{3}b{2,5}c{2,}", 10),
        ("(ab){4}", 8),
        ("((a{3}b){2}c){10}", 90),
        ("[]{9}a{9}]{2}", 2),
        ("a{99999999999}", PATTERN_SIZE_MAX + 1),
        (")a{2}", 3),
        ("(a{4}", 4),
    ],
)
def test_a_pattern_is_measured_with_its_repetitions_written_out(pattern, size):
    assert pattern_size(pattern) == size
