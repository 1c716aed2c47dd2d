"""What clients send and get is written nowhere: a marker goes through every route and every fault.

Logs are read at every level, the journal record by record, the metrics, and every error body.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.runtime.messages import Text
from sluice.server.limits import Limits
from sluice.telemetry.journal import Clocks, JournalLimits, JournalReader, JournalWriter
from sluice.testing.operations import FakeOperations
from sluice.testing.served import Served, served
from tests.cluster import overload_rig
from tests.cluster.overload_rig import OverloadRig
from tests.server.test_guarded_routes import HERE, WORK
from tests.server.wire_client import Answer, ask, connected, post, raw_post, read_until

MARK = "xyzzy-plugh"
KEY = f"key-{MARK}"
AUTH = {"authorization": f"Bearer {KEY}"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class Marked(overload_rig.Process):
    """A replica whose output holds the marker."""

    def tell(self, *messages: Any) -> None:
        super().tell(
            *(
                Text(one.request_id, replace(one.delta, text=MARK))
                if isinstance(one, Text)
                else one
                for one in messages
            )
        )


@dataclass
class Watched:
    """A server of which everything that it writes can be read."""

    server: Served
    rig: OverloadRig
    journal: Path

    def send(self, path: str, headers: Mapping[str, str] = AUTH, /, **fields: Any) -> Answer:
        return post(self.server, path, {"model": "tiny", **fields}, headers)

    def written(self) -> str:
        """The metrics and the journal as text."""
        found = ask(self.server, "GET", "/metrics").body.decode()
        self.rig.gateway._observer._journal.flush()  # type: ignore[union-attr]
        return found + "\n".join(repr(one.record) for one in JournalReader(self.journal).entries())


@pytest.fixture
def watched(tmp_path, monkeypatch, caplog) -> Iterator[Watched]:
    monkeypatch.setattr(overload_rig, "Process", Marked)
    caplog.set_level(1)
    for name in ("asyncio", "uvicorn", "uvicorn.error", "sluice"):
        caplog.set_level(1, name)
    clocks = Clocks(time.monotonic_ns, time.time_ns)
    journal = JournalWriter(tmp_path / "j", "gateway", clocks, JournalLimits(3600, 10**8))
    rig = OverloadRig(
        time.monotonic_ns, slots=1, step_s=lambda: 0.002, journal=journal,
        pool={"queue_places_max": 1},
    )  # fmt: skip
    section = ServerSection(
        listen="127.0.0.1:0",
        api_key_digests=(digest(KEY),),
        admin_key_digests=(digest("boss"),),
        body_bytes_max=100_000,
    )
    limits = Limits(body_bytes_max=100_000, body_s_max=0.2)
    with ExitStack() as stack:
        server = stack.enter_context(served(rig.gateway, section, limits, FakeOperations()))
        stack.callback(lambda: server.call(rig.gateway.close))
        server.call(rig.gateway.start)
        yield Watched(server, rig, tmp_path / "j")


def marked(path: str, **more: Any) -> dict[str, Any]:
    """A request whose every text is the marker."""
    texts: Mapping[str, Any] = {
        "messages": [{"role": "user", "content": MARK}],
        "prompt": MARK,
        "input": MARK,
    }
    work = {name: texts.get(name, value) for name, value in WORK[path].items()}
    return {"model": "tiny", **work, "user": MARK, **more}


def check(watched: Watched, caplog, capfd, errors: list[Answer]) -> None:
    """The marker is nowhere but in answers that were asked for."""
    written = watched.written()
    assert "RequestArrived" in written
    assert MARK not in written
    assert watched.server.url
    logged = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert MARK not in logged
    told = capfd.readouterr()
    assert MARK not in told.out + told.err
    for answer in errors:
        assert answer.status >= 400
        assert MARK not in answer.body.decode()
        assert MARK not in str(answer.headers)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_served_is_written_nowhere(watched: Watched, caplog, capfd, path, stream):
    answer = watched.send(path, **marked(path, stream=stream))
    assert answer.status == 200
    assert MARK in answer.body.decode()
    check(watched, caplog, capfd, [])


@pytest.mark.parametrize("path", HERE)
def test_what_is_wrong_is_told_without_its_text(watched: Watched, caplog, capfd, path):
    good = json.dumps(marked(path)).encode()
    errors = [
        watched.send(path, **marked(path, temperature=9)),
        watched.send(path, **marked(path, tools=MARK)),
        watched.send(path, **marked(path, stop=[MARK] * 100)),
        watched.send(path, **marked(path, response_format={"type": MARK})),
        watched.send(path, **marked(path, max_tokens=10**6, max_output_tokens=10**6)),
        watched.send(path, **marked(path), padding=MARK * 10_000),
        watched.send(path, **marked(path, stream=MARK)),
        watched.send(path, {"authorization": f"Bearer wrong-{MARK}"}, **marked(path)),
        watched.send(path, {"authorization": MARK}, **marked(path)),
        watched.send(path, {**AUTH, "content-type": "text/plain"}, **marked(path)),
        post(watched.server, path, good[:-2], AUTH),
        post(watched.server, path, good + b"}", AUTH),
        post(watched.server, path, good.replace(b"xyzzy", b"xyzzy-plugh\xff"), AUTH),
        ask(watched.server, "PUT", path, good, AUTH),
    ]
    errors = [one for one in errors if one.status != 200]
    assert len(errors) >= 10
    watched.send(path, **marked(path))
    check(watched, caplog, capfd, errors)


def test_bodies_of_the_wrong_shape_are_told_without_their_text(watched: Watched, caplog, capfd):
    contents = [
        [{"type": "text", "text": [MARK]}],
        {"text": MARK},
        [{"type": "image_url", "image_url": {"url": MARK}}],
        MARK * 1000,
    ]
    errors = [
        *(watched.send(CHAT, messages=[{"role": "user", "content": one}]) for one in contents),
        watched.send(CHAT, messages=MARK),
        watched.send(CHAT, messages=[MARK]),
        watched.send(CHAT, messages=[{"role": "tool", "content": MARK}]),
        watched.send(COMPLETIONS, prompt={"text": MARK}),
        watched.send(COMPLETIONS, prompt=[MARK, 1]),
        watched.send(COMPLETIONS, prompt=[[MARK]]),
        watched.send(COMPLETIONS, prompt="x", suffix=MARK),
        watched.send(RESPONSES, input=[{"role": "user", "content": 1, "text": MARK}]),
        watched.send(RESPONSES, input=1, instructions=[MARK]),
    ]
    watched.send(CHAT, **marked(CHAT))
    check(watched, caplog, capfd, errors)


@pytest.mark.parametrize("path", HERE)
def test_what_fails_in_the_engine_is_told_without_its_text(watched: Watched, caplog, capfd, path):
    watched.rig.failing.add("all")
    failed = watched.send(path, **marked(path))
    streamed = watched.send(path, **marked(path, stream=True))
    watched.rig.failing.clear()
    check(watched, caplog, capfd, [failed] + ([streamed] if streamed.status >= 400 else []))
    assert MARK not in streamed.body.decode()


def begin(watched: Watched, opened: Any, path: str = COMPLETIONS) -> bytes:
    fields = marked(path, stream=True, max_tokens=300)
    raw = raw_post(path, **fields)
    opened.sendall(raw.replace(b"\r\n", f"\r\nauthorization: Bearer {KEY}\r\n".encode(), 1))
    return read_until(opened, MARK.encode())


def test_a_lost_replica_a_client_that_leaves_and_a_full_queue_say_nothing(
    watched: Watched, caplog, capfd
):
    with connected(watched.server) as opened:
        assert begin(watched, opened).startswith(b"HTTP/1.1 200")
        with connected(watched.server) as second:
            raw = raw_post(COMPLETIONS, **marked(COMPLETIONS, stream=True))
            second.sendall(raw.replace(b"\r\n", f"\r\nauthorization: Bearer {KEY}\r\n".encode(), 1))
            watched.server.eventually(lambda: watched.rig.gateway.pools()[0].waiting > 0)
            full = watched.send(COMPLETIONS, **marked(COMPLETIONS))
            assert full.error["code"] == "queue_full"
    watched.server.eventually(lambda: watched.rig.gateway.pools()[0].places == 0)
    with connected(watched.server) as opened:
        begin(watched, opened)

        async def crash() -> None:
            watched.rig.process.crash("crashed")

        watched.server.call(crash)
        assert b"replica_lost" in read_until(opened, b"replica_lost")
    check(watched, caplog, capfd, [full])


def test_a_body_that_does_not_come_and_broken_http_say_nothing(watched: Watched, caplog, capfd):
    raw = raw_post(COMPLETIONS, **marked(COMPLETIONS))
    raw = raw.replace(b"\r\n", f"\r\nauthorization: Bearer {KEY}\r\n".encode(), 1)
    for sent in (raw[:-1], raw.replace(b"HTTP/1.1", MARK.encode()), MARK.encode() + b"\r\n\r\n"):
        with connected(watched.server) as opened:
            opened.sendall(sent)
            seen = read_until(opened, b"}}")
            assert seen.startswith(b"HTTP/1.1 4")
            assert MARK.encode() not in seen
    watched.send(CHAT, **marked(CHAT))
    check(watched, caplog, capfd, [])


def test_a_bug_is_logged_by_its_place_and_not_by_its_words(
    watched: Watched, caplog, capfd, monkeypatch
):
    def broken(*_: Any) -> None:
        raise RuntimeError(f"cannot read {MARK}")

    monkeypatch.setattr("sluice.cluster.served.ServedModel.named", broken)
    failed = watched.send(CHAT, **marked(CHAT))
    monkeypatch.undo()
    assert failed.status == 500
    assert any(record.levelno == logging.ERROR for record in caplog.records)
    assert MARK not in caplog.text
    assert MARK not in failed.body.decode()


def test_the_routes_of_the_operator_show_no_text_and_no_key(watched: Watched, caplog, capfd):
    watched.send(CHAT, **marked(CHAT))
    boss = {"authorization": "Bearer boss"}
    for path in ("/admin/replicas", "/admin/config"):
        answer = ask(watched.server, "GET", path, headers=boss)
        assert answer.status == 200
        assert MARK not in answer.body.decode()
    check(watched, caplog, capfd, [])
