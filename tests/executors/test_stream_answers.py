"""Answers come through byte for byte, with usage, finishes and times read on the way."""

import json
from functools import partial

import pytest

from sluice.executors.dialects import DIALECTS
from sluice.executors.stream import ClientError, Garbage, UpstreamOverloaded, UsageEvents
from sluice.testing.engine_answers import (
    DONE,
    ENGINE_ANSWERS,
    PROMPT_TOKENS,
    delta,
    event,
    usage,
    usage_event,
)
from sluice.testing.upstream import Close, Send, head, http_chunk, raw_of, stream, whole
from tests.executors.stream_rig import CHAT, request, rig, run, take

PIECES = ("Hel", "lo", "!")
ROLE = delta({"role": "assistant", "content": ""})
STOP = delta({}, "stop")


@pytest.mark.parametrize("name", ENGINE_ANSWERS)
def test_a_stream_of_each_engine_passes_byte_for_byte(name):
    answers = ENGINE_ANSWERS[name]

    async def check():
        async with rig(answers.route(PIECES), name) as (_, engine):
            taken = await take(engine, request())
        assert taken.fault is None
        assert taken.raw == b"".join(answers.events(PIECES))
        assert (taken.tokens, taken.finishes, taken.ended) == (3, [(0, "stop")], True)
        assert (taken.usage.prompt_tokens, taken.usage.completion_tokens) == (PROMPT_TOKENS, 3)
        assert not taken.usage.estimated

    run(check)


@pytest.mark.parametrize("name", ENGINE_ANSWERS)
def test_a_whole_answer_of_each_engine_passes_byte_for_byte(name):
    answers = ENGINE_ANSWERS[name]

    async def check():
        async with rig(answers.route(PIECES), name) as (_, engine):
            taken = await take(engine, request(streamed=False))
        assert (taken.fault, taken.raw) == (None, answers.body(PIECES))
        assert (taken.tokens, taken.finishes, taken.ended) == (3, [(0, "stop")], True)
        assert taken.usage.completion_tokens == 3

    run(check)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", ENGINE_ANSWERS)
def test_each_engines_refusals_are_told_apart(name, streamed):
    answers = ENGINE_ANSWERS[name]

    async def check():
        async with rig(lambda _: answers.overloaded, name) as (upstream, engine):
            busy = await take(engine, request(streamed=streamed))
            upstream.route = lambda _: answers.wrong_request
            wrong = await take(engine, request(streamed=streamed))
        assert isinstance(busy.fault, UpstreamOverloaded)
        assert isinstance(wrong.fault, ClientError)
        assert raw_of(answers.wrong_request).endswith(wrong.fault.reply.body)
        assert raw_of(answers.overloaded).endswith(busy.fault.reply.body)

    run(check)


def test_an_upstreams_own_word_on_when_to_retry_is_kept():
    async def check():
        async with rig(lambda _: ENGINE_ANSWERS["openai"].overloaded, "openai") as (_, engine):
            taken = await take(engine, request())
        assert isinstance(taken.fault, UpstreamOverloaded)
        assert taken.fault.retry_after_s == pytest.approx(19.54)
        assert taken.fault.reply.header("x-ratelimit-remaining-requests") == "0"

    run(check)


def streamed_through(events, usage_events=UsageEvents.AS_SENT):
    async def check():
        async with rig(lambda _: stream(events)) as (_, engine):
            return await take(engine, request(usage_events=usage_events))

    return run(check)


IN_EACH = [
    delta({"role": "assistant", "content": ""}, usage=usage(0)),
    delta({"content": "a"}, usage=usage(1)),
    delta({"content": "bcd"}, usage=usage(4)),
    delta({}, "stop", usage=usage(4)),
    usage_event(4),
    DONE,
]
AT_END = [ROLE, delta({"content": "a"}), STOP, usage_event(1), DONE]
NONE_SENT = [ROLE, delta({"content": "a"}), delta({"content": "seven letters"}), STOP, DONE]
NO_CHOICES_FIRST = [event({"choices": [], "prompt_filter_results": []}), *NONE_SENT]


@pytest.mark.parametrize(
    ("events", "tokens"), [(IN_EACH, 4), (IN_EACH[:4] + IN_EACH[5:], 4), (AT_END, 1)]
)
def test_d04_usage_reaches_the_client_as_it_was_sent_or_not_at_all(events, tokens):
    shown = streamed_through(events, UsageEvents.AS_SENT)
    hidden = streamed_through(events, UsageEvents.NONE)
    assert shown.raw == b"".join(events)
    assert hidden.raw.endswith(DONE)
    assert b'"prompt_tokens"' not in hidden.raw
    for taken in (shown, hidden):
        assert taken.fault is None
        assert (taken.usage.completion_tokens, taken.usage.estimated) == (tokens, False)
        assert taken.tokens == tokens


