"""Calls that change sides under overload: from a remote engine to a model here, and back."""

import asyncio

import pytest

from sluice.cluster.calls import LiveCalls
from sluice.cluster.classes import ServiceClasses
from sluice.cluster.forward import understood
from sluice.cluster.observer import Observer
from sluice.cluster.remote_model import RemoteModel
from sluice.config.sections import ModelSection, SloSection
from sluice.core.events import Retarget
from sluice.runtime.generation import Call, ChatPrompt, ModelCard, RawPrompt, SentBody
from sluice.telemetry.metrics import Metrics
from sluice.testing.upstream import Hold, Received, Script
from tests.cluster.relay_rig import MESSAGES, Leaver, answering, engine, relay
from tests.cluster.rig import served_model

SIMULATED = "sim:llama-3.1-8b@h100"
SLO = {"quick": SloSection(overload=("smaller", "queue"))}
SETTINGS = {"slo": SLO}
BODY = {"model": "big", "messages": MESSAGES, "max_tokens": 5}


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_model_here_answers_what_a_remote_engine_has_no_place_for(streamed):
    """One request holds the only place of the engine; the next is answered by the smaller model."""
    small = {"small": ModelSection(source=SIMULATED)}
    with relay(
        answering(lambda _: (Hold(),)),
        settings=SETTINGS, beside=small, in_flight_max=1, slo="quick", smaller="small",
    ) as rig, Leaver(rig, BODY):  # fmt: skip
        rig.eventually(lambda: len(rig.sent()) == 1)
        answer = rig.post("/v1/chat/completions", {**BODY, "stream": streamed})
        assert answer.status == 200
        assert answer.headers["x-sluice-model"] == "small"
        assert answer.headers["x-sluice-degraded"] == "smaller"
        if streamed:
            assert answer.body.endswith(b"data: [DONE]\n\n")
        else:
            assert answer.json()["usage"]["completion_tokens"] == 5
            assert answer.json()["usage"]["sluice"]["model_asked"] == "big"
        assert len(rig.sent()) == 1


def test_a_remote_engine_answers_what_a_model_here_has_no_place_for():
    large = ModelSection(
        source=SIMULATED, sequences_max=1, slo="quick", smaller="big", queue_requests_max=1
    )
    long = {
        "model": "large",
        "messages": MESSAGES,
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    with (
        relay(engine(), settings=SETTINGS, beside={"large": large}) as rig,
        Leaver(rig, long) as first,
    ):
        first.until(b"data: ")
        answer = rig.post("/v1/chat/completions", {**BODY, "model": "large", "vendor": [1]})
        assert answer.status == 200
        assert answer.headers["x-sluice-model"] == "big"
        assert answer.headers["x-sluice-degraded"] == "smaller"
        assert answer.json()["choices"][0]["message"]["content"] == "Hello!"
        assert rig.sent_body()["vendor"] == [1]
        assert rig.sent_body()["model"] == "weights"


def test_a_call_that_a_model_here_cannot_read_stays_with_its_engine():
    """What the engine takes and the smaller model does not is no error: it waits for the engine."""
    waiting: list[Received] = []
    unread = {**BODY, "messages": 5}

    def script(request: Received) -> Script:
        waiting.append(request)
        return (Hold(), *engine()(request))

    small = {"small": ModelSection(source=SIMULATED)}
    with relay(
        answering(script),
        settings=SETTINGS, beside=small, in_flight_max=1, slo="quick", smaller="small",
    ) as rig, Leaver(rig, BODY) as first, Leaver(rig, unread) as second:  # fmt: skip
        rig.eventually(lambda: rig.metric("requests_waiting", model="big") == 1)
        rig.release()
        first.until(b"Hello!")
        second.until(b"Hello!")
        assert len(waiting) == 2


def test_all_choices_are_made_by_a_model_here_though_the_engine_runs_one_at_a_time():
    small = {"small": ModelSection(source=SIMULATED)}
    with relay(
        answering(lambda _: (Hold(),)),
        settings=SETTINGS, beside=small, in_flight_max=1, slo="quick", smaller="small",
    ) as rig, Leaver(rig, BODY):  # fmt: skip
        rig.eventually(lambda: len(rig.sent()) == 1)
        answer = rig.post("/v1/chat/completions", {**BODY, "n": 3})
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
        assert answer.json()["usage"]["completion_tokens"] == 15


def test_tool_calls_of_a_call_that_changed_sides_are_read():
    """What takes tool calls out is made of the call that was read, not of its bytes."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    prompt = ChatPrompt([{"role": "user", "content": "hi"}], tools=tools)
    read = Call("a", "tiny", 0, prompt, output_tokens_max=5)
    body = b'{"model":"big"}'
    raw = RawPrompt("/v1/chat/completions", SentBody(body, {}, lambda: read), False, False, ())
    call = Call("a", "big", 0, raw)
    big, tiny = RemoteModel(ModelCard("big", 0, 512), ServiceClasses({})), served_model()
    observer = Observer(Metrics(["big", "tiny"]), None, lambda: 0)
    calls = LiveCalls(observer, lambda: 0, lambda: None)

    async def check() -> None:
        calls.add(call, await big.submit(call), big, lambda _: None)
        effect = Retarget("a", "tiny", 1, 1)
        given = await understood(calls.call_for_smaller(effect))
        arrived = calls.arrive_at_smaller(effect, given, await tiny.submit(given), tiny)
        assert arrived is not None
        assert arrived.request.prompt
        assert arrived.request.output_tokens_max == 5
        assert calls._live["a"].tools is not None

    asyncio.run(check())
