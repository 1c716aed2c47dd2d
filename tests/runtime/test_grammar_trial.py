"""Grammars are tried in a process that may be lost."""

import json

import llguidance
import pytest

from sluice.core.errors import InvalidRequest
from sluice.runtime import grammar_trial
from sluice.runtime.generation import ChatPrompt, OutputFormat
from sluice.runtime.grammar import format_grammar, tool_grammar
from sluice.runtime.grammar_trial import GrammarTrial
from sluice.runtime.tools import HERMES

ORDINARY = format_grammar(OutputFormat("json_schema", {"type": "integer"})) or ""


def unchecked(schema):
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


@pytest.fixture(scope="module")
def trial():
    made = GrammarTrial()
    yield made
    made.close()


def test_an_ordinary_grammar_passes(trial):
    trial.check(ORDINARY, "response_format")


def test_a_call_that_begins_with_a_token_of_the_model_passes(trial):
    tool = {"type": "function", "function": {"name": "f"}}
    grammar = tool_grammar(ChatPrompt([], (tool,), "required"), HERMES, 49_000)
    assert grammar is not None
    assert "<[49000]>" in grammar
    trial.check(grammar, "tools")


def test_a_grammar_that_the_engine_cannot_open_is_refused_with_its_reason(trial):
    with pytest.raises(InvalidRequest, match="nothing") as refused:
        trial.check("start: nothing", "tools")
    assert refused.value.param == "tools"


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_tried(trial):
    costly = unchecked({"allOf": [{"type": "integer", "multipleOf": of} for of in (97, 101, 107)]})
    with pytest.raises(InvalidRequest, match="too long"):
        trial.check(costly, "response_format")
    with pytest.raises(InvalidRequest, match="too long"):
        trial.check(costly, "response_format")
    trial.check(unchecked({"const": "the next"}), "response_format")


def test_a_child_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(grammar_trial, "ANSWER_S_MAX", 0.0)
    trial = GrammarTrial()
    with pytest.raises(InvalidRequest, match="too long"):
        trial.check(ORDINARY, "response_format")
    monkeypatch.undo()
    trial.check(unchecked({"const": "another"}), "response_format")
    trial.close()


def test_a_verdict_is_remembered_and_their_number_is_bounded(monkeypatch):
    trial, asked = GrammarTrial(), []

    def ask(grammar):
        asked.append(grammar)
        return ""

    monkeypatch.setattr(trial, "_ask", ask)
    monkeypatch.setattr(grammar_trial, "VERDICTS_MAX", 2)
    for grammar in ("a", "a", "b", "c", "c"):
        trial.check(grammar, "response_format")
    assert asked == ["a", "b", "c"]
    assert [trial.knows(grammar) for grammar in "abc"] == [False, True, True]
    trial.check("a", "response_format")
    assert asked[-1] == "a"
