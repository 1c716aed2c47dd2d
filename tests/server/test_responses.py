"""Responses: input items, typed events in order, output items, endings."""

import pytest
from openai.types.responses import Response

from sluice.runtime.generation import ChoiceEnded, Delta, TextLogprob, TokenText, ToolCallDelta
from sluice.testing.gateway import FakeGateway, Script, Step, finished, speak, usage
from tests.server.wire_client import Answer, post

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture(scope="module")
def gateway():
    return FakeGateway()


@pytest.fixture(scope="module")
def server(serve_module, gateway):
    return serve_module(gateway)


@pytest.fixture(autouse=True)
def fresh(gateway):
    gateway.recorded.calls.clear()
    gateway.script = lambda call: speak(call, "One", " two")


def respond(server, **fields) -> Answer:
    return post(server, "/v1/responses", {"model": "tiny", "input": "x", **fields})


def with_tools(call):
    calls: list[Step] = [
        Delta(0, "Looking.", 1),
        Delta(0, "", 1, tool_calls=(ToolCallDelta(0, "", "call_a", "look"),)),
        Delta(0, "", 1, tool_calls=(ToolCallDelta(0, '{"x":1}'),)),
        Delta(0, "", 1, tool_calls=(ToolCallDelta(1, "{}", "call_b", "look"),)),
        ChoiceEnded(0, "tool_calls"),
        finished(counts=usage(5, 4, cached=2)),
    ]
    return Script(calls)


def test_a_whole_response_passes_the_official_types(server):
    answer = respond(server, instructions="Be brief.", metadata={"a": "b"}).json()
    response = Response.model_validate(answer, strict=False)
    assert response.status == "completed"
    assert response.output_text == "One two"
    assert answer["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    assert (answer["store"], answer["metadata"], answer["instructions"]) == (
        False, {"a": "b"}, "Be brief.",
    )  # fmt: skip


def test_events_of_text_come_in_order(server):
    answer = respond(server, stream=True)
    events = answer.events()
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    named = [line[7:] for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert named == [event["type"] for event in events]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None
    whole = respond(server).json()
    last = events[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"] == whole["usage"]
    assert {e["item_id"] for e in events if "item_id" in e} == {last["output"][0]["id"]}


def test_function_calls_are_items_of_their_own(server, gateway):
    gateway.script = with_tools
    events = respond(server, tools=[TOOL], stream=True).events()
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert [item.get("arguments") for item in output] == [None, '{"x":1}', "{}"]
    assert [item.get("call_id") for item in output] == [None, "call_a", "call_b"]
    assert len({item["id"] for item in output}) == 3
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == ['{"x":1}', "{}"]
    assert [e["output_index"] for e in events if e["type"].endswith("item.done")] == [0, 1, 2]
    whole = respond(server, tools=[TOOL]).json()
    assert [i["type"] for i in whole["output"]] == ["message", "function_call", "function_call"]
    Response.model_validate(whole)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_response_is_incomplete(server, gateway, stream):
    gateway.script = lambda call: Script([Delta(0, "x", 1), ChoiceEnded(0, "length"), finished()])
    answer = respond(server, max_output_tokens=1, stream=stream)
    response = answer.json() if not stream else answer.events()[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    if stream:
        assert answer.events()[-1]["type"] == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(server, gateway):
    gateway.script = lambda call: Script([ChoiceEnded(0, "stop"), finished()])
    for stream in (False, True):
        answer = respond(server, stream=stream)
        response = answer.json() if not stream else answer.events()[-1]["response"]
        assert response["output"][0]["content"][0]["text"] == ""


def test_input_items_become_chat_messages(server, gateway):
    respond(
        server,
        instructions="Rules",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
            {"type": "reasoning", "summary": []},
            {"type": "function_call_output", "call_id": "1", "output": "seen"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},
    )  # fmt: skip
    prompt = gateway.recorded.calls[0].prompt
    system, user, assistant, tool = prompt.messages
    assert system == {"role": "system", "content": "Rules"}
    assert user == {"role": "user", "content": "a"}
    assert assistant["content"] == "b"
    assert [call["id"] for call in assistant["tool_calls"]] == ["1", "2"]
    assert tool == {"role": "tool", "tool_call_id": "1", "content": "seen"}
    assert prompt.tool_choice == "look"
    assert prompt.tools[0]["function"]["name"] == "look"


def test_options_reach_the_call(server, gateway):
    respond(
        server, max_output_tokens=9, temperature=0, top_p=0.5, store=False,
        include=["message.output_text.logprobs"], top_logprobs=3,
        text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    )  # fmt: skip
    call = gateway.recorded.calls[0]
    assert (call.output_tokens_max, call.sampling.temperature, call.sampling.top_p) == (9, 0, 0.5)
    assert call.sampling.logprobs_top == 3
    assert call.output_format.schema == {"type": "object"}


def test_logprobs_are_told_when_included(server, gateway):
    token = TokenText(TextLogprob("a", b"a", -0.5), (TextLogprob("b", b"b", -1.0),))
    steps: list[Step] = [Delta(0, "a", 1, logprobs=(token,)), ChoiceEnded(0, "stop"), finished()]
    gateway.script = lambda call: Script(steps)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    told = respond(server, **asked).json()["output"][0]["content"][0]["logprobs"]
    assert told == [
        {"token": "a", "logprob": -0.5, "bytes": [97],
         "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}]}
    ]  # fmt: skip
    deltas = [e for e in respond(server, **asked, stream=True).events() if "delta" in e]
    assert deltas[0]["logprobs"] == told
