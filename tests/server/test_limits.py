"""Bounds of the transport: body, head, slow senders, broken HTTP, the listening socket."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack

import pytest

from sluice.config.sections import ServerSection
from sluice.core.errors import ConfigError
from sluice.runtime.generation import Delta
from sluice.server import serve as serving
from sluice.server.limits import Limits
from sluice.server.serve import address_of, bind
from sluice.testing.gateway import FakeGateway, Hold, Script, finished, speak
from sluice.testing.served import served
from tests.server.wire_client import (
    CHAT,
    ask,
    chat,
    connected,
    post,
    raw_post,
    read_all,
    read_until,
)

SECTION = ServerSection(listen="127.0.0.1:0", body_bytes_max=20_000, header_bytes_max=4096)
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def server(serve_module):
    return serve_module(FakeGateway(lambda call: speak(call, "ok")), SECTION)


def test_an_announced_body_over_the_limit_is_refused_before_it_is_sent(server):
    with connected(server) as opened:
        head = raw_post().split(b"content-length")[0]
        opened.sendall(head + b"content-length: 20001\r\n\r\n")
        seen = read_until(opened, b"}}")
    assert seen.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in seen
    assert b"20000" in seen


def test_a_chunked_body_over_the_limit_is_refused(server):
    with connected(server) as opened:
        opened.sendall(CHUNKED)
        for _ in range(5):
            opened.sendall(b"1388\r\n" + b" " * 5000 + b"\r\n")
        seen = read_until(opened, b"}}")
    assert seen.startswith(b"HTTP/1.1 413 ")


def test_a_body_at_the_limit_is_accepted_in_any_framing(server):
    body = raw_post().split(b"\r\n\r\n", 1)[1]
    body += b" " * (20_000 - len(body))
    assert post(server, CHAT, body).status == 200
    with connected(server) as opened:
        opened.sendall(CHUNKED)
        for at in range(0, 20_000, 4000):
            opened.sendall(b"fa0\r\n" + body[at : at + 4000] + b"\r\n")
        opened.sendall(b"0\r\n\r\n")
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_the_connection_serves_on_after_a_refused_body(server):
    with connected(server) as opened:
        opened.sendall(raw_post(padding="x" * 30_000))
        assert b" 413 " in read_until(opened, b"}}")
        opened.sendall(raw_post())
        assert b" 200 " in read_until(opened, b"}}")


def test_a_body_that_does_not_come_is_refused(serve_app):
    server = serve_app(FakeGateway(), None, Limits(body_s_max=0.05))
    with connected(server) as opened:
        opened.sendall(raw_post()[:-1])
        seen = read_until(opened, b"}}")
    assert seen.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_too_slow"' in seen


@pytest.mark.parametrize("timer", ["head", "rest of a refused body"])
def test_slow_senders_lose_their_connection(serve_app, monkeypatch, timer):
    monkeypatch.setattr(serving, "_HEAD_S_MAX", 0.05)
    server = serve_app(FakeGateway(), SECTION)
    with connected(server) as opened:
        if timer == "head":
            opened.sendall(b"GET /health HTTP/1.1\r\nhost:")
            assert read_all(opened) == b""
        else:
            opened.sendall(raw_post(padding="x" * 30_000)[:-1])
            assert b" 413 " in read_all(opened)


def test_a_connection_that_sends_nothing_is_closed(serve_app, monkeypatch):
    monkeypatch.setattr(serving, "_HEAD_S_MAX", 0.05)
    server = serve_app(FakeGateway())
    with connected(server) as opened:
        assert read_all(opened) == b""


@pytest.mark.parametrize("complete", [False, True])
def test_a_head_over_the_limit_is_refused(server, complete):
    with connected(server) as opened:
        head = b"GET /health HTTP/1.1\r\nhost: x\r\nx-padding: " + b"x" * 5000
        opened.sendall(head + (b"\r\n\r\n" if complete else b""))
        seen = read_all(opened)
    assert seen.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in seen


@pytest.mark.parametrize(("count", "status"), [(256, b"200"), (257, b"431")])
def test_headers_are_counted(server, count, status):
    lines = b"".join(b"a%d:\r\n" % number for number in range(count))
    with connected(server) as opened:
        opened.sendall(b"GET /health HTTP/1.1\r\n" + lines + b"\r\n")
        seen = read_until(opened, b"}")
    assert seen.startswith(b"HTTP/1.1 " + status)


def test_a_head_under_the_limit_is_accepted_with_a_large_body_behind_it(server):
    with connected(server) as opened:
        opened.sendall(raw_post(padding="x" * 15_000))
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_usual_shape(server, sent):
    with connected(server) as opened:
        opened.sendall(sent)
        seen = read_all(opened)
    head, _, body = seen.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["param"] == "request"
    assert chat(server).status == 200


def test_expect_100_continue_is_answered(server):
    head, body = raw_post().split(b"\r\n\r\n", 1)
    with connected(server) as opened:
        opened.sendall(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert read_until(opened, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        opened.sendall(body)
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(server):
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True) + b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        seen = read_all(opened)
    assert seen.count(b"HTTP/1.1 200 OK") == 2
    assert seen.index(b"[DONE]") < seen.index(b'{"status":"ok"}')


def test_small_writes_are_sent_at_once(server, monkeypatch):
    seen: list[int] = []
    made = serving.Protocol.connection_made

    def note(self, transport):
        made(self, transport)
        opened = transport.get_extra_info("socket")
        seen.append(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(serving.Protocol, "connection_made", note)
    assert ask(server, "GET", "/health").status == 200
    assert seen
    assert all(seen)


def test_too_many_connections_are_told_so(serve_app):
    server = serve_app(FakeGateway(), ServerSection(listen="127.0.0.1:0", connections_max=2))
    with connected(server) as first, connected(server) as second:
        for opened in (first, second):
            opened.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in read_until(opened, b"}")
        with connected(server) as third:
            seen = read_all(third)
    assert seen.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in seen


# -------------------------------------------------------------------------- the listening socket


def test_a_port_in_use_is_a_settings_problem():
    taken = bind(ServerSection(listen="127.0.0.1:0"))
    try:
        address = address_of(taken).removeprefix("http://")
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            bind(ServerSection(listen=address))
    finally:
        taken.close()


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "127.0.0.1:x", "203.0.113.7:0", "nowhere"])
def test_an_address_that_cannot_be_bound_is_a_settings_problem(listen):
    with pytest.raises(ConfigError, match=r"server\.listen"):
        bind(ServerSection(listen=listen))


def test_addresses_are_told_as_urls():
    listener = bind(ServerSection(listen="127.0.0.1:0"))
    with listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_nothing_is_written_into_an_answer_that_has_begun(serve_app):
    never = asyncio.Event()
    gateway = FakeGateway(lambda call: Script([Delta(0, "Hello", 1), Hold(never)]))
    server = serve_app(gateway)
    with connected(server) as opened:
        opened.sendall(raw_post(stream=True))
        read_until(opened, b"Hello")
        opened.sendall(b"this is no HTTP\r\n\r\n")
        assert b"HTTP/1.1 400" not in read_all(opened)
    server.eventually(lambda: gateway.recorded.cancelled)


def test_a_broken_chunk_ends_its_request(serve_app):
    gateway = FakeGateway()
    server = serve_app(gateway)
    with connected(server) as opened:
        opened.sendall(CHUNKED + b"zz\r\n")
        assert read_all(opened).startswith(b"HTTP/1.1 400 ")
    assert chat(server).status == 200
    assert len(gateway.recorded.calls) == 1


def test_a_later_head_has_no_more_time_than_the_first(serve_app, monkeypatch):
    monkeypatch.setattr(serving, "_HEAD_S_MAX", 0.05)
    server = serve_app(FakeGateway())
    with connected(server) as opened:
        opened.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(opened, b"}")
        opened.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert read_all(opened) == b""


def test_an_idle_connection_is_closed(serve_app, monkeypatch):
    monkeypatch.setattr(serving, "_IDLE_S_MAX", 0.05)
    server = serve_app(FakeGateway())
    with connected(server) as opened:
        opened.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_all(opened).endswith(b'{"status":"ok"}')


def test_the_end_of_an_answer_is_not_kept_for_ever(serve_app, monkeypatch):
    monkeypatch.setattr(serving, "_IDLE_S_MAX", 0.05)
    closed: list[bool] = []
    give_up = serving.Protocol._give_up

    def noted(self):
        give_up(self)
        closed.append(self.transport.is_closing())

    monkeypatch.setattr(serving.Protocol, "_give_up", noted)
    text = "x" * 30_000_000
    server = serve_app(FakeGateway(lambda call: speak(call, text)))
    with connected(server) as opened:
        opened.sendall(raw_post())
        server.eventually(lambda: closed)
        assert len(read_all(opened)) < len(text)


# ------------------------------------------------------------------- trailers, upgrades, stopping


def chunked_post() -> bytes:
    """A chunked request up to its last chunk; trailers and an empty line are left to be sent."""
    body = raw_post().split(b"\r\n\r\n", 1)[1]
    return CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(body), body)


def test_trailers_are_dropped(server):
    with connected(server) as opened:
        opened.sendall(chunked_post() + b"x-request-id: trailer\r\nx-checksum: 1\r\n\r\n")
        seen = read_until(opened, b"}}")
        assert seen.startswith(b"HTTP/1.1 200 ")
        assert b"x-request-id: trailer" not in seen
        opened.sendall(raw_post())
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("line", [b"x-trailer: %s\r\n" % (b"x" * 100), b"x" * 100])
def test_trailers_over_the_limit_of_a_head_are_refused(server, monkeypatch, line):
    parts: list[bytes] = []
    on_body = serving.Protocol.on_body

    def note(self, body):
        on_body(self, body)
        parts.append(body)

    monkeypatch.setattr(serving.Protocol, "on_body", note)
    with connected(server) as opened:
        opened.sendall(chunked_post() + (b"" if line.endswith(b"\n") else b"x-long: "))
        server.eventually(lambda: parts)
        opened.sendall(line * 50)
        seen = read_until(opened, b"}}")
    assert seen.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in seen


def test_an_offer_to_upgrade_is_ignored_and_the_body_is_kept(server):
    head, body = raw_post().split(b"\r\n\r\n", 1)
    head += (
        b"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEA\r\n\r\n"
    )
    with connected(server) as opened:
        opened.sendall(head)
        opened.sendall(body + head + body)
        seen = read_until(opened, b"}}")
        seen += read_until(opened, b"}}") if seen.count(b"200 OK") < 2 else b""
        assert seen.count(b"HTTP/1.1 200 OK") == 2
        opened.sendall(raw_post())
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_tunnel_is_refused(server):
    with connected(server) as opened:
        opened.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n")
        assert read_all(opened).startswith(b"HTTP/1.1 400 ")


def test_stopping_ends_bodies_and_idle_connections_at_once(caplog):
    with ExitStack() as opened:
        with served(FakeGateway()) as server:
            idle, sending, silent = (opened.enter_context(connected(server)) for _ in range(3))
            idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            read_until(idle, b"}")
            sending.sendall(raw_post()[:-1])
            chat(server)
            began = time.monotonic()
        took_s = time.monotonic() - began
        assert b'"code":"draining"' in read_all(sending)
        assert read_all(idle) == read_all(silent) == b""
    assert took_s < serving._CLOSE_S_MAX / 2
    assert not caplog.records


def test_what_is_no_http_is_not_logged(server, caplog):
    with connected(server) as opened:
        opened.sendall(b"GET\r\n\r\n")
        read_all(opened)
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_cuts_off_clients_that_do_not_read(monkeypatch, caplog, stream):
    monkeypatch.setattr(serving, "_CLOSE_S_MAX", 1)
    gateway = FakeGateway(lambda call: speak(call, "x" * 30_000_000))
    with ExitStack() as opened:
        with served(gateway) as server:
            silent = opened.enter_context(connected(server))
            silent.sendall(raw_post(stream=stream))
            assert silent.recv(1) == b"H"
            began = time.monotonic()
        took_s = time.monotonic() - began
    assert took_s < 0.95
    assert not caplog.records


def test_a_drain_refuses_bodies_that_are_still_coming_and_nothing_else(serve_app):
    go_on = asyncio.Event()
    gateway = FakeGateway(lambda call: Script([Delta(0, "Hello", 1), Hold(go_on), finished()]))
    server = serve_app(gateway)
    with connected(server) as running, connected(server) as sending, connected(server) as idle:
        running.sendall(raw_post(stream=True))
        read_until(running, b"Hello")
        sending.sendall(raw_post()[:-1])
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(idle, b"}")

        async def drain() -> None:
            server.transport.drain()

        async def let_go() -> None:
            go_on.set()

        server.call(drain)
        seen = read_all(sending)
        assert seen.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"draining"' in seen
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in read_until(idle, b"}")
        server.call(let_go)
        assert b"[DONE]" in read_until(running, b"[DONE]")
