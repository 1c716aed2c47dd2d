"""``sluice top`` shows what the dashboard is told, and says what is wrong where it cannot."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from sluice.cli.main import run
from sluice.cli.top_view import spark, view
from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from sluice.testing.served import served

SAMPLE = {
    "t_s": 1000.0, "interval_s": 2.0, "arrived": 20, "met": 18, "missed": 1, "refused": 1,
    "classes": {"chat": [18, 1, 1]}, "ttft": [0.1, 0.7, 0.9], "tpot": [0.01, 0.02, 0.03],
    "generated_tokens": 400, "waiting": 3, "decoding": 5, "kv_used": 97, "kv_max": 100,
    "refusals": {"predicted_late": 1}, "degradations": {"shorten": 2},
}  # fmt: skip
REPLICA = {
    "id": "m-0", "model": "m", "state": "ready", "error": "", "requests": 5, "places": 5,
    "seats": 8, "losses": 0, "breaker_open": False, "running": 5, "waiting": 0, "kv_used": 97,
    "kv_max": 100, "step_s": 0.012, "report_age_s": 0.1,
}  # fmt: skip
SLOW = {
    "id": "abc", "client_id": "", "model": "m", "slo_class": "chat", "e2e_s": 2.0, "ttft_s": 1.5,
    "tpot_s": 0.01, "prompt_tokens": 1000, "completion_tokens": 50, "reason": "stop",
    "phases": {"queue": 1.0, "decode": 1.0},
}  # fmt: skip
DOCUMENT = {
    "version": "9.9", "now_s": 1001.0, "interval_s": 2, "samples_max": 9, "models": ["m"],
    "model": "", "classes": [{"slo_class": "chat", "seconds": {"ttft": 0.5}, "objective": 0.95}],
    "samples": [SAMPLE], "replicas": [REPLICA, {**REPLICA, "id": "m-1", "breaker_open": True}],
    "slowest": {"e2e": [SLOW], "ttft": []}, "refused": [], "degraded": [], "changes": [],
}  # fmt: skip


def rendered(document=DOCUMENT, samples=(SAMPLE,), width=140) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(view(document, samples, width))
    return captured.get()


def test_one_screen_has_what_an_operator_looks_for():
    text = rendered()
    for words in (
        "9.0 req/s", "90.0 %", "700.0 ms", "97 %", "chat", "of 95 %", "18 met", "m-0",
        "breaker open", "predicted late 1", "shorten 2", "abc", "1,000 + 50", "2.00 s",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(("state", "colour"), [("warm", "36"), ("stopped", "2"), ("failed", "31")])
def test_only_replicas_in_trouble_are_red(state, colour):
    shown = {**DOCUMENT, "replicas": [{**REPLICA, "state": state}]}
    console = Console(width=140, force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as captured:
        console.print(view(shown, (SAMPLE,), 140))
    assert f"\x1b[{colour}m{state}" in captured.get()


def test_replicas_that_serve_are_counted_over_time():
    counted = {**SAMPLE, "replicas": {"ready": 3, "warm": 1}}
    (line,) = (
        line for line in rendered(samples=(counted,)).splitlines() if "replicas ready" in line
    )
    assert line.split()[-3:-1] == ["max", "3"]


def test_a_server_without_requests_is_shown_too():
    quiet = {**DOCUMENT, "samples": [], "slowest": {"e2e": [], "ttft": []}, "classes": []}
    text = rendered(quiet, ())
    assert "no request was refused" in text
    assert "no request has ended" in text
    assert "first token  tokens" not in text
    assert "–" in text


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0, 4, 8], 3, "▁▅█"),
        ([1], 4, "   █"),
        ([0, 0], 2, "▁▁"),
        ([None, 1], 2, " █"),
        ([1, 2, 3, 8], 2, "▃█"),
        ([], 2, "  "),
    ],
)
def test_bars_are_eighths_of_the_largest(values, width, bars):
    assert spark(values, width) == bars


@pytest.fixture
def server():
    operations = FakeOperations()
    operations.overview.shown = json.dumps(DOCUMENT).encode()
    section = ServerSection(listen="127.0.0.1:0", admin_key_digests=(digest("boss"),))
    with served(FakeGateway(), section, None, operations) as running:
        yield running


def test_it_is_printed_once_into_a_pipe_and_as_json(server, capsys, monkeypatch):
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "boss")
    assert run(["top", server.url]) == 0
    assert "breaker open" in capsys.readouterr().out
    assert run(["top", f"{server.url}/v1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "other", "--key", "boss"], "No model of that name"),
        (["--key", "wrong"], "SLUICE_ADMIN_KEY"),
        ([], "SLUICE_ADMIN_KEY"),
    ],
)
def test_what_the_server_refuses_is_told_with_what_to_do(server, capsys, arguments, words):
    assert run(["top", server.url, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://127.0.0.1", "127.0.0.1:9"])
def test_no_server_is_said_to_be_none(capsys, url):
    assert run(["top", url, "--once"]) == 2
    assert "server" in capsys.readouterr().err


BRACKETS = "[/] [bold]m[/red] [link=http://x]"


def test_brackets_in_names_and_errors_are_shown_as_they_are(serve_document, capsys):
    replica = {**REPLICA, "id": BRACKETS, "error": BRACKETS}
    slow = {**SLOW, "client_id": BRACKETS, "e2e_s": 0.0}
    shown = {**DOCUMENT, "replicas": [replica], "slowest": {"e2e": [slow], "ttft": []}}
    assert run(["top", serve_document(json.dumps(shown).encode()), "--once"]) == 0
    assert capsys.readouterr().out.count(BRACKETS) >= 2


@pytest.mark.parametrize(
    "answer", [b"[]", b"7", b"{}", b'{"samples": []}', b"<html>", b"\xff", b"[" * 100_000]
)
def test_an_answer_of_another_server_is_no_dashboard(serve_document, capsys, answer):
    assert run(["top", serve_document(answer), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert "no sluice server answers" in told["error"]


@pytest.fixture
def serve_document():
    """Start a server whose dashboard has this document."""
    with ExitStack() as stack:

        def start(document: bytes) -> str:
            operations = FakeOperations()
            operations.overview.shown = document
            section = ServerSection(listen="127.0.0.1:0")
            return stack.enter_context(served(FakeGateway(), section, None, operations)).url

        yield start


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://a b", "http://[::1", "http://"])
def test_what_is_no_address_is_told(capsys, url):
    assert run(["top", url, "--once"]) == 2
    assert "server" in capsys.readouterr().err


def test_a_server_that_speaks_something_else_is_told(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            client, _ = listener.accept()
            client.sendall(b"SSH-2.0-x\r\n")
            client.close()

        greeting = threading.Thread(target=greet)
        greeting.start()
        assert run(["top", f"http://127.0.0.1:{listener.getsockname()[1]}", "--once"]) == 2
        greeting.join()
    assert "no sluice server answers" in capsys.readouterr().err


class Redirecting(BaseHTTPRequestHandler):
    """Points to ``elsewhere``, which notes what it is sent."""

    elsewhere = ""
    seen: list[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers["authorization"])
        self.send_response(302 if self.elsewhere else 404)
        self.send_header("location", self.elsewhere)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def redirecting(elsewhere: str) -> Iterator[tuple[str, list[str | None]]]:
    """A server that points elsewhere, and the keys that it saw."""
    seen: list[str | None] = []
    answers = type("Answers", (Redirecting,), {"elsewhere": elsewhere, "seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


def test_the_admin_key_is_for_the_server_alone(capsys):
    with redirecting("") as (other, stolen), redirecting(f"{other}/x") as (url, seen):
        assert run(["top", url, "--key", "boss", "--once"]) == 2
    assert (seen, stolen) == (["Bearer boss"], [None])