def test_d04_usage_in_each_event_is_not_added_up_and_tells_the_tokens_of_an_event():
    taken = streamed_through(IN_EACH)
    assert taken.raw == b"".join(IN_EACH)
    assert (taken.tokens, taken.usage.completion_tokens) == (4, 4)


@pytest.mark.parametrize("events", [NONE_SENT, NO_CHOICES_FIRST])
@pytest.mark.parametrize("shown", UsageEvents)
def test_d04_missing_usage_is_counted_and_marked_as_estimated(events, shown):
    taken = streamed_through(events, shown)
    assert (taken.fault, taken.raw) == (None, b"".join(events))
    assert taken.usage.estimated
    assert (taken.usage.prompt_tokens, taken.usage.completion_tokens) == (None, 4)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("tokens", [-1, 10**18])
def test_absurd_usage_reaches_the_client_and_no_account(tokens, streamed):
    told = usage(tokens)
    choice = {"message": {"content": "a"}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": told}).encode()
    events = [ROLE, delta({"content": "a"}, usage=told), STOP, usage_event(tokens), DONE]

    async def check():
        async with rig(lambda _: stream(events) if streamed else whole(body)) as (_, engine):
            return await take(engine, request(streamed=streamed))

    taken = run(check)
    assert (taken.fault, taken.raw) == (None, b"".join(events) if streamed else body)
    assert (taken.tokens, taken.usage.completion_tokens) == (1, 1)
    assert (taken.usage.prompt_tokens, taken.usage.estimated) == (None, True)


def test_several_choices_end_each_on_their_own():
    events = [
        delta({"role": "assistant", "content": ""}, index=0),
        delta({"role": "assistant", "content": ""}, index=1),
        delta({"content": "a"}, index=1),
        delta({}, "stop", index=1),
        delta({"content": "b"}, index=0),
        delta({}, "length", index=0),
        DONE,
    ]
    assert streamed_through(events).finishes == [(1, "stop"), (0, "length")]
    cut_short = streamed_through([*events[:5], DONE])
    assert "choice 0 has no finish reason" in str(cut_short.fault)


def test_what_only_opens_a_stream_can_be_held_back():
    """The chunk with the role says no tokens, so that nothing is streamed before the first."""

    async def check():
        script = [Send(head(200, ("content-type", "text/event-stream")) + http_chunk(ROLE))]
        async with rig(lambda _: script, "tgi") as (_, engine):
            answer = await engine.open(request())
            chunk = await anext(answer)
            answer.close()
            assert (chunk.raw, chunk.tokens) == (ROLE, 0)

    run(check)


@pytest.mark.parametrize("ending", [b"\r\n\r\n", b"\n\n", b"\r\r"])
def test_line_endings_of_all_kinds_pass(ending):
    events = [one[:-2] + ending for one in AT_END]
    taken = streamed_through(events)
    assert (taken.fault, taken.tokens, taken.ended) == (None, 1, True)
    # A CR at the very end could be half of a CRLF, so that other half is added.
    assert taken.raw == b"".join(events) + (b"\n" if ending == b"\r\r" else b"")


def test_comments_names_and_ids_of_events_pass():
    events = [
        b": waiting\n\n",
        b"id: 1\nevent: message\n" + ROLE,
        b"retry: 100\n" + delta({"content": "a"}),
        STOP,
        DONE,
    ]
    taken = streamed_through(events)
    assert (taken.fault, taken.raw, taken.tokens) == (None, b"".join(events), 1)


@pytest.mark.parametrize("events", [[ROLE, STOP], [ROLE, STOP, DONE[:-1]], [ROLE, STOP, DONE[:-2]]])
def test_a_stream_without_its_terminator_is_whole_once_it_finished(events):
    taken = streamed_through(events)
    assert (taken.fault, taken.ended, taken.finishes) == (None, True, [(0, "stop")])
    assert taken.raw in {ROLE + STOP, ROLE + STOP + DONE, ROLE + STOP + DONE[:-1] + b"\n\n"}


def test_tool_calls_and_reasoning_count_as_output():
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    events = [
        ROLE,
        delta({"reasoning_content": "hm"}),
        delta({"tool_calls": [call]}),
        delta({}, "tool_calls"),
        DONE,
    ]
    taken = streamed_through(events)
    assert (taken.tokens, taken.finishes) == (2, [(0, "tool_calls")])


def test_text_completions_and_unknown_fields_pass():
    events = [
        event({"choices": [{"index": 0, "text": "a", "finish_reason": None}], "x_vendor": [1, {}]}),
        event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}),
        DONE,
    ]
    taken = streamed_through(events)
    assert (taken.fault, taken.raw, taken.tokens) == (None, b"".join(events), 1)


