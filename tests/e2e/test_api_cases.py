"""Cases D-01 to D-05 and D-09 against a served model."""

import json
import re
from functools import partial

import pytest

from tests.e2e.clients import (
    CHAT,
    COMPLETIONS,
    Answer,
    ask,
    at_once,
    complete,
    connected,
    events_of,
    open_stream,
    post,
    raw_request,
    stream_text,
)
from tests.e2e.conftest import CONTEXT_TOKENS, POOL_TOKENS
from tests.e2e.processes import ServerProcess

pytestmark = pytest.mark.model

STORY = "Once upon a time there was a small fox who"


def words(count: int) -> list[int]:
    """A prompt of so many tokens that no other prompt begins like."""
    return [1000 + (count * 7919 + i * 31) % 40_000 for i in range(count)]


# ------------------------------------------------------------------------------------------ D-01


@pytest.mark.parametrize("place", [3, 9, 17])
def test_d01_stop_strings_cut_the_stream_where_they_cut_the_whole(server: ServerProcess, place):
    said = complete(server.target, "exact", STORY, max_tokens=24).text
    stop = said[place : place + 5]
    whole = complete(server.target, "exact", STORY, max_tokens=24, stop=stop)
    with_stop = open_stream(server.target, "exact", STORY, max_tokens=24, stop=stop).rest()
    assert whole.text == said[: said.index(stop)]
    assert whole.json()["choices"][0]["finish_reason"] == "stop"
    assert stream_text(with_stop) == whole.text
    assert with_stop[-1] == "[DONE]"


def test_d01_text_held_back_for_a_stop_string_comes_at_the_end(server: ServerProcess):
    said = complete(server.target, "exact", STORY, max_tokens=12).text
    almost = said[-3:] + "\x00"
    whole = complete(server.target, "exact", STORY, max_tokens=12, stop=almost)
    streamed = open_stream(server.target, "exact", STORY, max_tokens=12, stop=almost).rest()
    assert whole.text == said == stream_text(streamed)
    assert whole.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 17])
def test_d01_too_many_or_empty_stop_strings_are_refused(server: ServerProcess, stop):
    answer = complete(server.target, "exact", STORY, stop=stop)
    assert (answer.status, answer.error["param"]) == (400, "stop")


# ------------------------------------------------------------------------------------------ D-02


