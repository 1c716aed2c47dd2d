"""D-05: every malformed parameter is answered with 400 and its name, and disturbs nobody."""

import asyncio
import threading
from typing import Any

import pytest

from sluice.runtime.generation import ChoiceEnded, Delta
from sluice.testing.gateway import FakeGateway, Hold, Script, Step, finished, speak
from tests.server.wire_client import CHAT, MESSAGES, Answer, ask, chat, post

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def gateway():
    return FakeGateway()


@pytest.fixture(scope="module")
def server(serve_module, gateway):
    return serve_module(gateway)


def check(answer: Answer, param: str) -> None:
    assert answer.status == 400, answer.body
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"]


FIELDS: list[tuple[str, Any, str]] = [
    ("logit_bias", {"abc": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"99999999999": 1}, "logit_bias"),
    ("logit_bias", {"²": 1}, "logit_bias"),
    ("logit_bias", {"1": 101}, "logit_bias"),
    ("logit_bias", {"1": "x"}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    ("temperature", -1, "temperature"),
    ("temperature", 2.01, "temperature"),
    ("temperature", "warm", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 2, "top_p"),
    ("min_p", 1.5, "min_p"),
    ("top_k", -2, "top_k"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -5, "max_tokens"),
    ("max_tokens", "ten", "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("n", 0, "n"),
    ("n", -1, "n"),
    ("n", 129, "n"),
    ("n", 10**400, "n"),
    ("seed", 2**63, "seed"),
    ("seed", "x", "seed"),
    ("stop", 5, "stop"),
    ("stop", [""], "stop"),
    ("stop", "", "stop"),
    ("stop", [1], "stop[0]"),
    ("stop", list("abcde"), "stop"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [2**31], "stop_token_ids[0]"),
    ("top_logprobs", 3, "top_logprobs"),
    ("logprobs", 2, "logprobs"),
    ("stream", "yes", "stream"),
    ("model", None, "model"),
    ("model", 3, "model"),
    ("messages", [], "messages"),
    ("messages", "Hello", "messages"),
    ("messages", ["Hello"], "messages[0]"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": ["user"], "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 3}], "messages[0].content"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "messages[0].content[0].type",
    ),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        "messages[0].content[0].text",
    ),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ("messages", [*MESSAGES, {"role": "assistant", "tool_calls": [1]}],
     "messages[1].tool_calls[0].function"),
    ("tools", [{"type": "web"}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("tools", [TOOL, TOOL], "tools[1].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}],
     "tools[0].function.parameters"),
    ("tool_choice", "maybe", "tool_choice"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "g"}}, "tool_choice"),
    ("functions", [{"name": "f"}], "functions"),
    ("modalities", ["audio"], "modalities"),
    ("response_format", {"type": "yaml"}, "response_format.type"),
    ("response_format", {}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}},
     "response_format.json_schema.schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}},
     "response_format.json_schema.name"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "param"), FIELDS)
@pytest.mark.parametrize("stream", [False, True])
def test_d05_a_bad_field_is_named(server, field, value, param, stream):
    check(chat(server, **{"stream": stream, field: value}), param)


def test_d05_stream_options_need_a_stream(server):
    check(chat(server, stream_options={"include_usage": True}), "stream_options")


