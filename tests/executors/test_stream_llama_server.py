"""The remote engine in front of a real llama.cpp server."""

import asyncio
import json

import pytest

from sluice.executors.dialects import LLAMA_SERVER
from sluice.executors.remote import RemoteEngine, Upstream
from sluice.executors.stream import ClientError, Health, UpstreamRequest, UsageEvents
from tests.executors.llama_child import llama_child
from tests.executors.stream_rig import CHAT, run, take

pytestmark = pytest.mark.model

FREED_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def address(smollm2_gguf, tmp_path_factory):
    with llama_child(smollm2_gguf, tmp_path_factory.mktemp("llama") / "log") as where:
        yield where


def chat(content="Say hi.", *, streamed=True, max_tokens=8, **more):
    fields = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": streamed,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps({**fields, **more}).encode()
    return UpstreamRequest("r-1", CHAT, body, streamed=streamed)


def with_engine(address, use):
    async def check():
        engine = RemoteEngine(Upstream("llama", address, LLAMA_SERVER))
        try:
            await use(engine)
            assert engine.requests_open == 0
        finally:
            await engine.close()

    return run(check)


def text_of(taken):
    payloads = [json.loads(e[6:]) for e in taken.raw.split(b"\n\n") if e.startswith(b"data: {")]
    return "".join(p["choices"][0]["delta"].get("content") or "" for p in payloads if p["choices"])


def test_streamed_and_whole_answers_agree_in_text_and_usage(address):
    async def use(engine):
        streamed = await take(engine, chat())
        whole = await take(engine, chat(streamed=False))
        assert (streamed.fault, whole.fault) == (None, None)
        body = json.loads(whole.raw)
        assert text_of(streamed) == body["choices"][0]["message"]["content"]
        assert streamed.raw.endswith(b"data: [DONE]\n\n")
        assert streamed.ended
        assert streamed.tokens == 8
        for taken in (streamed, whole):
            assert taken.finishes == [(0, "length")]
            assert taken.usage.prompt_tokens == body["usage"]["prompt_tokens"]
            assert (taken.usage.completion_tokens, taken.usage.estimated) == (8, False)
            assert taken.times.prefill_s > 0

    with_engine(address, use)


def test_d04_without_include_usage_the_count_is_an_estimate(address):
    async def use(engine):
        taken = await take(engine, chat(stream_options={}))
        assert taken.fault is None
        assert taken.usage.estimated
        assert taken.usage.completion_tokens >= 8

    with_engine(address, use)


def test_d04_usage_is_hidden_from_a_client_that_did_not_ask(address):
    async def use(engine):
        asked = chat()
        hidden = UpstreamRequest(asked.id, asked.path, asked.body, usage_events=UsageEvents.NONE)
        taken = await take(engine, hidden)
        assert b'"usage"' not in taken.raw
        assert taken.usage.completion_tokens == 8

    with_engine(address, use)


def test_health_and_load_are_read(address):
    async def use(engine):
        await take(engine, chat())
        probe = await engine.probe()
        assert (probe.health, probe.fault) == (Health.READY, "")
        assert probe.gauges.waiting == 0
        assert probe.gauges.counters["completion_tokens"] >= 8

    with_engine(address, use)


def test_a_wrong_request_comes_back_as_the_server_says_it(address):
    async def use(engine):
        wrong = UpstreamRequest("r-1", CHAT, b'{"messages":5}')
        taken = await take(engine, wrong)
        assert isinstance(taken.fault, ClientError)
        assert taken.fault.reply.status == 400
        assert json.loads(taken.fault.reply.body)["error"]["type"] == "invalid_request_error"

    with_engine(address, use)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_request_that_is_left_frees_the_only_slot(address, streamed):
    """With one slot, the next request can only be answered once the left one is stopped."""

    async def use(engine):
        long = chat("Count to a thousand.", streamed=streamed, max_tokens=1500, ignore_eos=True)
        loop = asyncio.get_running_loop()
        task = loop.create_task(take(engine, long))
        await asyncio.sleep(0.3)
        assert not task.done()
        task.cancel()
        began_s = loop.time()
        assert (await take(engine, chat(max_tokens=1))).fault is None
        assert loop.time() - began_s < FREED_WITHIN_S
        await asyncio.wait([task])
        assert task.cancelled()

    with_engine(address, use)
