"""What each fault of an upstream becomes, streamed and not; the table of conduct towards engines.

After each fault the same engine serves the next request, no connection is left in use, and the
upstream was asked once: whether to try again, and where, is for the gateway to say.
"""

from dataclasses import dataclass

import pytest

from sluice.executors.faults import retry_after_s
from sluice.executors.http_pool import Address
from sluice.executors.stream import (
    ClientError,
    ConnectFailed,
    ConnectFault,
    Deadlines,
    FirstTokenLate,
    Garbage,
    Lost,
    Reply,
    UpstreamError,
    UpstreamFailed,
    UpstreamOverloaded,
)
from sluice.testing.engine_answers import (
    DONE,
    ENGINE_ANSWERS,
    delta,
    error_body,
    event,
    usage_event,
)
from sluice.testing.upstream import (
    STREAM_HEAD,
    Close,
    Hold,
    Reset,
    Script,
    ScriptedUpstream,
    Send,
    cut,
    head,
    http_chunk,
    raw_of,
    stream,
    whole,
)
from tests.executors.stream_rig import FAST, engine_for, request, rig, run, take

VLLM = ENGINE_ANSWERS["vllm"]
PIECES = ("Hel", "lo", "!")
ROLE = delta({"role": "assistant", "content": ""})
TOKEN, STOP = delta({"content": "a"}), delta({}, "stop")
GOOD_STREAM = stream(VLLM.events(PIECES))
GOOD_WHOLE = whole(VLLM.body(PIECES))
JSON_HEAD = head(200, ("content-type", "application/json"), length=4000)
SHORT = Deadlines(connect_s=2.0, first_token_s=0.05, silence_s=0.05, whole_s=0.05)
ERROR_500 = error_body("EngineCore died", "InternalServerError", 500)
ERROR_400 = error_body("prompt has 3000 tokens", "invalid_request_error", 400)
MEGABYTES = b"x" * 10_000_000


def chunks(*raw: bytes) -> Script:
    return (Send(STREAM_HEAD), *(Send(http_chunk(one)) for one in raw))


@dataclass(frozen=True)
class Fault:
    """One row: what the upstream does, and what it is told as. ``tokens`` had come by then."""

    name: str
    streamed: Script | None
    whole: Script | None
    expected: type[UpstreamError]
    tokens: int = 0
    deadlines: Deadlines = FAST
    status: int | None = None


def same(script: Script) -> tuple[Script, Script]:
    return script, script


def status(code: int, body: bytes = b"{}", *headers: tuple[str, str]) -> tuple[Script, Script]:
    return same(whole(body, code, *headers))


