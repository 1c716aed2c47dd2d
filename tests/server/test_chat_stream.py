"""The bytes of chat answers: order of chunks, nulls, usage, terminator, identity."""

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from sluice.core.request import EndReason
from sluice.runtime.generation import ChoiceEnded, Delta, ToolCallDelta
from sluice.testing.gateway import FakeGateway, Script, Step, finished, usage
from sluice.testing.served import CREATED_S
from tests.server.wire_client import chat, connected, raw_post, read_all


@pytest.fixture(scope="module")
def gateway():
    return FakeGateway()


@pytest.fixture(scope="module")
def server(serve_module, gateway):
    return serve_module(gateway)


def interleaved(call):
    """Choice 0 stops after 3 tokens, choice 1 reaches its limit of 5."""
    deltas = [Delta(n % 2, f"{n} ", 1) for n in range(6)]
    return Script(
        [
            *deltas,
            ChoiceEnded(0, "stop"),
            Delta(1, "6 ", 1),
            Delta(1, "7 ", 1),
            ChoiceEnded(1, "length"),
            finished(EndReason.LENGTH, usage(7, 8)),
        ]
    )


def test_d02_each_choice_has_one_finish_and_one_role(server, gateway):
    gateway.script = interleaved
    answer = chat(server, stream=True, n=2, stream_options={"include_usage": True})
    *chunks, last, done = answer.events()
    assert done == "[DONE]"
    parts = [part for chunk in chunks for part in chunk["choices"]]
    for index, finish in ((0, "stop"), (1, "length")):
        own = [part for part in parts if part["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [finish]
        assert own[-1]["delta"] == {}
        assert all("role" not in part["delta"] for part in own[1:])
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (7, 8)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["created"] for chunk in [*chunks, last]} == {CREATED_S}
    assert len({(chunk["id"], chunk["model"]) for chunk in [*chunks, last]}) == 1
    for chunk in [*chunks, last]:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_d04_without_include_usage_no_chunk_mentions_usage(server, gateway):
    gateway.script = interleaved
    for options in (None, {}, {"include_usage": False}):
        answer = chat(server, stream=True, n=2, stream_options=options)
        *chunks, done = answer.events()
        assert done == "[DONE]"
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


def test_d04_usage_is_equal_streamed_and_whole(server, gateway):
    gateway.script = interleaved
    streamed = chat(server, stream=True, n=2, stream_options={"include_usage": True})
    whole = chat(server, n=2).json()
    assert streamed.events()[-2]["usage"] == whole["usage"]
    assert whole["usage"]["total_tokens"] == 15
    ChatCompletion.model_validate(whole, strict=True)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_d01_joined_stream_equals_the_whole_text(server, gateway):
    texts = ["Ünï", "", 'co"de\n', "\u2028 日本", "\\ \x07"]
    steps: list[Step] = [*(Delta(0, text, 1) for text in texts), ChoiceEnded(0, "stop"), finished()]
    gateway.script = lambda call: Script(steps)
    streamed = chat(server, stream=True).events()[:-1]
    joined = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed)
    assert joined == "".join(texts) == chat(server).json()["choices"][0]["message"]["content"]
    # Text that was held back makes no chunk: role, four texts, finish.
    assert len(streamed) == 6


