"""Starting what cannot be started, and every way to stop."""

import os
import re
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.e2e.clients import ask, at_once, complete, open_stream
from tests.e2e.processes import eventually

pytestmark = pytest.mark.model

LONG = {"max_tokens": 1500, "ignore_eos": True}


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_running_requests_finish_within_the_grace_period(start):
    server = start("server.grace=60s").wait_ready()
    replicas = server.replica_pids()
    options = {"max_tokens": 100, "ignore_eos": True}
    stream = open_stream(server.target, "tiny", "A tale:", **options)
    assert stream.event()

    def whole() -> int:
        return complete(server.target, "tiny", "Other", **options).status

    def stop() -> int:
        eventually(lambda: server.metric("requests_in_flight", "model=tiny") == 2)
        server.send(signal.SIGINT)
        eventually(lambda: ask(server.target, "GET", "/ready").status == 503)
        assert ask(server.target, "GET", "/health").status == 200
        refused = complete(server.target, "tiny", "Late", max_tokens=2)
        assert refused.error["code"] == "draining"
        return refused.status

    assert at_once([whole, stop]) == [200, 503]
    events = stream.rest()
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(30) == 0
    assert gone(replicas)


def test_d18_what_outlasts_the_grace_period_ends_with_one_error_event(start):
    server = start("server.grace=500ms", "models.tiny.sequences_max=1").wait_ready()
    stream = open_stream(server.target, "tiny", "A tale:", **LONG)
    assert stream.event()

    def waiting() -> tuple[int, str]:
        answer = complete(server.target, "tiny", "Other", **LONG)
        return answer.status, answer.error["code"]

    def stop() -> tuple[int, str]:
        eventually(lambda: server.metric("requests_waiting", "model=tiny") == 1)
        return server.stop(signal.SIGTERM, 20), ""

    assert at_once([waiting, stop]) == [(503, "shutting_down"), (0, "")]
    events = stream.rest()
    assert "[DONE]" not in events
    assert [event for event in events if "error" in event] == [events[-1]]
    assert events[-1]["error"]["code"] == "shutting_down"


def test_a_second_signal_ends_running_requests_with_an_error_each(start):
    server = start("server.grace=60s").wait_ready()
    replicas = server.replica_pids()
    stream = open_stream(server.target, "tiny", "A tale:", **LONG)
    assert stream.event()
    server.send()
    eventually(lambda: "press Ctrl-C again" in server.output)
    assert server.stop(timeout_s=10) == 0
    events = stream.rest()
    assert "[DONE]" not in events
    assert events[-1]["error"]["code"] == "shutting_down"
    assert gone(replicas)


def test_stopping_while_the_model_loads_leaves_nothing(start):
    server = start()
    eventually(lambda: "loading tiny" in server.output, 60)
    eventually(server.replica_pids)
    replicas = server.replica_pids()
    assert server.stop(timeout_s=30) == 0, server.output
    assert gone(replicas)


def test_health_answers_while_the_model_loads(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start(listen=f"127.0.0.1:{port}")
    server.url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return ask(server.target, "GET", "/health").status == 200
        except ConnectionError:
            return False

    eventually(answers, 60)
    ready = ask(server.target, "GET", "/ready")
    refused = complete(server.target, "tiny", "x")
    # A fast machine may have loaded in between.
    assert ready.status == 200 or (ready.status, refused.status) in {(503, 503), (503, 200)}
    if refused.status == 503:
        assert int(refused.headers["retry-after"]) >= 1
    server.wait_ready()


# ------------------------------------------------------------------- what cannot be started


def test_a_port_in_use_is_told_before_anything_is_loaded(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = start(listen=address)
        assert server.process.wait(30) == 2
    assert f"cannot listen on {address}" in server.output
    assert "loading" not in server.output
    assert "Traceback" not in server.output


def damaged(folder: Path, into: Path, name: str, content: bytes) -> Path:
    shutil.copytree(folder, into, copy_function=os.link)
    (into / name).unlink()
    (into / name).write_bytes(content)
    return into


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("openvino_model.bin", b"cut short", "openvino_model"),
        ("openvino_model.xml", b"<net", "openvino_model"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("sluice.json", b"{", "sluice.json"),
    ],
)
def test_a_damaged_model_is_told_by_its_file(start, smollm2_folder, tmp_path, name, content, words):
    server = start(source=damaged(smollm2_folder, tmp_path / "model", name, content))
    assert server.process.wait(60) == 2
    assert words in server.output
    assert "Traceback" not in server.output


def test_a_file_that_is_no_model_is_told(start, tmp_path):
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(100))
    server = start(source=garbage)
    assert server.process.wait(60) == 2
    assert "garbage.gguf" in server.output
    assert "Traceback" not in server.output


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(start):
    server = start("models.tiny.kv_bytes=4TiB")
    assert server.process.wait(60) == 2
    assert re.search(r"it needs 409\d\.\d+ GiB of memory", server.output)
    assert "are free" in server.output
    assert "kv_bytes" in server.output
    assert "Traceback" not in server.output


def test_offline_without_the_model_is_told_at_once(start, tmp_path):
    server = start(
        "models.tiny.source=smollm2-135m-instruct",
        "catalogue.offline=true",
        f"catalogue.cache_dir={tmp_path / 'empty'}",
    )
    assert server.process.wait(30) == 2
    assert "smollm2-135m-instruct" in server.output
    assert "offline" in server.output
    assert "Traceback" not in server.output
