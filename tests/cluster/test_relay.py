"""Calls through the gateway to remote engines: bytes, headers, counts, leaving, losing."""

import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest

from sluice.cluster.remote import RemoteReplica
from sluice.cluster.remote_model import RemoteModel
from sluice.config.sections import JournalSection, ServerSection, SloSection, TenantSection
from sluice.executors.stream import Lost
from sluice.telemetry.journal import JournalReader
from sluice.testing.engine_answers import DONE, ENGINE_ANSWERS, delta, usage_event
from sluice.testing.upstream import (
    STREAM_HEAD,
    Close,
    Hold,
    Reset,
    Send,
    http_chunk,
    stream,
    whole,
)
from tests.cluster.relay_rig import CHAT, MESSAGES, Leaver, answering, engine, relay

DIALECTS = list(ENGINE_ANSWERS)
OPENING = delta({"role": "assistant", "content": ""})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_of_each_dialect_answers_streamed_and_whole(dialect):
    with relay(engine(dialect), engine=dialect) as rig:
        streamed = rig.chat(stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        answered = rig.chat()
        assert (text, answered.choices[0].message.content) == ("Hello!", "Hello!")
        assert answered.usage.prompt_tokens == 12
        assert rig.metric("prompt_tokens_total") == 24
        assert rig.metric("generated_tokens_total") == 6
        assert rig.metric("requests_ended_total", reason="stop") == 2


def test_the_answer_says_who_gave_it_and_keeps_the_engines_bytes():
    body = b'{"choices":[{"index":0,"finish_reason":"stop"}],  "vendor" : {"x":1e400}}'
    with relay(answering(lambda _: whole(body))) as rig:
        answer = rig.post(CHAT, {"model": "big", "messages": MESSAGES}, x_request_id="mine")
        assert answer.body == body
        assert answer.headers["x-sluice-model"] == "big"
        assert answer.headers["x-sluice-replica"] == "big-0"
        assert answer.headers["x-request-id"] == "mine"


def test_members_that_nobody_knows_keep_every_byte():
    extra = b'"guided_json" : {"a":[1.0,  1e3, "\\u00e9"]}'
    body = b'{"model":"big", ' + extra + b', "messages": [{"role":"user","content":"x"}]}'
    with relay(engine()) as rig:
        assert rig.post(CHAT, body).status == 200
        (sent,) = rig.sent()
        assert b'"guided_json":{"a":[1.0,  1e3, "\\u00e9"]}' in sent.body
        assert b'"messages":[{"role":"user","content":"x"}]' in sent.body
        assert json.loads(sent.body)["model"] == "weights"


def test_a_body_that_needs_no_change_goes_on_as_it_came():
    body = b'{ "messages":[ ] ,"model":"big"}'
    with relay(engine(), upstream_model="big") as rig:
        assert rig.post(CHAT, body).status == 200
        assert rig.sent()[0].body == body


def test_usage_is_asked_for_and_hidden_from_a_client_that_did_not_ask():
    with relay(engine()) as rig:
        chunks = rig.chat(stream=True)
        assert rig.sent_body()["stream_options"] == {"include_usage": True}
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
        assert all(chunk.choices for chunk in chunks)


def test_usage_reaches_a_client_that_asked():
    with relay(engine()) as rig:
        chunks = rig.chat(stream=True, stream_options={"include_usage": True})
        assert chunks[-1].usage.completion_tokens == 3
        assert chunks[-1].choices == []


def test_the_tier_is_no_priority_for_an_engine_without_them():
    with relay(engine()) as rig:
        rig.chat(extra_body={"priority": 3})
        assert "priority" not in rig.sent_body()


@pytest.mark.parametrize(("dialect", "priority"), [("vllm", 3), ("sglang", -3)])
def test_the_tier_becomes_a_priority_in_the_engines_direction(dialect, priority):
    with relay(engine(dialect), engine=dialect, engine_priorities=True) as rig:
        rig.chat(extra_body={"priority": 3})
        assert rig.sent_body()["priority"] == priority


def test_keys_of_clients_are_not_passed_on_and_the_engines_key_is_sent():
    with relay(engine(), key="secret") as rig:
        rig.chat()
        assert [one.header("authorization") for one in rig.sent()] == ["Bearer secret"]
        assert "secret" not in repr(rig.engines[0].address())
    with relay(engine()) as rig:
        rig.chat()
        assert [one.header("authorization") for one in rig.sent()] == [None]


def test_the_trace_of_a_client_goes_on_upstream():
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with relay(engine()) as rig:
        rig.post(CHAT, {"model": "big", "messages": MESSAGES}, traceparent=trace, cookie="a=b")
        assert rig.sent()[0].header("traceparent") == trace
        assert rig.sent()[0].header("cookie") is None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ],
)
def test_other_routes_pass_the_same_gate(path, fields):
    body = b'{"anything":[1,2]}'
    with relay(answering(lambda _: whole(body))) as rig:
        answer = rig.post(path, {"model": "big", **fields})
        assert (answer.status, answer.body) == (200, body)
        assert [one.path for one in rig.sent()] == [path]
        assert rig.metric("requests_ended_total", reason="stop") == 1
        assert rig.post(path, {"model": "none", **fields}).status == 404