def test_tool_calls_name_id_and_function_once(server, gateway):
    calls: list[Step] = [
        Delta(0, "Let me see.", 1),
        Delta(0, "", 1, tool_calls=(ToolCallDelta(0, "", id="call_a", name="look"),)),
        Delta(0, "", 1, tool_calls=(ToolCallDelta(0, '{"x":'),)),
        Delta(0, "", 1, tool_calls=(ToolCallDelta(0, "1}"), ToolCallDelta(1, "{}", "b", "go"))),
        ChoiceEnded(0, "tool_calls"),
        finished(),
    ]
    gateway.script = lambda call: Script(calls)
    deltas = [chunk["choices"][0]["delta"] for chunk in chat(server, stream=True).events()[:-1]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert pieces == [
        {"index": 0, "id": "call_a", "type": "function",
         "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x":'}},
        {"index": 0, "function": {"arguments": "1}"}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "go", "arguments": "{}"}},
    ]  # fmt: skip
    message = chat(server).json()["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"x":1}', "{}"]


def test_a_message_of_tool_calls_alone_has_null_content(server, gateway):
    piece = ToolCallDelta(0, "{}", "call_a", "look")
    steps: list[Step] = [
        Delta(0, "", 1, tool_calls=(piece,)),
        ChoiceEnded(0, "tool_calls"),
        finished(),
    ]
    gateway.script = lambda call: Script(steps)
    choice = chat(server).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_stream_headers_keep_proxies_from_buffering(server, gateway):
    gateway.script = interleaved
    headers = chat(server, stream=True, n=2).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-sluice-model"] == "tiny"
    assert headers["x-sluice-replica"] == "replica-0"


def test_the_model_that_answers_is_told(server, gateway):
    steps = (Delta(0, "Hi", 1), ChoiceEnded(0, "stop"), finished())
    gateway.script = lambda call: Script(steps, model="small-100%", replica="r\n1")
    answer = chat(server, stream=True)
    assert {chunk["model"] for chunk in answer.events()[:-1]} == {"small-100%"}
    assert answer.headers["x-sluice-model"] == "small-100%"
    assert answer.headers["x-sluice-replica"] == "r?1"
    assert chat(server).json()["model"] == "small-100%"


def test_events_end_with_a_blank_line_and_the_body_with_a_last_chunk(server, gateway):
    gateway.script = interleaved
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True, n=2).replace(b"host: x", b"connection: close"))
        seen = read_all(opened)
    assert seen.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"transfer-encoding: chunked" in seen


def test_an_error_event_is_followed_by_no_terminator(server, gateway):
    steps: list[Step] = [Delta(0, "Half", 1), finished(EndReason.FAILED, error="lost")]
    gateway.script = lambda call: Script(steps)
    *chunks, last = chat(server, stream=True).events()
    assert last["error"]["message"] == "lost"
    assert last["error"]["code"] == "replica_lost"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_an_answer_without_text_still_has_role_finish_and_end(server, gateway):
    gateway.script = lambda call: Script([ChoiceEnded(0, "stop"), finished()])
    role, end, done = chat(server, stream=True).events()
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert end["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"
    assert chat(server).json()["choices"][0]["message"]["content"] == ""


def test_call_carries_what_the_client_asked_for(server, gateway):
    gateway.script = lambda call: Script([ChoiceEnded(0, "stop"), finished()])
    headers = {"x-sluice-slo": "interactive", "x-sluice-deadline-ms": "1500"}
    chat(
        server, headers, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-(2**63), n=1,
        max_tokens=9, max_completion_tokens=5, min_tokens=2, stop="x", stop_token_ids=[3],
        ignore_eos=True, logit_bias={"7": -100}, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1.1, chat_template_kwargs={"thinking": False}, logprobs=True,
        service_tier="auto", user="someone", unknown_field={"a": [1]},
        response_format={"type": "json_object"}, stream_options=None,
    )  # fmt: skip
    call = gateway.recorded.calls[-1]
    assert (call.output_tokens_max, call.output_tokens_min) == (5, 2)
    assert (call.stop, call.stop_tokens, call.ignore_end_token) == (("x",), (3,), True)
    assert call.sampling.logit_bias == {7: -100}
    assert (call.sampling.top_k, call.sampling.seed) == (0, -(2**63))
    assert (call.sampling.temperature, call.sampling.logprobs_top) == (0, 0)
    assert call.prompt.template_options == {"thinking": False}
    assert call.output_format.kind == "json_object"
    assert call.slo_class == "interactive"
    assert call.deadline_ns - call.arrived_ns == 1_500_000_000


def test_messages_reach_the_template_as_they_came(server, gateway):
    gateway.script = lambda call: Script([ChoiceEnded(0, "stop"), finished()])
    function = {"name": "f", "arguments": "{}"}
    messages = [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    assert chat(server, messages=messages).status == 200
    assert gateway.recorded.calls[-1].prompt.messages == messages