def test_events_of_the_responses_route_are_understood():
    used = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}
    events = [
        b"event: response.created\n" + event({"type": "response.created", "response": {}}),
        b"event: response.output_text.delta\n"
        + event({"type": "response.output_text.delta", "delta": "Hi"}),
        b"event: response.completed\n"
        + event({"type": "response.completed", "response": {"usage": used}}),
    ]
    taken = streamed_through(events)
    assert (taken.fault, taken.raw, taken.tokens) == (None, b"".join(events), 1)
    assert taken.finishes == [(0, "completed")]
    assert (taken.usage.prompt_tokens, taken.usage.completion_tokens) == (5, 2)
    assert taken.usage.cached_tokens == 3


def test_d23_the_engines_own_times_are_kept_apart():
    async def check(name, streamed):
        async with rig(ENGINE_ANSWERS[name].route(), name) as (_, engine):
            return (await take(engine, request(streamed=streamed))).times

    assert run(partial(check, "tgi", False)).queue_s == pytest.approx(0.04)
    for streamed in (True, False):
        times = run(partial(check, "llama-server", streamed))
        assert times.prefill_s == pytest.approx(0.294791)
        assert times.decode_s == pytest.approx(0.058929)


def test_other_json_passes_unread():
    body = b'[{"index":0,"score":0.5}]'

    async def check():
        async with rig(lambda _: whole(body)) as (_, engine):
            taken = await take(engine, request(streamed=False, path="/rerank"))
        assert (taken.fault, taken.raw, taken.tokens) == (None, body, 0)

    run(check)


def test_embeddings_have_usage_without_output():
    body = json.dumps({"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}).encode()

    async def check():
        async with rig(lambda _: whole(body)) as (_, engine):
            return await take(engine, request(streamed=False, path="/v1/embeddings"))

    taken = run(check)
    assert (taken.raw, taken.usage.prompt_tokens) == (body, 8)
    assert (taken.usage.completion_tokens, taken.usage.estimated) == (0, False)


def test_interim_answers_are_skipped():
    interim = Send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")

    async def check():
        async with rig(lambda _: (interim, *stream(AT_END))) as (_, engine):
            taken = await take(engine, request())
        assert (taken.fault, taken.status, taken.raw) == (None, 200, b"".join(AT_END))

    run(check)


def test_a_body_that_ends_with_its_connection_is_whole_if_it_parses():
    def route(body):
        lines = ("content-type", "application/json"), ("connection", "close")
        return lambda _: (Send(head(200, *lines) + body), Close())

    async def check():
        async with rig(route(b'{"choices":[]}')) as (upstream, engine):
            good = await take(engine, request(streamed=False))
            upstream.route = route(b'{"choices":[')
            bad = await take(engine, request(streamed=False))
        assert (good.fault, good.raw) == (None, b'{"choices":[]}')
        assert isinstance(bad.fault, Garbage)

    run(check)


def test_the_callers_bytes_and_headers_go_upstream_with_our_key_and_no_other():
    body = b'{"model" : "m",  "x_unknown": 1.50, "stream": true}'
    headers = (
        ("Authorization", "Bearer clients-own"),
        ("traceparent", "00-a-b-01"),
        ("Content-Length", "3"),
        ("Accept-Encoding", "gzip"),
        ("Content-Type", "application/json; charset=utf-8"),
    )

    async def check():
        async with rig(ENGINE_ANSWERS["vllm"].route(), key="ours", path="/base") as (
            upstream,
            engine,
        ):
            await take(engine, request(body=body, headers=headers))
        (got,) = upstream.requests
        assert (got.path, got.body) == ("/base" + CHAT, body)
        names = [name for name, _ in got.headers]
        assert len(names) == len(set(names))
        assert got.header("authorization") == "Bearer ours"
        assert got.header("traceparent") == "00-a-b-01"
        assert got.header("accept-encoding") == "identity"
        assert got.header("content-type") == "application/json; charset=utf-8"
        assert got.header("x-request-id") == "r-1"
        assert "ours" not in repr(engine._upstream)

    run(check)


def test_a_header_with_a_line_break_is_refused():
    async def check():
        async with rig(ENGINE_ANSWERS["vllm"].route()) as (upstream, engine):
            with pytest.raises(ValueError, match="line break"):
                await engine.open(request(headers=(("x-a", "1\r\nx-b: 2"),)))
        assert upstream.requests == []

    run(check)


def test_priorities_are_said_in_each_engines_direction():
    assert [DIALECTS[name].priority_value(2) for name in ("vllm", "sglang", "tgi")] == [2, -2, None]