def test_what_stands_before_v1_belongs_to_the_address():
    healthy = engine()

    def route(request):
        path = request.path.removeprefix("/team/a")
        assert path != request.path
        return healthy(replace(request, path=path))

    with relay(route, path="/team/a/") as rig:
        assert rig.chat().choices[0].message.content == "Hello!"
        assert [one.path for one in rig.sent()] == ["/team/a" + CHAT]


# ------------------------------------------------------------------------------------- what fails


def test_a_request_that_the_engine_finds_wrong_comes_back_as_the_engine_says_it():
    wrong = b'{"object":"error","message":"max_tokens must be at least 1","code":400}'
    with relay(answering(lambda _: whole(wrong, 400))) as rig:
        answer = rig.post(CHAT, {"model": "big", "messages": MESSAGES})
        assert (answer.status, answer.body) == (400, wrong)
        with pytest.raises(openai.BadRequestError):
            rig.chat(stream=True)


def test_a_key_that_the_engine_refuses_is_not_the_clients_fault():
    with relay(answering(lambda _: whole(b'{"error":"bad key"}', 401))) as rig:
        answer = rig.post(CHAT, {"model": "big", "messages": MESSAGES})
        assert answer.status == 502
        assert b"bad key" not in answer.body


def test_an_engine_that_is_full_passes_its_time_on():
    busy = whole(b'{"error":{"message":"full"}}', 429, ("retry-after", "7"))
    with relay(answering(lambda _: busy)) as rig:
        answer = rig.post(CHAT, {"model": "big", "messages": MESSAGES})
        assert answer.status == 429
        assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("end", [Close(), Reset()], ids=["closed", "reset"])
def test_a_stream_that_breaks_ends_with_an_error_event_and_never_cleanly(end):
    begun = [
        Send(STREAM_HEAD),
        *(Send(http_chunk(one)) for one in (OPENING, delta({"content": "a"}))),
    ]
    with relay(answering(lambda _: (*begun, end))) as rig:
        with pytest.raises(openai.APIError) as caught:
            rig.chat(stream=True)
        assert caught.value.code == "engine_error"
        raw = rig.post(CHAT, {"model": "big", "messages": MESSAGES, "stream": True})
        assert b"[DONE]" not in raw.body
        assert raw.body.count(b'"content":"a"') == 1
        assert rig.metric("requests_ended_total", reason="failed") == 2


def test_an_engine_that_says_nothing_is_given_up():
    with relay(answering(lambda _: (Hold(),)), first_token_s_max=0.1) as rig:
        answer = rig.post(CHAT, {"model": "big", "messages": MESSAGES, "stream": True})
        assert answer.status == 504


def test_the_deadline_of_a_client_ends_a_call_that_an_engine_holds():
    with relay(answering(lambda _: (Hold(),))) as rig:
        began_s = time.monotonic()
        body = {"model": "big", "messages": MESSAGES, "max_tokens": 2}
        answer = rig.post(CHAT, body, x_sluice_deadline_ms="300")
        assert answer.status == 429
        assert answer.headers["x-sluice-reason"] == "deadline_expired"
        assert time.monotonic() - began_s < 2
        rig.eventually(lambda: rig.engines[0].open_now == 0)


def test_a_deadline_within_a_stream_ends_it_with_an_error_event():
    begun = (Send(STREAM_HEAD), Send(http_chunk(delta({"content": "a"}))), Hold())
    with relay(answering(lambda _: begun)) as rig:
        body = {"model": "big", "messages": MESSAGES, "max_tokens": 2, "stream": True}
        answer = rig.post(CHAT, body, x_sluice_deadline_ms="400")
        assert answer.body.count(b'"content":"a"') == 1
        assert b'"code":"deadline_expired"' in answer.body
        assert b"[DONE]" not in answer.body
        assert rig.metric("requests_ended_total", reason="expired") == 1
        rig.eventually(lambda: not rig.open_requests())