def body_with(text: str) -> bytes:
    return b'{"model":"tiny","messages":[{"role":"user","content":"x"}],' + text.encode() + b"}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (body_with('"temperature": NaN'), "temperature"),
        (body_with('"temperature": -Infinity'), "temperature"),
        (body_with('"temperature": 1e999'), "temperature"),
        (body_with('"logit_bias": {"5": NaN}'), "logit_bias.5"),
        (body_with('"max_tokens": 1' + "0" * 5000), "max_tokens"),
        (body_with('"temperature": 1')[:-5], "body"),
        (b"", "body"),
        (b"null", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (body_with('"n":1') + b" {}", "body"),
        (b"\xef\xbb\xbf{}", "body"),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}', "body"),
        (b'{"unknown":"\xff"}', "body"),
        (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', "body"),
        (b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
        (b'{"messages":[]}', "model"),
        (b'{"model":"tiny"}', "messages"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_d05_a_body_that_is_no_json_is_refused(server, body, param):
    check(post(server, CHAT, body), param)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({}, "content-type"),
        ({"content-type": "text/plain"}, "content-type"),
        ({"content-type": "application/json; charset=latin-1"}, "content-type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "content-encoding"),
        ({"content-type": "application/json", "x-sluice-deadline-ms": "1.5"},
         "x-sluice-deadline-ms"),
        ({"content-type": "application/json", "x-sluice-degrade": "always"}, "x-sluice-degrade"),
        ({"content-type": "application/json", "x-sluice-degrade": ""}, "x-sluice-degrade"),
        ({"content-type": "application/json", "x-sluice-deadline-ms": "1e3"},
         "x-sluice-deadline-ms"),
    ],
)  # fmt: skip
def test_d05_bad_headers_are_named(server, headers, param):
    check(ask(server, "POST", CHAT, body_with('"n":1'), headers), param)


def test_json_types_that_say_utf_8_are_accepted(server, gateway):
    gateway.script = lambda call: speak(call, "x")
    for kind in ("application/json; charset=UTF-8", "Application/JSON"):
        answer = ask(server, "POST", CHAT, body_with('"n":1'), {"content-type": kind})
        assert answer.status == 200


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt", [], "prompt"),
        ("prompt", None, "prompt"),
        ("prompt", 5, "prompt"),
        ("prompt", [[]], "prompt[0]"),
        ("prompt", ["a", 5], "prompt[1]"),
        ("prompt", [-1], "prompt"),
        ("prompt", [[2**31]], "prompt[0][0]"),
        ("prompt", [["a"]], "prompt[0][0]"),
        ("prompt", ["a"] * 129, "prompt"),
        ("suffix", "end", "suffix"),
        ("best_of", 2, "best_of"),
        ("logprobs", 21, "logprobs"),
        ("logprobs", True, "logprobs"),
        ("max_tokens", 0, "max_tokens"),
    ],
)
def test_d05_bad_completion_fields_are_named(server, field, value, param):
    check(post(server, "/v1/completions", {"model": "tiny", "prompt": "x", field: value}), param)


def test_echo_is_refused_where_it_cannot_be_done(server):
    for fields in ({"prompt": [1, 2]}, {"prompt": "x", "logprobs": 1}):
        check(post(server, "/v1/completions", {"model": "tiny", "echo": True, **fields}), "echo")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("conversation", "conv_1", "conversation"),
        ("store", True, "store"),
        ("background", True, "background"),
        ("prompt", {"id": "p"}, "prompt"),
        ("truncation", "auto", "truncation"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("top_logprobs", 1, "top_logprobs"),
        ("input", [], "input"),
        ("input", [{"type": "item_reference", "id": "x"}], "input[0].type"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}],
         "input[0].content[0].type"),
        ("input", [{"role": "robot", "content": "x"}], "input[0].role"),
        ("input", [{"type": "function_call", "name": "f"}], "input[0].call_id"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("text", {"format": {"type": "yaml"}}, "text.format.type"),
        ("text", {"format": {"type": "json_schema", "name": "a"}}, "text.format.schema"),
    ],
)  # fmt: skip
def test_d05_bad_response_fields_are_named(server, field, value, param):
    check(post(server, "/v1/responses", {"model": "tiny", "input": "x", field: value}), param)


def test_refusals_count_by_known_model_and_code_only(server, gateway):
    gateway.recorded.refused.clear()
    chat(server, n=0)
    chat(server, n=0, model="made-up-7f3a")
    ask(server, "GET", "/made/up/path")
    refused = gateway.recorded.refused
    assert [(one.model, one.status, one.code) for one in refused] == [
        ("tiny", 400, "invalid_request"),
        ("", 400, "invalid_request"),
        ("", 404, "not_found"),
    ]


def test_refusals_carry_the_ids_that_the_client_knows(server, gateway):
    gateway.recorded.refused.clear()
    made = chat(server, n=0).headers["x-request-id"]
    chat(server, {"x-request-id": "mine"}, n=0)
    first, second = gateway.recorded.refused
    assert (first.id, first.client_id) == (made, "")
    assert second.client_id == "mine"


def test_d05_a_running_stream_is_undisturbed(server, gateway):
    release = asyncio.Event()
    ending: list[Step] = [Delta(0, " world", 1), ChoiceEnded(0, "stop"), finished()]
    gateway.script = lambda call: Script([Delta(0, "Hello", 1), Hold(release), *ending])
    answers: list[Answer] = []
    stream = threading.Thread(target=lambda: answers.append(chat(server, stream=True)))
    calls = len(gateway.recorded.calls)
    stream.start()
    server.eventually(lambda: len(gateway.recorded.calls) > calls)
    for field, value, param in FIELDS[:20]:
        check(chat(server, **{field: value}), param)
        assert ask(server, "GET", "/health").status == 200
    server.loop.call_soon_threadsafe(release.set)
    stream.join()
    texts = [e["choices"][0]["delta"].get("content", "") for e in answers[0].events()[:-1]]
    assert "".join(texts) == "Hello world"
    gateway.script = lambda call: speak(call, "fine")
    assert chat(server).status == 200
