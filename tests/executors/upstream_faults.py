"""What an upstream may do wrong: one table of scripts, for the client of engines and the gateway.

``test_stream_faults.py`` says what the client tells of each, ``tests/cluster/test_fault_matrix.py``
what becomes of a request.
"""

from dataclasses import dataclass

from sluice.executors.stream import (
    ClientError,
    Deadlines,
    FirstTokenLate,
    Garbage,
    Lost,
    UpstreamError,
    UpstreamFailed,
    UpstreamOverloaded,
)
from sluice.testing.engine_answers import DONE, ENGINE_ANSWERS, delta, error_body, event
from sluice.testing.upstream import (
    STREAM_HEAD,
    Close,
    Hold,
    Reset,
    Script,
    Send,
    head,
    http_chunk,
    stream,
    whole,
)
from tests.executors.stream_rig import FAST

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
    Fault(
        "a status that does not exist",
        *same((Send(b"HTTP/1.1 099 ?\r\ncontent-length: 2\r\n\r\n{}"), Hold())),
        Garbage,
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
