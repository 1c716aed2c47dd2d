"""What one engine says or is, and how far that reaches: ids, sizes, times, limits, addresses."""

import gc
import json
import tracemalloc
from typing import Any

import pytest

from sluice.config.sections import JournalSection
from sluice.core.errors import InternalError
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import AttemptFailed, RequestEnded
from sluice.testing.engine_answers import DONE, ENGINE_ANSWERS, delta
from sluice.testing.upstream import (
    STREAM_HEAD,
    Hold,
    Received,
    Script,
    Send,
    http_chunk,
    stream,
    whole,
)
from tests.cluster.relay_rig import CHAT, MESSAGES, Leaver, answering, engine, relay

ASKED: dict[str, Any] = {"model": "big", "messages": MESSAGES}
TRICKLE = [delta({"role": "assistant", "content": "", "x": "y" * 100_000})] * 20


def first_then_well(first: Script, dialect: str):
    """An engine that does something else with the first call."""
    scripts, well = [first], engine(dialect)
    return answering(lambda request: scripts.pop() if scripts else well(request), dialect)


def test_a_second_attempt_has_an_id_of_its_own_that_no_late_abort_can_hit():
    with relay(first_then_well((Hold(),), "sglang"), engine="sglang", whole_s_max=0.2) as rig:
        assert rig.post(CHAT, ASKED).status == 200
        first, second = (json.loads(one.body)["rid"] for one in rig.sent())
        assert second == f"{first}-2"
        aborts = [one for one in rig.engines[0].requests if "abort" in one.path]
        assert [json.loads(one.body) for one in aborts] == [{"rid": first}]


def test_a_second_attempt_has_an_id_of_its_own_in_the_header_too():
    with relay(first_then_well(whole(b"{}", 500), "vllm")) as rig:
        assert rig.post(CHAT, ASKED).status == 200
        first, second = (one.header("x-request-id") for one in rig.sent())
        assert second == f"{first}-2"


def test_what_comes_before_any_output_is_held_back_up_to_a_bound():
    events = [*TRICKLE, delta({"content": "a"}, "stop"), DONE]
    with relay(answering(lambda _: stream(events))) as rig:
        answer = rig.post(CHAT, {**ASKED, "stream": True})
        assert answer.status == 502
        assert "without any output" in answer.json()["error"]["message"]
        assert rig.metric("attempts_failed_total", outcome="fault") == 2


def test_a_long_opening_within_the_bound_is_passed_on():
    events = [*TRICKLE[:9], delta({"content": "a"}, "stop"), DONE]
    with relay(answering(lambda _: stream(events))) as rig:
        assert rig.post(CHAT, {**ASKED, "stream": True}).body == b"".join(events)


TIMES = {"3 h": 1e7, "1e300": 1e300, "below": -5.0, "text": "inf", "none": "nan", "long": 10**400}


@pytest.mark.parametrize("told", TIMES.values(), ids=TIMES)
def test_times_of_an_engine_that_cannot_be_stretch_no_phase(tmp_path, told):
    answered = json.loads(ENGINE_ANSWERS["llama-server"].body(("a",)))
    body = json.dumps({**answered, "timings": {"prompt_ms": told}}).encode()
    journal = JournalSection(dir=tmp_path)
    with relay(answering(lambda _: whole(body)), settings={"journal": journal}) as rig:
        assert rig.post(CHAT, ASKED).status == 200
        rig.eventually(lambda: rig.metric("requests_ended_total", reason="stop") == 1)
    records = [one.record for one in JournalReader(tmp_path).entries()]
    (ended,) = [one for one in records if isinstance(one, RequestEnded)]
    assert 0 <= ended.prefill_ns < 10e9
    assert 0 <= ended.decode_ns < 10e9


@pytest.mark.parametrize("order", [(1024, 8192), (8192, 1024)], ids=str)
def test_a_model_is_as_wide_as_its_widest_replica_whichever_came_last(order):
    def holding(context: int):
        healthy = engine()

        def route(request: Received) -> Script:
            if request.path == "/v1/models":
                return whole(b'{"data":[{"id":"weights","max_model_len":%d}]}' % context)
            return healthy(request)

        return route

    with relay(*(holding(one) for one in order)) as rig, rig.client as client:

        def listed() -> Any:
            return client.models.retrieve("big").model_dump().get("max_model_len")

        rig.eventually(lambda: all(r.is_serving for r in rig.gateway.pools()[0].replicas))
        assert listed() == 8192
        first = rig.engines[0].port
        rig.thread.call(rig.engines[0].stop)
        rig.eventually(lambda: not rig.gateway.pools()[0].replicas[0].is_serving)
        rig.thread.call(lambda: rig.engines[0].start(first))
        rig.eventually(lambda: rig.gateway.pools()[0].replicas[0].is_serving)
        assert listed() == 8192


def test_where_engines_are_is_for_the_operator_to_know(tmp_path, caplog):
    journal = JournalSection(dir=tmp_path)
    with relay(engine(), settings={"journal": journal}, probe_s=0.2) as rig:
        port = rig.engines[0].port
        rig.thread.call(rig.engines[0].stop)
        told = [rig.post(CHAT, ASKED).body.decode()]
        rig.eventually(lambda: not rig.gateway.readiness().ready)
        told += [rig.gateway.readiness().reason, rig.post(CHAT, ASKED).body.decode()]
    records = [one.record for one in JournalReader(tmp_path).entries()]
    assert any(isinstance(one, AttemptFailed) for one in records)
    for text in (*told, f"{records}"):
        assert str(port) not in text
        assert "127.0.0.1" not in text
    assert "cannot connect: refused" in told[0]
    assert f"big-0 at 127.0.0.1:{port} cannot be connected to: refused" in caplog.text


def test_a_body_is_held_no_longer_than_it_may_be_sent_again():
    """Its client's bytes, and those that were made of them for the engine."""
    begun = (Send(STREAM_HEAD), Send(http_chunk(delta({"content": "a"}))), Hold())
    content = [{"role": "user", "content": "x" * 3_000_000}]
    tracemalloc.start()
    try:
        with (
            relay(answering(lambda _: begun)) as rig,
            Leaver(rig, {**ASKED, "messages": content, "stream": True}) as client,
        ):
            client.until(b'"content":"a"')
            rig.engines[0].requests.clear()
            rig.eventually(lambda: largest_held() < 1_000_000)
            replica: Any = rig.gateway._driver._members["big-0"]
            (attempt,) = replica._attempts.values()
            with pytest.raises(InternalError):
                attempt.forward.raw.sent.understand()
    finally:
        tracemalloc.stop()


def largest_held() -> int:
    """The size of the largest object that was made since the trace began."""
    gc.collect()
    return max(trace.size for trace in tracemalloc.take_snapshot().traces)
