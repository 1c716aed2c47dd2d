"""Tool calls in text, however it is cut."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.runtime.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    ToolCallParser,
    call_text,
    tool_format,
    tools_prompt,
)

NAMES = frozenset({"f", "g"})


def parse(form, pieces):
    """Content and calls as a client joins them; checks the rules of streamed calls on the way."""
    ids = itertools.count()
    parser = ToolCallParser(form, NAMES, lambda: f"call-{next(ids)}")
    content = ""
    calls: dict[int, list[str]] = {}
    for piece in [*(parser.push(text) for text in pieces), parser.finish()]:
        content += piece.content
        for delta in piece.tool_calls:
            if delta.index in calls:
                assert delta.id is None
                assert delta.name is None
                assert delta.index == max(calls)
                calls[delta.index][2] += delta.arguments
            else:
                assert delta.index == len(calls)
                calls[delta.index] = [delta.id or "", delta.name or "", delta.arguments]
    assert parser.calls == len(calls)
    assert len({call[0] for call in calls.values()}) == len(calls)
    return content, [(name, arguments) for _, name, arguments in calls.values()]


F = '{"name": "f", "arguments": {"a": "x}\\"]y"}}'
G = '{"name":"g","arguments":{"n":[1,{"m":2}]}}'
F_CALL = ("f", '{"a": "x}\\"]y"}')
G_CALL = ("g", '{"n":[1,{"m":2}]}')
CASES = [
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", ("", [F_CALL])),
    (HERMES, f"Let me see.\n<tool_call>{F}</tool_call>\n", ("Let me see.\n", [F_CALL])),
    (
        HERMES,
        f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
        ("", [F_CALL, G_CALL]),
    ),
    (HERMES, f"<tool_call>[{F}, {G}]</tool_call> ok", (" ok", [F_CALL, G_CALL])),
    (
        HERMES,
        '<tool_call>{"id":"1","type":"function","name":"g","arguments":{}}</tool_call>',
        ("", [("g", "{}")]),
    ),
    (HERMES, '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>',
        ("", [("f", '{"a":1}')]),
    ),
    (HERMES, '<tool_call>{"name":"f"}</tool_call>', ("", [("f", "{}")])),
    (HERMES, f"Use <tool_call> so: <tool_call>{G}</tool_call>", ("Use <tool_call> so:", [G_CALL])),
    (HERMES, f"<tool_call>{{bad <tool_call>{G}</tool_call>", ("<tool_call>{bad", [G_CALL])),
    (HERMES, "<tool_call>{bad}</tool_call> x", ("<tool_call>{bad}</tool_call> x", [])),
    (HERMES, "a < b <tool_cal", ("a < b <tool_cal", [])),
    (HERMES, '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    (HERMES, '<tool_call>{"arguments":{},"name":"f"}', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name":"f","arguments":{"a": "cut', ("", [("f", '{"a": "cut')])),
    (HERMES, f"<tool_call>{F}</tool_call", ("", [F_CALL])),
    (HERMES, f'<tool_call>{F[:-1]}, "x": 1}}</tool_call>', (', "x": 1}</tool_call>', [F_CALL])),
    (HERMES, f"{{{F}", (f"{{{F}", [])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (
        LLAMA,
        '\n{"name":"f","parameters":{}}; {"name":"g","parameters":{}}',
        ("", [("f", "{}"), ("g", "{}")]),
    ),
    (LLAMA, '{"name":"f","parameters":{}} done', (" done", [("f", "{}")])),
    (LLAMA, '{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    (LLAMA, '{"title": "x"}', ('{"title": "x"}', [])),
    (LLAMA, "Plain words.", ("Plain words.", [])),
    (MISTRAL, f"[TOOL_CALLS][{F}, {G}]", ("", [F_CALL, G_CALL])),
    (MISTRAL, f"[TOOL_CALLS] [{F}]</s>", ("</s>", [F_CALL])),
    (MISTRAL, "[TOOL_CALLS] none", ("[TOOL_CALLS] none", [])),
    (MISTRAL, "[TOOL]", ("[TOOL]", [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_and_content_are_told_apart_however_the_text_is_cut(form, text, expected):
    for size in (1, 2, 3, 5, 8, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(form, pieces) == expected, size


fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        F,
        G,
        '{"name": "f", "parameters": {"a": 1}}',
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        '"',
        "\\",
        "text",
        '{"name":"f","arguments":',
        "<tool",
        '{"a":1}',
    ]
)


@given(st.sampled_from([HERMES, LLAMA, MISTRAL]), st.lists(fragments, max_size=10), st.data())
def test_any_text_gives_the_same_answer_however_it_is_cut(form, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(form, pieces) == parse(form, [text])


@given(st.lists(fragments, max_size=10))
@example(["text", "<tool"])
def test_text_without_calls_is_content_to_the_last_character(parts):
    text = "".join(parts)
    content, calls = parse(HERMES, [text])
    if not calls:
        assert content == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("fg"), st.dictionaries(st.text(max_size=5), json_values, max_size=3)
        ),
        max_size=4,
    ),
    st.integers(1, 9),
)
def test_written_calls_are_read_back(calls, size):
    text = call_text({"function": {"name": n, "arguments": a}} for n, a in calls)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    content, read = parse(HERMES, pieces)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in read] == calls


def test_name_comes_first_and_arguments_follow_as_they_grow():
    parser = ToolCallParser(HERMES, NAMES, lambda: "id")
    (first,) = parser.push('<tool_call>{"name": "f", "arguments": {"a"').tool_calls
    assert (first.index, first.id, first.name, first.arguments) == (0, "id", "f", '{"a"')
    (second,) = parser.push(': "long').tool_calls
    assert (second.index, second.id, second.name, second.arguments) == (0, None, None, ': "long')


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_a_beginning_that_is_too_long_for_a_call_is_content_however_it_is_cut(size):
    name = "f" * 1100
    text = f'{{"name": "{name}", "parameters": {{}}}}'
    parser = ToolCallParser(LLAMA, frozenset({name}), lambda: "id")
    pieces = [parser.push(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join(piece.content for piece in [*pieces, parser.finish()]) == text
    assert parser.calls == 0


def test_content_is_not_held_back_longer_than_needed():
    parser = ToolCallParser(HERMES, NAMES, lambda: "id")
    assert parser.push("Hello <").content == "Hello"
    assert parser.push("b> ").content == " <b>"
    assert parser.push("x").content == " x"


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("<tool_call>", HERMES),
        ('Respond in the format {"name": function name, "parameters": ...}', LLAMA),
        ("<|python_tag|>", LLAMA),
        ("{{ messages }}", HERMES),
    ],
)
def test_the_format_follows_from_the_template(source, form):
    assert tool_format(source) is form


def test_the_prompt_lists_each_tool_on_a_line():
    tools = [{"function": {"name": "f"}}, {"function": {"name": "é"}}]
    assert '\n{"function": {"name": "f"}}\n{"function": {"name": "é"}}\n' in tools_prompt(tools)
