"""D-24: an engine is the child of the attempt that called it, in the trace of the client."""

import contextvars

import pytest

from sluice.telemetry.following import Follower
from sluice.telemetry.span_export import SpanExport, SpanQueue
from sluice.telemetry.trace_context import attempt_name, span_id_of
from sluice.testing.engine_answers import DONE, delta, usage_event
from sluice.testing.simulated_vllm import SimulatedVllm
from sluice.testing.upstream import Received, Script, stream, whole
from tests.cluster.remote_rig import Settings, front
from tests.executors.stream_rig import run
from tests.telemetry.journeys import SPAN, TRACE
from tests.telemetry.test_span_export import FakeSender

GIVEN = (("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "vendor=1"))
ON = 'tracing = { endpoint = "http://127.0.0.1:9", share = 0.0 }'
ANSWER = stream([delta({"content": "one"}), delta({}, "stop"), usage_event(1), DONE])


class Engines:
    """Two engines; the first request to either fails."""

    def __init__(self) -> None:
        self.got: list[Received] = []

    def route(self, received: Received) -> Script:
        if received.path == "/metrics":
            return whole(SimulatedVllm().metrics().encode(), kind="text/plain")
        if not received.path.startswith("/v1/chat"):
            return whole(b"{}")
        self.got.append(received)
        return whole(b"{}", 503) if len(self.got) == 1 else ANSWER


def header(received: Received, name: str) -> str:
    (value,) = [value for key, value in received.headers if key == name]
    return value


@pytest.mark.parametrize("tracing", [ON, ""], ids=["on", "off"])
def test_d24_each_attempt_is_the_parent_of_what_happens_at_its_engine(tmp_path, tracing):
    engines = Engines()
    table = tracing.replace("tracing = {", "[tracing]\n").replace(", ", "\n").replace(" }", "")
    settings = Settings(tables=table)
    sender = FakeSender()
    mine = contextvars.ContextVar("span", default="the caller's own")

    async def check() -> str:
        async with front(tmp_path, engines.route, engines.route, settings=settings) as one:
            seen = await one.ask(headers=GIVEN)
            assert (seen.status, seen.text) == (200, "one")
            assert mine.get() == "the caller's own"
            await one.quiet()
            return seen.headers["x-request-id"]

    call_id = run(check)
    assert len(engines.got) == 2
    assert [header(one, "tracestate") for one in engines.got] == ["vendor=1", "vendor=1"]
    parents = [header(one, "traceparent") for one in engines.got]
    if not tracing:
        assert parents == [GIVEN[0][1]] * 2
        return
    wanted = [span_id_of(call_id, attempt_name(number)) for number in (1, 2)]
    assert parents == [f"00-{TRACE}-{span:016x}-01" for span in wanted]
    export = SpanExport(SpanQueue(sender, 100), 0.0, lambda: 0)
    follower = Follower(tmp_path / "journal", 0)
    export.take(follower.news())
    follower.close()
    export.finish()
    export._queue.close(5)
    spans = {one.name: one for one in sender.sent}
    server = spans["chat m"]
    assert server.parent_id == int(SPAN, 16)
    assert [spans[attempt_name(n)].span_id for n in (1, 2)] == wanted
    assert {spans[attempt_name(n)].parent_id for n in (1, 2)} == {server.span_id}
    assert all(one.end_ns <= server.end_ns for one in sender.sent)
