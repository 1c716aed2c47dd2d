"""Spans of a running server, from its journal to a collector."""

import json

from sluice.telemetry.trace_context import span_id_of
from tests.e2e.clients import COMPLETIONS, ask
from tests.e2e.processes import ServerProcess, eventually
from tests.telemetry.collectors import attributes, grpc_collector
from tests.telemetry.journeys import GIVEN, SPAN, TRACE

MODEL = "sim:llama-3.1-8b@h100x1"
JSON = {"content-type": "application/json"}


def complete(server: ServerProcess, headers=JSON, **fields):
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, **fields}
    return ask(server.target, "POST", COMPLETIONS, json.dumps(body).encode(), headers)


def test_requests_become_spans_at_a_collector_and_a_collector_that_is_gone_changes_nothing(
    tmp_path,
):
    with grpc_collector() as collected:
        arguments = [
            "--set", f"models.m.source={MODEL}", "--set", f"tracing.endpoint={collected.endpoint}",
            "--set", "tracing.share=1.0",
        ]  # fmt: skip
        server = ServerProcess(tmp_path, arguments)
        try:
            server.wait_ready()
            answer = complete(server, {**JSON, "traceparent": GIVEN, "tracestate": "vendor=1"})
            call_id = answer.headers["x-request-id"]
            complete(server, max_tokens=0)
            eventually(lambda: len(collected.spans()) >= 5)
            spans = {one.name: one for one in collected.spans()}
            root = next(
                one for one in collected.spans()
                if attributes(one).get("gen_ai.request.id") == call_id
            )  # fmt: skip
            assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
            assert int(root.span_id.hex(), 16) == span_id_of(call_id, "server")
            assert attributes(root)["sluice.outcome"] == "met"
            decode = next(
                one for one in collected.spans()
                if one.name == "decode" and one.trace_id == root.trace_id
            )  # fmt: skip
            assert attributes(decode)["sluice.steps"] >= 4, "from the replica's own journal"
            assert "attempt 1" in spans
            refused = [one for one in collected.spans() if one.status.code == 2]
            assert [attributes(one)["sluice.refusal.reason"] for one in refused]
            eventually(lambda: server.metrics()["sluice_spans_exported_total", ""] >= 5)
        except BaseException:
            server.destroy()
            raise
    try:
        assert complete(server).status == 200
        assert server.stop() == 0
    finally:
        server.destroy()
    assert "Traceback" not in server.output
