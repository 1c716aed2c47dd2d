"""A life becomes spans with standard names, whose children stay within their parents."""

from itertools import pairwise

from sluice.telemetry.life import life_of
from sluice.telemetry.spans import Span, beside_of, spans_of
from sluice.telemetry.trace_context import attempt_name, span_id_of
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


def made(records, steps=()) -> dict[str, Span]:
    life = life_of(entries(records), CALL)
    assert life is not None
    found = spans_of(life, 0.5, beside_of(CALL, entries(records), {}))
    assert len({one.span_id for one in found}) == len(found)
    return {one.name: one for one in found}


def test_every_phase_is_a_child_and_they_lie_end_to_end():
    spans = made(served())
    server = spans["chat m"]
    assert (server.start_ns, server.end_ns) == (WALL_NS, WALL_NS + 100 * MS)
    phases = ["retrieval", "admission", "queue", "prefill", "decode", "preempted"]
    for name in phases:
        assert spans[name].parent_id == server.span_id
        assert spans[name].attributes["phase"] == name
    for before, after in pairwise(spans[name] for name in phases):
        assert before.end_ns == after.start_ns
    assert spans[phases[-1]].end_ns == server.end_ns


def test_standard_names_and_those_of_vllm_tell_the_same():
    told = made(served())["chat m"].attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.max_tokens"] == 50
    assert told["gen_ai.usage.input_tokens"] == told["gen_ai.usage.prompt_tokens"] == 100
    assert told["gen_ai.usage.cache_read.input_tokens"] == 60
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.latency.time_to_first_token"] == 0.041
    assert told["gen_ai.latency.e2e"] == 0.1
    assert told["gen_ai.latency.time_in_model_inference"] == 0.07
    assert (told["sluice.outcome"], told["sluice.sample.probability"]) == ("met", 0.5)
    assert told["sluice.degraded"] == ("shorten",)


def test_chunks_and_steps_are_events_and_what_ran_beside_is_linked():
    spans = made(served())
    chunks = spans["prefill"].events
    assert [one.attributes["sluice.step.prefill_tokens"] for one in chunks] == [64, 36]
    assert chunks[1].attributes["sluice.step.beside_prefill_tokens"] == 500
    (step,) = spans["decode"].events
    assert step.attributes["sluice.step.measured_s"] == 0.01
    links = spans["chat m"].links
    assert [one.attributes["sluice.beside.request_id"] for one in links] == ["long", "other"]
    assert links[0].attributes["sluice.beside.prefill_tokens"] == 500
    assert links[0].span_id == span_id_of("long", "server")


def test_d24_attempts_are_children_of_the_server_span_under_the_clients_trace():
    spans = made(tried_twice())
    server = spans["chat m"]
    assert (f"{server.trace_id:032x}", f"{server.parent_id:016x}") == (TRACE, SPAN)
    assert server.parent_is_remote
    for number, error in ((1, "503 from m-0"), (2, "")):
        one = spans[attempt_name(number)]
        assert (one.kind, one.parent_id, one.error) == ("client", server.span_id, error)
        assert one.trace_id == server.trace_id
        assert one.span_id == span_id_of(CALL, attempt_name(number))
    for one in spans.values():
        assert server.start_ns <= one.start_ns <= one.end_ns <= server.end_ns
    assert spans["attempt 1"].end_ns == WALL_NS + 20 * MS


def test_a_refusal_is_an_error_with_its_numbers():
    (server,) = made(refused()).values()
    assert server.error == server.attributes["error.type"] == "queue_full"
    assert server.attributes["sluice.refusal.measured"] == 9
    assert server.attributes["http.response.status_code"] == 429
    assert server.end_ns == WALL_NS + 3 * MS


def test_a_state_without_the_trace_it_belongs_to_is_dropped():
    assert made(served(traceparent=GIVEN))["chat m"].tracestate == "vendor=1"
    assert made(served())["chat m"].tracestate == ""