FAULTS = [
    Fault("closes without an answer", (Close(),), (Close(),), Lost),
    Fault("resets without an answer", (Reset(),), (Reset(),), Lost),
    Fault("silent before its head", (Hold(),), (Hold(),), FirstTokenLate, deadlines=SHORT),
    Fault(
        "silent after its head",
        (Send(STREAM_HEAD), Hold()),
        (Send(JSON_HEAD), Hold()),
        FirstTokenLate,
        deadlines=SHORT,
    ),
    Fault(
        "silent within its body",
        (*chunks(ROLE, TOKEN), Hold()),
        (Send(JSON_HEAD + b'{"cho'), Hold()),
        Lost,
        tokens=1,
        deadlines=SHORT,
    ),
    Fault("silent after its role", (*chunks(ROLE), Hold()), None, FirstTokenLate, 0, SHORT),
    Fault(
        "pings and no output",
        (*chunks(ROLE, b": ping\n\n", b": ping\n\n"), Hold()),
        None,
        FirstTokenLate,
        deadlines=SHORT,
    ),
    Fault(
        "half an event",
        (*chunks(ROLE, TOKEN, TOKEN[:20]), Close()),
        (Send(JSON_HEAD + b'{"cho'), Close()),
        Lost,
        tokens=1,
    ),
    Fault(
        "half an event, reset",
        (*chunks(ROLE, TOKEN, TOKEN[:20]), Hold(), Reset()),
        (Send(JSON_HEAD + b'{"cho'), Hold(), Reset()),
        Lost,
        tokens=1,
    ),
    Fault("half an event, closed in order", chunks(TOKEN, TOKEN[:20], b""), None, Lost, 1),
    Fault(
        "half a chunk of its framing",
        (Send(STREAM_HEAD + http_chunk(TOKEN) + b"ff\r\nda"), Close()),
        (Send(head(200, ("content-type", "application/json")) + b"ff\r\n{"), Close()),
        Lost,
        tokens=1,
    ),
    Fault("ends without a finish", chunks(ROLE, TOKEN, b""), None, Lost, 1),
    Fault("ends without an event", chunks(b""), None, Lost),
    Fault("[DONE] without a finish", chunks(ROLE, TOKEN, DONE, b""), None, Lost, 1),
    Fault(
        "one of two choices unfinished",
        chunks(delta({"content": "a"}, index=1), TOKEN, STOP, DONE, b""),
        None,
        Lost,
        2,
    ),
    Fault(
        "error first",
        chunks(VLLM.error_event, b""),
        whole(ERROR_500),
        UpstreamFailed,
        status=500,
    ),
    Fault("error after its role", chunks(ROLE, VLLM.error_event, b""), None, UpstreamFailed),
    Fault("error after output", chunks(ROLE, TOKEN, VLLM.error_event), None, UpstreamFailed, 1),
    Fault(
        "the client's error within a 200",
        chunks(b"data: " + ERROR_400 + b"\n\n"),
        whole(ERROR_400),
        ClientError,
        status=400,
    ),
    Fault(
        "an error as JSON where a stream was asked for",
        whole(ERROR_400),
        None,
        ClientError,
        status=400,
    ),
    Fault(
        "overload within a 200",
        chunks(event({"error": "Model is overloaded", "error_type": "overloaded"})),
        whole(b'{"error":"Model is overloaded","error_type":"overloaded"}'),
        UpstreamOverloaded,
        status=429,
    ),
    Fault(
        "the engine's own abort",
        chunks(ROLE, TOKEN, delta({}, "abort"), DONE),
        whole(b'{"choices":[{"index":0,"message":{},"finish_reason":"abort"}]}'),
        UpstreamFailed,
        tokens=1,
    ),
    Fault("500", *status(500, ERROR_500), UpstreamFailed, status=500),
    Fault("502 with HTML", *status(502, b"<html>Bad gateway"), UpstreamFailed, status=502),
    Fault("503", *status(503, b"", ("retry-after", "3")), UpstreamOverloaded, status=503),
    Fault("429", *status(429, b"{}", ("retry-after", "3")), UpstreamOverloaded, status=429),
    Fault("400", *status(400, ERROR_400), ClientError, status=400),
    Fault("401", *status(401), ClientError, status=401),
    Fault("404", *status(404), ClientError, status=404),
    Fault("408", *status(408), UpstreamFailed, status=408),
    Fault("424, a failed generation", *status(424), UpstreamFailed, status=424),
    Fault("307 elsewhere", *status(307, b"", ("location", "http://127.0.0.1:1/")), Garbage),
    Fault("200 with HTML", *same(whole(b"<html>", kind="text/html")), Garbage),
    Fault("the other kind of answer", GOOD_WHOLE, GOOD_STREAM, Garbage),
    Fault(
        "gzip that nobody asked for",
        (Send(head(200, ("content-type", "text/event-stream"), ("content-encoding", "gzip"))),),
        whole(b"\x1f\x8b", 200, ("content-encoding", "gzip")),
        Garbage,
    ),
    Fault("not HTTP", *same((Send(b"\x16\x03\x01 hello\r\n\r\n"),)), Garbage),
    Fault(
        "another protocol", *same((Send(head(101, ("upgrade", "x"), length=0)), Hold())), Garbage
    ),
    Fault("a head without an end", *same((Send(b"HTTP/1.1 200 OK\r\nx: " + MEGABYTES),)), Garbage),
    Fault(
        "framing without an end",
        (Send(STREAM_HEAD + b"1;" + MEGABYTES),),
        (Send(head(200, ("content-type", "application/json")) + b"1;" + MEGABYTES),),
        Garbage,
    ),
    Fault("no JSON in an event", chunks(ROLE, TOKEN, b"data: {oops\n\n"), None, Garbage, 1),
    Fault("no JSON", None, whole(b'{"choices": [}'), Garbage),
    Fault("a list for an event", chunks(b"data: [1]\n\n"), None, Garbage),
    Fault("choices of another shape", chunks(event({"choices": "none"})), None, Garbage),
    Fault("no UTF-8", chunks(b'data: {"choices":[{"text":"\xff"}]}\n\n'), None, Garbage),
    Fault(
        "10 MB without a newline",
        (Send(STREAM_HEAD + http_chunk(TOKEN) + http_chunk(MEGABYTES)), Hold()),
        None,
        Garbage,
        tokens=1,
    ),
]
ROWS = [
    pytest.param(fault, streamed, id=f"{fault.name}-{'streamed' if streamed else 'whole'}")
    for fault in FAULTS
    for streamed in (True, False)
    if (fault.streamed if streamed else fault.whole) is not None
]


