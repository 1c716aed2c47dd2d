"""Every kind of span arrives at a collector over both transports, as the protocol has it."""

import pytest

from sluice.telemetry.life import life_of
from sluice.telemetry.otlp import Collector, OtlpSender
from sluice.telemetry.spans import beside_of, spans_of
from tests.telemetry.collectors import attributes, grpc_collector, http_collector
from tests.telemetry.journeys import (
    CALL,
    GIVEN,
    MS,
    SPAN,
    TRACE,
    WALL_NS,
    entries,
    refused,
    served,
    tried_twice,
)

COLLECTORS = {"grpc": grpc_collector, "http": http_collector}


@pytest.mark.parametrize("protocol", COLLECTORS)
def test_every_span_kind_arrives_as_it_was_made(protocol):
    spans = []
    for records in (served(traceparent=GIVEN), tried_twice(), refused()):
        life = life_of(entries(records), CALL)
        assert life is not None
        spans += spans_of(life, 0.25, beside_of(CALL, entries(records), {}))
    with COLLECTORS[protocol]() as collected:
        sender = OtlpSender(Collector(collected.endpoint, protocol, "my-service"))
        assert sender.send(spans)
        sender.close()
        came = collected.spans()
    assert [one.name for one in came] == [one.name for one in spans]
    assert collected.resource()["service.name"] == "my-service"
    assert {one.kind for one in came} == {1, 2, 3}, "internal, server and client"
    names = {one.name for one in came}
    assert names >= {
        "chat m", "retrieval", "admission", "queue", "prefill", "decode", "preempted",
        "attempt 1", "attempt 2",
    }  # fmt: skip
    server = came[0]
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, SPAN)
    assert server.trace_state == "vendor=1"
    assert server.end_time_unix_nano == WALL_NS + 100 * MS
    told = attributes(server)
    assert told["gen_ai.usage.output_tokens"] == 20
    assert told["sluice.degraded"] == ["shorten"]
    assert [one.name for one in server.events] == ["degraded", "first token"]
    assert len(server.links) == 2
    (refusal,) = [one for one in came if attributes(one).get("sluice.outcome") == "refused"]
    assert (refusal.status.code, refusal.status.message) == (2, "queue_full")
    by_name = {one.name: one for one in came[: len(came)]}
    assert [one.name for one in came if one.name == "prefill"]
    assert by_name["attempt 2"].parent_span_id == refusal.span_id, "same call, same server span"


@pytest.mark.parametrize("protocol", COLLECTORS)
def test_a_collector_that_is_not_there_is_told_and_raises_nothing(protocol, monkeypatch):
    monkeypatch.setattr("sluice.telemetry.otlp._TIMEOUT_S", 0.2)
    sender = OtlpSender(Collector("http://127.0.0.1:9", protocol, "s"))
    life = life_of(entries(refused()), CALL)
    assert life is not None
    assert not sender.send(spans_of(life, 1.0))
    sender.close()
