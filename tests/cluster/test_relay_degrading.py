"""Calls that change sides under overload: from a remote engine to a model here, and back."""

import pytest

from sluice.config.sections import ModelSection, SloSection
from sluice.testing.upstream import Hold, Received, Script
from tests.cluster.relay_rig import MESSAGES, Leaver, answering, engine, relay

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