def test_d02_each_choice_has_one_finish_reason_and_the_prompt_counts_once(server: ServerProcess):
    fields = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 12, "stop": "."}
    whole = complete(server.target, "exact", STORY, **fields).json()
    events = open_stream(
        server.target, "exact", STORY, **fields, stream_options={"include_usage": True}
    ).rest()
    assert events[-1] == "[DONE]"
    usages = [event["usage"] for event in events[:-1] if event["usage"]]
    assert len(usages) == 1
    assert usages[0] == whole["usage"]
    assert events[-2]["choices"] == []
    assert len({event["id"] for event in events[:-1]}) == 1
    for choice in whole["choices"]:
        parts = [
            part
            for event in events[:-1]
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
        assert stream_text(events, choice["index"]) == choice["text"]


# ------------------------------------------------------------------------------------------ D-03


@pytest.mark.parametrize("stream", [False, True])
def test_d03_a_prompt_over_the_context_is_an_ordinary_400(server: ServerProcess, stream):
    answer = complete(server.target, "exact", words(3000), stream=stream)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["code"] == "context_length_exceeded"
    assert "3000" in answer.error["message"]
    assert "2048" in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_d03_more_output_than_fits_is_refused_with_all_numbers(server: ServerProcess, stream):
    answer = complete(server.target, "exact", words(2000), max_tokens=200, stream=stream)
    assert answer.status == 400
    assert {"2000", "200", "2048"} <= set(re.findall(r"\d+", answer.error["message"]))


@pytest.mark.parametrize("stream", [False, True])
def test_d03_without_max_tokens_the_rest_of_the_context_is_the_limit(server: ServerProcess, stream):
    failed = "model=one,reason=failed"
    before = server.metric("requests_ended_total", failed)
    body = {
        "model": "one", "messages": [{"role": "user", "content": "wonder " * 1950}],
        "temperature": 0, "ignore_eos": True, "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip
    answer = post(server.target, CHAT, body)
    if stream:
        *events, last, done = events_of(answer.body)
        assert done == "[DONE]"
        usage, finish = last["usage"], events[-1]["choices"][0]["finish_reason"]
    else:
        usage, finish = answer.json()["usage"], answer.json()["choices"][0]["finish_reason"]
    assert 1950 < usage["prompt_tokens"] < CONTEXT_TOKENS
    assert usage["total_tokens"] == CONTEXT_TOKENS
    assert finish == "length"
    assert server.metric("requests_ended_total", failed) == before


# ------------------------------------------------------------------------------------------ D-04


@pytest.mark.parametrize("fields", [{}, {"stop": " the"}, {"max_tokens": 3}])
def test_d04_usage_is_the_same_streamed_and_whole(server: ServerProcess, fields):
    options = {"max_tokens": 40, "seed": 1, **fields}
    whole = complete(server.target, "exact", STORY, **options).json()
    plain = open_stream(server.target, "exact", STORY, **options).rest()
    told = open_stream(
        server.target, "exact", STORY, **options, stream_options={"include_usage": True}
    ).rest()
    assert not [event for event in plain[:-1] if event.get("usage")]
    last = told[-2]
    assert last["choices"] == []
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in names] == [whole["usage"][name] for name in names]
    assert last["usage"]["total_tokens"] == (
        last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    )


# ------------------------------------------------------------------------------------------ D-05

MESSAGES = [{"role": "user", "content": "Hello"}]
BAD: list[tuple[str, str | bytes]] = [
    ("logit_bias", '"logit_bias": {"ten": 1}'),
    ("logit_bias", '"logit_bias": {"49152": 1}'),
    ("logit_bias", '"logit_bias": {"-1": 1}'),
    ("temperature", '"temperature": -1'),
    ("temperature", '"temperature": NaN'),
    ("top_p", '"top_p": 0'),
    ("top_p", '"top_p": 2'),
    ("max_tokens", '"max_tokens": 0'),
    ("max_tokens", '"max_tokens": -5'),
    ("max_tokens", '"max_tokens": "ten"'),
    ("n", '"n": 0'),
    ("n", '"n": 9'),
    ("messages", '"messages": []'),
    ("messages", '"messages": [{"role": "wizard", "content": "x"}]'),
    ("stop", '"stop": 5'),
    ("stop", '"stop": [5]'),
    ("stop_token_ids", '"stop_token_ids": [49152]'),
    ("response_format", '"response_format": {"type": "json_schema"}'),
    ("body", b'{"model": "exact", "messages": ['),
]


def send_bad(server: ServerProcess, text: str | bytes) -> Answer:
    if isinstance(text, bytes):
        return post(server.target, CHAT, text)
    body = {"model": "exact", "messages": MESSAGES, "max_tokens": 4}
    name = json.loads(f"{{{text.replace('NaN', '0')}}}").popitem()[0]
    body.pop(name, None)
    return post(server.target, CHAT, (json.dumps(body)[:-1] + f", {text}}}").encode())


def test_d05_bad_parameters_do_not_touch_a_running_stream(server: ServerProcess):
    undisturbed = complete(server.target, "exact", STORY, max_tokens=90, ignore_eos=True).text
    pid, replicas = server.process.pid, server.replica_pids()
    stream = open_stream(server.target, "exact", STORY, max_tokens=90, ignore_eos=True)
    events = [stream.event()]
    for param, text in BAD:
        answer = send_bad(server, text)
        assert answer.status in {400, 422}, (text, answer.body)
        assert answer.seconds < 1
        assert param in str(answer.error["param"]), (text, answer.error)
        assert ask(server.target, "GET", "/health").status == 200
        events.append(stream.event())
    assert stream_text(events) != undisturbed, "the stream was over before the bad requests"
    assert stream_text(events + stream.rest()) == undisturbed
    assert complete(server.target, "exact", STORY, max_tokens=2).status == 200
    assert (server.process.pid, server.replica_pids()) == (pid, replicas)


def test_a_body_over_the_limit_is_refused_before_it_is_complete(server: ServerProcess):
    body = json.dumps({"model": "exact", "prompt": "x" * (11 << 20)}).encode()
    answer = post(server.target, COMPLETIONS, body)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_a_prompt_of_ten_megabytes_is_refused_without_holding_others_up(server: ServerProcess):
    body = {"model": "exact", "prompt": "wonder " * 1_400_000, "max_tokens": 4}
    with connected(server.target) as opened:
        opened.sendall(raw_request(COMPLETIONS, body))
        others = [ask(server.target, "GET", "/health").seconds for _ in range(20)]
        assert opened.recv(65536).startswith(b"HTTP/1.1 400")
    assert max(others) < 0.5


# ------------------------------------------------------------------------------------------ D-09


def test_d09_requests_that_do_not_fit_together_all_finish(server: ServerProcess):
    prompts = [words(200 + i)[:200] for i in range(4)]

    def call(prompt: list[int], max_tokens: int = 300) -> Answer:
        return complete(server.target, "pool", prompt, max_tokens=max_tokens, ignore_eos=True)

    # One alone to its end; of the others the beginning, which greedy output continues.
    alone = [call(prompts[0]).text, *(call(prompt, 30).text for prompt in prompts[1:])]
    together = at_once([partial(call, prompt) for prompt in prompts])
    for answer, beginning in zip(together, alone, strict=True):
        assert answer.status == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 300
        assert answer.text.startswith(beginning.rstrip("\ufffd"))
    assert together[0].text == alone[0]


def test_d09_the_limit_that_is_told_is_what_a_request_gets(server: ServerProcess):
    cards = ask(server.target, "GET", "/v1/models").json()["data"]
    told = next(card for card in cards if card["id"] == "pool")
    assert told["max_model_len"] == POOL_TOKENS
    answer = complete(server.target, "pool", words(POOL_TOKENS - 4), max_tokens=4, ignore_eos=True)
    assert answer.json()["usage"]["total_tokens"] == POOL_TOKENS
    refused = complete(server.target, "pool", words(POOL_TOKENS - 4), max_tokens=5)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