def test_an_attempt_that_fails_after_its_call_was_ended_changes_nothing():
    with relay(answering(lambda _: (Hold(),))) as rig:
        body = {"model": "big", "messages": MESSAGES}
        with Leaver(rig, body) as client:
            rig.eventually(lambda: len(rig.sent()) == 1)
            replica = rig.gateway._driver._members["big-0"]
            assert isinstance(replica, RemoteReplica)
            (attempt,) = replica._attempts.values()
            client.leave()
            rig.eventually(lambda: rig.metric("requests_ended_total", reason="cancelled") == 1)

        async def fail() -> None:
            replica._on_failed(attempt, Lost("big-0", "too late"))

        rig.served.call(fail)
        assert rig.metric("requests_ended_total", reason="failed") == 0


def test_a_shutdown_ends_what_engines_hold_when_its_grace_is_over():
    begun = (Send(STREAM_HEAD), Send(http_chunk(delta({"content": "a"}))), Hold())
    with relay(answering(lambda _: begun)) as rig:
        with Leaver(rig, {"model": "big", "messages": MESSAGES, "stream": True}) as client:
            client.until(b'"content":"a"')
            rig.served.call(lambda: rig.gateway.drain(0.2))
            assert b"[DONE]" not in client.until(b'"code":"shutting_down"')
        refused = rig.post(CHAT, {"model": "big", "messages": MESSAGES})
        assert refused.status == 503


# --------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "waiting"])
def test_a_client_that_leaves_ends_its_request_at_the_engine(streamed, begun):
    first = Send(STREAM_HEAD + http_chunk(OPENING) + http_chunk(delta({"content": "a"})))
    script = (first, Hold()) if begun and streamed else (Hold(),)
    with relay(answering(lambda _: script)) as rig:
        body = {"model": "big", "messages": MESSAGES, "stream": streamed}
        with Leaver(rig, body) as client:
            rig.eventually(lambda: len(rig.sent()) == 1)
            if begun and streamed:
                client.until(b'"content":"a"')
            client.leave()
            left_s = time.monotonic()
            rig.eventually(lambda: rig.metric("requests_ended_total", reason="cancelled") == 1)
            rig.eventually(lambda: not rig.open_requests())
            assert time.monotonic() - left_s < 1  # the bound of 100 ms is for a machine at rest


def test_a_client_that_leaves_the_queue_never_reaches_an_engine():
    with relay(answering(lambda _: (Hold(),)), in_flight_max=1) as rig:
        body = {"model": "big", "messages": MESSAGES}
        with Leaver(rig, body) as first, Leaver(rig, body) as second:
            rig.eventually(lambda: rig.metric("requests_waiting") == 1)
            second.leave()
            rig.eventually(lambda: rig.metric("requests_ended_total", reason="cancelled") == 1)
            assert len(rig.sent()) == 1
            first.leave()


# ------------------------------------------------------------------------------------------ gate


def test_what_an_engine_may_not_hold_waits_here_in_order():
    with relay(
        answering(lambda _: (Hold(), *stream([delta({"content": "x"}, "stop"), DONE]))),
        in_flight_max=1,
    ) as rig:
        body = {"model": "big", "messages": MESSAGES, "stream": True}
        with Leaver(rig, body), Leaver(rig, body):
            rig.eventually(lambda: rig.metric("requests_waiting") == 1)
            assert len(rig.sent()) == 1
            rig.release()
            rig.eventually(lambda: len(rig.sent()) == 2)
            rig.eventually(lambda: rig.metric("requests_ended_total", reason="stop") == 2)


def test_a_full_queue_is_refused_here():
    with relay(answering(lambda _: (Hold(),)), in_flight_max=1, queue_requests_max=0) as rig:
        body = {"model": "big", "messages": MESSAGES}
        with Leaver(rig, body):
            rig.eventually(lambda: len(rig.sent()) == 1)
            answer = rig.post(CHAT, body)
            assert answer.status == 429
            assert answer.headers["x-sluice-reason"].startswith("queue_full")


