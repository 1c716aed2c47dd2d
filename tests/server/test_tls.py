"""HTTPS with certificates made here: served, renewed while others are open, refused if wrong."""

import socket
import ssl
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from sluice.config.sections import ServerSection
from sluice.core.errors import ConfigError
from sluice.server import serve as serving
from sluice.server.limits import Limits
from sluice.server.tls import Identity
from sluice.server.transport import Transport
from sluice.testing.gateway import FakeGateway, speak
from sluice.testing.served import Served, served
from tests.e2e.processes import eventually
from tests.server.wire_client import connected, raw_post, read_all, read_until


@dataclass(frozen=True)
class Authority:
    """Who the clients of a test trust, and the files of a server."""

    made: trustme.CA
    cert_file: Path
    key_file: Path

    def issue(self, name: str = "localhost", kind: trustme.KeyType = trustme.KeyType.ECDSA) -> None:
        """Write a new certificate into the files."""
        issued = self.made.issue_cert(name, key_type=kind)
        self.key_file.write_bytes(issued.private_key_pem.bytes())
        self.cert_file.write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))

    @property
    def section(self) -> ServerSection:
        return ServerSection(
            listen="127.0.0.1:0", tls_cert_file=self.cert_file, tls_key_file=self.key_file
        )

    def trusting(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.made.configure_trust(context)
        return context


@pytest.fixture
def authority(tmp_path):
    made = Authority(trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem")
    made.issue()
    return made


def secured(server: Served, context: ssl.SSLContext, name: str | None = "localhost"):
    opened = socket.create_connection((server.host, server.port), timeout=20)
    return context.wrap_socket(opened, server_hostname=name)


def serial(opened: ssl.SSLSocket) -> str:
    seen = opened.getpeercert()
    assert seen is not None
    return str(seen["serialNumber"])


def test_a_client_that_trusts_the_authority_is_served(serve_app, authority):
    server = serve_app(FakeGateway(), authority.section)
    assert server.url == f"https://127.0.0.1:{server.port}"
    with secured(server, authority.trusting()) as opened:
        assert opened.version() in {"TLSv1.2", "TLSv1.3"}
        for _ in range(2):
            opened.sendall(raw_post())
            assert read_until(opened, b"}}").startswith(b"HTTP/1.1 200 ")
        opened.sendall(raw_post(stream=True))
        assert b"[DONE]" in read_until(opened, b"[DONE]")


def test_a_large_body_and_a_refused_one_come_through(serve_app, authority):
    section = replace(authority.section, body_bytes_max=300_000)
    server = serve_app(FakeGateway(), section)
    with secured(server, authority.trusting()) as opened:
        opened.sendall(raw_post(padding="x" * 250_000))
        assert read_until(opened, b"}}").startswith(b"HTTP/1.1 200 ")
        opened.sendall(raw_post(padding="x" * 350_000))
        assert read_until(opened, b"}}").startswith(b"HTTP/1.1 413 ")


def test_plain_http_is_not_answered_where_there_is_tls(serve_app, authority):
    server = serve_app(FakeGateway(), authority.section)
    with connected(server) as opened:
        opened.sendall(raw_post())
        assert b"HTTP" not in read_all(opened)
    with secured(server, authority.trusting()) as opened:
        opened.sendall(raw_post())
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_old_protocols_are_refused(serve_app, authority):
    server = serve_app(FakeGateway(), authority.section)
    context = authority.trusting()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        secured(server, context)


@pytest.mark.parametrize("kind", list(trustme.KeyType), ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["localhost", None], ids=["named", "not named"])
def test_a_renewed_certificate_is_shown_to_new_connections_only(authority, kind, name):
    shown = Identity(authority.cert_file, authority.key_file)
    context = authority.trusting()
    context.check_hostname = False

    def handshake() -> tuple[ssl.SSLObject, ssl.SSLObject]:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(to_client, to_server, server_hostname=name)
        server = shown.context.wrap_bio(to_server, to_client, server_side=True)
        done: set[ssl.SSLObject] = set()
        while len(done) < 2:
            for one in (client, server):
                try:
                    one.do_handshake()
                    done.add(one)
                except ssl.SSLWantReadError:
                    pass
        return client, server

    before, at_server = handshake()
    authority.issue(kind=kind)
    shown.renew(authority.cert_file, authority.key_file)
    after, _ = handshake()
    assert before.getpeercert() != after.getpeercert()
    at_server.write(b"still open")
    assert before.read(10) == b"still open"


@pytest.mark.parametrize("damage", ["no file", "empty", "other key", "encrypted key", "swapped"])
def test_files_that_cannot_be_used_are_told_and_change_nothing(authority, damage):
    transport = Transport.of(authority.section)
    assert transport.identity is not None
    before = transport.identity._current
    key = authority.key_file.read_bytes()
    match damage:
        case "no file":
            authority.cert_file.unlink()
        case "empty":
            authority.cert_file.write_bytes(b"")
        case "other key":
            authority.issue()
            authority.key_file.write_bytes(key)
        case "encrypted key":
            loaded = serialization.load_pem_private_key(key, None)
            locked = loaded.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
            authority.key_file.write_bytes(locked)
        case "swapped":
            authority.key_file.write_bytes(authority.cert_file.read_bytes())
            authority.cert_file.write_bytes(key)
    section = replace(authority.section, header_bytes_max=1)
    with pytest.raises(ConfigError, match=r"(cert|key)\.pem") as caught:
        transport.reconfigure(section)
    assert "PRIVATE" not in str(caught.value)
    assert transport.identity._current is before
    assert transport.header_bytes_max != 1
    with pytest.raises(ConfigError):
        Transport.of(authority.section)


def test_a_handshake_that_does_not_come_is_given_up(serve_app, authority, monkeypatch):
    monkeypatch.setattr(serving, "_HEAD_S_MAX", 0.05)
    server = serve_app(FakeGateway(), authority.section)
    with connected(server) as silent:
        assert read_all(silent) == b""


def test_connections_in_their_handshake_are_counted_and_closed_at_a_stop(authority, caplog):
    section = replace(authority.section, connections_max=3)
    with ExitStack() as stack:
        with served(FakeGateway(), section) as server:
            half = [stack.enter_context(connected(server)) for _ in range(3)]
            for one in half:
                one.sendall(b"\x16\x03\x01")
            with pytest.raises((ssl.SSLError, ConnectionError)):
                secured(server, authority.trusting())
            half[0].close()
            eventually(lambda: shaken(server, authority))
            began = time.monotonic()
        took_s = time.monotonic() - began
        assert read_all(half[1]) == b""
    assert took_s < 2
    assert not caplog.records


def shaken(server: Served, authority: Authority) -> bool:
    """Whether a connection comes about."""
    try:
        secured(server, authority.trusting()).close()
    except OSError:
        return False
    return True


def test_a_client_that_does_not_read_is_given_up_over_tls_too(serve_app, authority):
    gateway = FakeGateway(lambda call: speak(call, *["x" * 1_000_000] * 40))
    limits = Limits(ping_s=0.05, send_s_max=0.1)
    server = serve_app(gateway, authority.section, limits)
    with secured(server, authority.trusting()) as opened:
        opened.sendall(raw_post(stream=True))
        server.eventually(lambda: bool(gateway.recorded.cancelled))
        with suppress(ssl.SSLError, ConnectionError):
            while opened.recv(1_000_000):
                pass
    with secured(server, authority.trusting()) as opened:
        opened.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b'"ok"' in read_until(opened, b"}")


def test_stopping_does_not_wait_for_a_client_that_does_not_say_goodbye(authority, caplog):
    with ExitStack() as stack:
        with served(FakeGateway(), authority.section) as server:
            silent = stack.enter_context(secured(server, authority.trusting()))
            silent.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b'"ok"' in read_until(silent, b"}")
            began = time.monotonic()
        took_s = time.monotonic() - began
    assert took_s < serving._CLOSE_S_MAX
    assert not caplog.records