@pytest.mark.parametrize(("fault", "streamed"), ROWS)
def test_d13_a_fault_is_told_as_what_it_is_and_asked_for_once(fault, streamed):
    script = fault.streamed if streamed else fault.whole
    asked = request(streamed=streamed, deadlines=fault.deadlines)

    async def check():
        async with rig(lambda _: script) as (upstream, engine):
            if Reset() in script:
                upstream.release()
            taken = await take(engine, asked)
            assert upstream.hits(asked.path) == 1
            assert engine.connections_in_use == 0
            upstream.route = VLLM.route(PIECES)
            again = await take(engine, request(streamed=streamed))
        assert again.fault is None
        return taken

    taken = run(check)
    expected = fault.expected
    if not streamed and fault.name == "silent within its body":
        expected = FirstTokenLate
    assert type(taken.fault) is expected, repr(taken.fault)
    assert not taken.ended
    if streamed:
        assert taken.tokens == fault.tokens
        assert getattr(taken.fault, "tokens", fault.tokens) == fault.tokens
    if fault.status is not None:
        assert taken.fault.reply.status == fault.status


@pytest.mark.parametrize("streamed", [True, False])
def test_nobody_listening_is_told_as_refused(streamed):
    async def check():
        async with ScriptedUpstream(VLLM.route()) as upstream:
            address = upstream.address()
        async with engine_for(upstream, address=address) as engine:
            return await take(engine, request(streamed=streamed))

    fault = run(check).fault
    assert isinstance(fault, ConnectFailed)
    assert fault.fault is ConnectFault.REFUSED


@pytest.mark.parametrize("streamed", [True, False])
def test_a_name_that_nobody_knows_is_told_as_such(streamed):
    async def check():
        async with rig(VLLM.route(), address=Address("sluice.invalid", 80)) as (_, engine):
            return await take(engine, request(streamed=streamed))

    fault = run(check).fault
    assert isinstance(fault, ConnectFailed)
    assert fault.fault is ConnectFault.NAME


@pytest.mark.parametrize("name", ["bare", "event"])
def test_llama_servers_former_error_lines_are_understood(name):
    line = b"error: " + ERROR_500 if name == "bare" else b"event: error\ndata: " + ERROR_500

    async def check():
        async with rig(lambda _: chunks(ROLE, line + b"\n\n"), "llama-server") as (_, engine):
            return await take(engine, request())

    fault = run(check).fault
    assert isinstance(fault, UpstreamFailed)
    assert fault.message == "EngineCore died"


def test_d12_the_opening_of_a_stream_that_fails_carries_no_tokens():
    """So a gateway that holds it back has shown nothing, and may go elsewhere."""

    async def check():
        async with rig(lambda _: chunks(ROLE, VLLM.error_event, b"")) as (_, engine):
            return await take(engine, request())

    taken = run(check)
    assert [(chunk.raw, chunk.tokens) for chunk in taken.chunks] == [(ROLE, 0)]
    assert (taken.fault.retryable, taken.fault.tokens) == (True, 0)


DATE = ("date", "Mon, 30 Nov 2026 16:00:00 GMT")


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ([("retry-after", "3")], 3.0),
        ([("retry-after", "3"), ("retry-after-ms", "2500")], 2.5),
        ([("retry-after", "Mon, 30 Nov 2026 16:00:07 GMT"), DATE], 7.0),
        ([("retry-after", "Mon, 30 Nov 2026 15:00:00 GMT"), DATE], 0.0),
        ([("retry-after", "Mon, 30 Nov 2026 16:00:07 GMT")], None),
        ([("retry-after", "soon"), DATE], None),
        ([("retry-after", "inf")], None),
        ([("retry-after-ms", "soon"), ("retry-after", "3")], 3.0),
        ([], None),
    ],
)
def test_when_to_come_back_is_read_in_all_its_forms(headers, expected_s):
    assert retry_after_s(Reply(503, tuple(headers), b"")) == expected_s


def test_d12_retry_after_of_a_refusal_is_kept():
    async def check():
        async with rig(lambda _: status(503, b"", ("retry-after", "3"))[0]) as (_, engine):
            return await take(engine, request())

    assert run(check).fault.retry_after_s == 3.0


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_the_end_of_the_connection_at_any_byte_is_never_a_clean_end(streamed):
    """What was given out before is a whole number of the events that were sent."""
    events = [ROLE, TOKEN, STOP, usage_event(1), DONE]
    script = stream(events) if streamed else GOOD_WHOLE
    length, body = len(raw_of(script)), b"".join(events)
    prefixes = {b"".join(events[:n]) for n in range(len(events) + 1)}
    # From here on the answer is whole: behind the last event of a stream only framing follows.
    whole_from = raw_of(script).rfind(DONE) + len(DONE) if streamed else length
    at_now = 0

    async def check():
        nonlocal at_now
        async with rig(lambda _: cut(script, at_now)) as (upstream, engine):
            for at_now in range(length + 1):
                taken = await take(engine, request(streamed=streamed))
                if at_now < whole_from:
                    assert isinstance(taken.fault, Lost), at_now
                    assert taken.raw in (prefixes if streamed else {b""})
                    assert not taken.ended
                else:
                    assert (taken.fault, taken.ended) == (None, True), at_now
                    assert taken.raw == (body if streamed else VLLM.body(PIECES))
            assert len(upstream.requests) == length + 1

    run(check)