def test_a_shortened_answer_is_asked_for_and_disclosed():
    slo = {"quick": SloSection(overload=("shorten", "queue"), shorten_tokens=5)}
    with relay(
        answering(lambda _: (Hold(), *whole(b"{}"))),
        in_flight_max=1,
        slo="quick",
        settings={"slo": slo},
    ) as rig:
        body = {"model": "big", "messages": MESSAGES, "max_completion_tokens": 50}
        with Leaver(rig, body), Leaver(rig, body) as second:
            rig.eventually(lambda: rig.metric("requests_waiting") == 1)
            rig.release()
            head = second.head()
            assert head["x-sluice-degraded"] == "shorten"
            asked = [json.loads(one.body)["max_completion_tokens"] for one in rig.sent()]
            assert asked == [50, 5]


def test_what_a_tenant_reserved_is_settled_by_the_engines_usage():
    tenants = {"acme": TenantSection(tokens_per_minute=10_000)}
    section = ServerSection(listen="127.0.0.1:0", trust_tenant_header=True)
    with relay(engine(), settings={"tenants": tenants, "server": section}) as rig:
        body = {"model": "big", "messages": MESSAGES, "max_tokens": 1000}
        answer = rig.post(CHAT, body, x_sluice_tenant="acme")
        assert answer.status == 200

        def remaining():
            allowance = rig.gateway.allowance("acme")
            assert allowance is not None
            assert allowance.tokens is not None
            return allowance.tokens.remaining

        rig.eventually(lambda: remaining() >= 9_985)


def test_weights_share_the_work():
    with relay(engine(), engine(), weights=[1.0, 3.0]) as rig:
        chats = [[{"role": "user", "content": f"{n} " * 400}] for n in range(40)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda m: rig.post(CHAT, {"model": "big", "messages": m}), chats))
        assert len(rig.sent(1)) > len(rig.sent(0))


def test_a_prompt_goes_back_to_the_engine_that_has_its_beginning():
    """A session stays where its prefix is while that pays."""
    with relay(engine(), engine()) as rig:
        long: Any = [{"role": "system", "content": "rule " * 2000}]
        rig.chat(messages=[{"role": "user", "content": "other " * 50}])
        first = rig.client.chat.completions.with_raw_response.create(model="big", messages=long)
        second = rig.client.chat.completions.with_raw_response.create(
            model="big", messages=[*long, {"role": "user", "content": "more"}]
        )
        assert first.headers["x-sluice-replica"] == second.headers["x-sluice-replica"]


# ---------------------------------------------------------------------------------------- health


def test_an_engine_that_is_gone_is_told_with_the_time_to_come_back():
    with relay(engine()) as rig:
        rig.chat()
        rig.thread.call(rig.engines[0].stop)
        rig.eventually(lambda: not rig.gateway.readiness().ready)
        answer = rig.post(CHAT, {"model": "big", "messages": MESSAGES})
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        port = rig.engines[0].port
        rig.thread.call(lambda: rig.engines[0].start(port))
        rig.eventually(lambda: rig.gateway.readiness().ready)
        assert rig.chat().choices[0].message.content == "Hello!"


def test_failing_metrics_do_not_stop_dispatch():
    healthy = engine()

    def route(request):
        return whole(b"no", 500) if request.path == "/metrics" else healthy(request)

    with relay(route) as rig:
        for _ in range(8):
            rig.chat()
        assert rig.gateway.readiness().ready


def test_an_engine_that_is_down_at_the_start_comes_in_later():
    state = {"status": 503}
    healthy = engine()

    def route(request):
        return whole(b"{}", state["status"]) if request.path == "/health" else healthy(request)

    with relay(route) as rig:
        assert rig.post(CHAT, {"model": "big", "messages": MESSAGES}).status == 503
        state["status"] = 200
        rig.eventually(lambda: rig.gateway.readiness().ready)
        assert rig.chat().choices[0].message.content == "Hello!"


def test_usage_in_a_stream_teaches_how_long_prompts_are():
    events = [OPENING, delta({"content": "a"}, "stop"), usage_event(1), DONE]
    with relay(answering(lambda _: stream(events))) as rig:
        rig.chat(stream=True, messages=[{"role": "user", "content": "x" * 4000}])
        model = rig.gateway._models["big"]
        assert isinstance(model, RemoteModel)
        assert model._tokens_per_byte < 0.2


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_the_context_of_a_model_is_listed_where_its_engine_tells_it(told):
    healthy = engine()

    def route(request):
        is_silent = request.path == "/v1/models" and not told
        return whole(b'{"data":[{"id":"weights"}]}') if is_silent else healthy(request)

    with relay(route) as rig, rig.client as client:
        listed = client.models.retrieve("big").model_dump()
        assert listed.get("max_model_len") == (4096 if told else None)


