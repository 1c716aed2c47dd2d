"""A client that leaves is noticed at any moment, and only its own call is cancelled."""

import asyncio
import socket
import struct

import pytest

from sluice.core.request import EndReason
from sluice.runtime.generation import ChoiceEnded, Delta
from sluice.server.limits import Limits
from sluice.testing.gateway import FakeGateway, Hold, Script, Step, finished, speak
from tests.server.wire_client import chat, connected, raw_post, read_all, read_until


@pytest.fixture(scope="module")
def gateway():
    return FakeGateway()


@pytest.fixture(scope="module")
def server(serve_module, gateway):
    return serve_module(gateway)


@pytest.fixture(autouse=True)
def fresh(gateway):
    gateway.script = lambda call: speak(call, "ok")
    for seen in (
        gateway.recorded.calls,
        gateway.recorded.cancelled,
        gateway.recorded.left_before_admission,
    ):
        seen.clear()


def reset(opened: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hard", [False, True], ids=["end", "reset"])
def test_leaving_before_admission_ends_the_admission(server, gateway, stream, hard):
    never = asyncio.Event()
    gateway.script = lambda call: Script((), before=(Hold(never),))
    with connected(server) as opened:
        opened.sendall(raw_post(stream=stream))
        server.eventually(lambda: gateway.recorded.calls)
        if hard:
            reset(opened)
    server.eventually(lambda: gateway.recorded.left_before_admission)
    assert gateway.recorded.cancelled == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_piece_cancels(server, gateway, stream, path):
    never = asyncio.Event()
    gateway.script = lambda call: Script([Hold(never)])
    with connected(server) as opened:
        asked = {"input": "x"} if path.endswith("responses") else {"prompt": "x"}
        opened.sendall(raw_post(path, stream=stream, **asked))
        server.eventually(lambda: gateway.recorded.calls)
    server.eventually(lambda: gateway.recorded.cancelled)
    assert gateway.recorded.cancelled == [gateway.recorded.calls[0].id]


@pytest.mark.parametrize("hard", [False, True], ids=["end", "reset"])
def test_leaving_in_the_middle_of_a_stream_cancels(server, gateway, hard):
    never = asyncio.Event()
    gateway.script = lambda call: Script([Delta(0, "Hello", 1), Hold(never)])
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True))
        read_until(opened, b"Hello")
        assert gateway.recorded.cancelled == []
        if hard:
            reset(opened)
    server.eventually(lambda: gateway.recorded.cancelled)


def test_leaving_cancels_every_prompt_of_a_completion(server, gateway):
    never = asyncio.Event()
    gateway.script = lambda call: Script([Delta(0, "Hello", 1), Hold(never)])
    with connected(server) as opened:
        opened.sendall(raw_post("/v1/completions", stream=True, prompt=["a", "b", "c"]))
        server.eventually(lambda: len(gateway.recorded.calls) == 3)
    server.eventually(lambda: len(gateway.recorded.cancelled) == 3)


def test_leaving_before_the_body_is_complete_calls_nothing(server, gateway):
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True)[:-5])
    assert chat(server).status == 200
    assert len(gateway.recorded.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_running_request_of_a_pipelined_connection_is_told(serve_app, stream):
    never = asyncio.Event()
    gateway = FakeGateway(lambda call: Script([Delta(0, "Hello", 1), Hold(never)]))
    server = serve_app(gateway, None, Limits(ping_s=0.02))
    with connected(server) as opened:
        opened.sendall(raw_post(stream=stream) + raw_post(stream=stream))
        server.eventually(lambda: gateway.recorded.calls)
        reset(opened)
    server.eventually(lambda: gateway.recorded.cancelled)
    assert gateway.recorded.cancelled == [gateway.recorded.calls[0].id]


def test_a_connection_may_not_pipeline_without_bound(serve_app):
    never = asyncio.Event()
    gateway = FakeGateway(lambda call: Script([Hold(never)]))
    server = serve_app(gateway)
    with connected(server) as opened:
        opened.sendall(raw_post() + b"GET /health HTTP/1.1\r\n\r\n" * 100)
        assert read_all(opened) == b""
    server.eventually(lambda: gateway.recorded.cancelled or gateway.recorded.left_before_admission)


def test_others_are_served_while_clients_leave(server, gateway):
    never = asyncio.Event()
    scripts = {True: lambda call: Script([Delta(0, "x", 1), Hold(never)])}
    gateway.script = lambda call: scripts.get(call.sampling.seed == 1, lambda c: speak(c, "ok"))(
        call
    )
    for _ in range(20):
        with connected(server) as opened:
            opened.sendall(raw_post(stream=True, seed=1))
            read_until(opened, b'"x"')
        assert chat(server).json()["choices"][0]["message"]["content"] == "ok"
    server.eventually(lambda: len(gateway.recorded.cancelled) == 20)


def test_nothing_is_cancelled_when_the_client_closes_after_the_end(server, gateway):
    gateway.script = lambda call: speak(call, "ok")
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True))
        read_until(opened, b"[DONE]\n\n\r\n0\r\n\r\n")
    assert chat(server).status == 200
    assert gateway.recorded.cancelled == []


def test_a_silent_stream_gets_comments(serve_app):
    release = asyncio.Event()
    ending: list[Step] = [ChoiceEnded(0, "stop"), finished()]
    gateway = FakeGateway(lambda call: Script([Delta(0, "Hello", 1), Hold(release), *ending]))
    server = serve_app(gateway, None, Limits(ping_s=0.02))
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True))
        seen = read_until(opened, b": ping\n\n")
        assert seen.index(b"Hello") < seen.index(b": ping\n\n")
        read_until(opened, b": ping\n\n")
        server.loop.call_soon_threadsafe(release.set)
        assert read_until(opened, b"0\r\n\r\n").endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


def test_no_comment_is_sent_before_the_first_text(serve_app):
    release = asyncio.Event()
    steps: list[Step] = [Hold(release), finished(EndReason.EXPIRED)]
    gateway = FakeGateway(lambda call: Script(steps))
    server = serve_app(gateway, None, Limits(ping_s=0.01))
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True))
        server.eventually(lambda: gateway.recorded.calls)
        server.call(lambda: asyncio.sleep(0.05))
        server.loop.call_soon_threadsafe(release.set)
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 429 ")


def test_a_client_that_does_not_read_is_given_up(serve_app):
    text = "x" * 1_000_000
    gateway = FakeGateway(lambda call: Script([Delta(0, text, 1) for _ in range(64)]))
    server = serve_app(gateway, None, Limits(ping_s=0.05, send_s_max=0.2))
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True))
        server.eventually(lambda: gateway.recorded.cancelled)
        seen = read_all(opened)
    assert len(seen) < 64 * len(text)
    assert b"[DONE]" not in seen


def test_a_request_ends_though_the_gateway_does_not_end_it(serve_app, monkeypatch):
    monkeypatch.setattr("sluice.server.exchange._OVERDUE_S", 0)
    never = asyncio.Event()
    gateway = FakeGateway(lambda call: Script([Hold(never)]))
    server = serve_app(gateway, None, Limits(ping_s=0.02, request_s_max=0.05))
    answer = chat(server)
    assert (answer.status, answer.error["code"]) == (504, "engine_error")
    assert gateway.recorded.cancelled