def test_a_response_that_breaks_ends_with_an_error_for_openais_client():
    kinds = (b'"response.created","response":{}', b'"response.output_text.delta","delta":"a"')
    events = [Send(http_chunk(b'data: {"type":' + kind + b"}\n\n")) for kind in kinds]
    begun = [Send(STREAM_HEAD), *events]
    with (
        relay(answering(lambda _: (*begun, Close()))) as rig,
        rig.client as client,
        pytest.raises(openai.APIError),
    ):
        list(client.responses.create(model="big", input="hi", stream=True))


def test_outputs_are_in_the_journal_only_where_texts_are_recorded(tmp_path):
    for recorded in (False, True):
        folder = tmp_path / str(recorded)
        journal = JournalSection(dir=folder, record_text=recorded)
        with relay(engine(pieces=["plaintext"]), settings={"journal": journal}) as rig:
            rig.chat(stream=True, messages=[{"role": "user", "content": "the question"}])
            rig.chat()
        entries = repr([one.record for one in JournalReader(folder).entries()])
        assert ("the question" in entries) == recorded
        assert entries.count("plaintext") == 2 * recorded


def test_bodies_that_are_no_requests_are_refused_here_in_our_words():
    with relay(engine()) as rig:
        for body in (b"", b"[1]", b'{"model":5}', b'{"model":"big"', b'{"messages":[]}'):
            answer = rig.post(CHAT, body)
            assert answer.status == 400, body
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert rig.post("/v1/embeddings", body).status == 400
        assert rig.sent() == []


def test_a_stream_flag_that_engines_could_read_either_way_is_refused():
    with relay(engine()) as rig:
        flags: list[Any] = [1, "true", []]
        for flag in flags:
            answer = rig.post(CHAT, {"model": "big", "messages": MESSAGES, "stream": flag})
            assert (answer.status, answer.json()["error"]["param"]) == (400, "stream")
        assert rig.post(CHAT, {"model": "big", "messages": MESSAGES, "stream": None}).status == 200


def test_a_wrong_request_is_no_missed_target():
    slo = {"quick": SloSection(ttft_s=5.0)}
    wrong = answering(lambda _: whole(b'{"error":{}}', 400))
    with relay(wrong, slo="quick", settings={"slo": slo}) as rig:
        assert rig.post(CHAT, {"model": "big", "messages": MESSAGES}).status == 400
        assert rig.metric("requests_ended_total", reason="failed") == 1
        assert rig.metric("class_requests_total") == 0


def test_large_bodies_are_passed_on_whole():
    with relay(engine()) as rig:
        for size in (100_000, 3_000_000):
            rig.chat(messages=[{"role": "user", "content": "x" * size}])
        assert [len(one.body) // 100_000 for one in rig.sent()] == [1, 30]


def test_many_clients_that_come_and_go_leave_nothing_behind():
    """Some read, some leave before and some within their answer; what is held is checked after."""
    pieces = [OPENING, *(delta({"content": f"{n}"}) for n in range(5)), delta({}, "stop"), DONE]
    with relay(
        answering(lambda _: stream(pieces, gap_s=0.01)),
        answering(lambda _: stream(pieces)),
        in_flight_max=4,
    ) as rig:

        def come(number):
            body = {"model": "big", "messages": MESSAGES, "stream": True}
            with Leaver(rig, body) as client:
                if number % 3 == 1:
                    client.until(b'"content":"1"')
                elif number % 3 == 2:
                    client.until(b"[DONE]")

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(come, range(90)))
        rig.check_empty()
        ended = sum(rig.metric("requests_ended_total", reason=one) for one in ("stop", "cancelled"))
        assert ended == rig.metric("requests_total") - rig.metric("refusals_total")
        assert rig.metric("requests_ended_total", reason="stop") >= 30


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_of_a_request_waits_for_the_garbage_collector(streamed):
    ours = ("sluice.server.", "sluice.cluster.", "sluice.executors.", "sluice.runtime.", "uvicorn.")
    body = {"model": "big", "messages": MESSAGES, "stream": streamed}
    with relay(engine(), probe_s=60.0) as rig:
        assert rig.post(CHAT, body).status == 200
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            assert rig.post(CHAT, body).status == 200
            rig.check_empty()
            gc.collect()
            left = {f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert not [name for name in left if name.startswith(ours)]
