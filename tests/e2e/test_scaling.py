"""Replicas that come and go under a running server: processes, signals, and what clients see."""

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.clients import Stream, Target, ask, complete, open_stream, post
from tests.e2e.processes import ServerProcess, Shell, eventually

ADMIN = {"authorization": "Bearer boss"}
WAKE_S_MAX = 3.0
STEADY = """
[server]
admin_key_env = "ADMIN"
allow_unauthenticated = true
[models.m]
source = "sim:llama-3.1-8b@l4"
sequences_max = 4
load_max = "3s"
replicas = {{ min = 1, max = 3, warm = 1 }}
[models.rest]
source = "sim:llama-3.1-8b@l4"
replicas = {{ min = 0, max = 1 }}
[autoscale]
leave_max = "{leave}"
"""


def serve(folder: Path, leave: str = "60s") -> ServerProcess:
    settings = folder / "sluice.toml"
    settings.write_text(STEADY.format(leave=leave), encoding="utf-8")
    environment = {**dict(psutil.Process().environ()), "ADMIN": "boss"}
    return ServerProcess(folder, ["-c", str(settings)], environment)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = serve(tmp_path_factory.mktemp("scaling"))
    try:
        yield running.wait_ready()
        if running.process.poll() is None:
            assert running.stop() == 0, running.output
    finally:
        running.destroy()


def states(server: ServerProcess, model: str = "m") -> list[str]:
    told = ask(server.target, "GET", "/admin/replicas", headers=ADMIN).json()["replicas"]
    return [one["state"] for one in told if one["model"] == model]


def scaling(server: ServerProcess, model: str = "m") -> Any:
    told = ask(server.target, "GET", "/admin/scaling", headers=ADMIN).json()["models"]
    return next(one for one in told if one["model"] == model)


def pin(server: ServerProcess, number: int | None) -> None:
    body = {"model": "m", "replicas": number}
    assert post(server.target, "/admin/scale", body, ADMIN).status == 200


def begun(target: Target, count: int, tokens: int) -> list[Stream]:
    """Streams that have begun, or wait to begin."""
    with ThreadPoolExecutor(count) as pool:
        made = [
            pool.submit(open_stream, target, "m", f"Number {n}", max_tokens=tokens, seed=n)
            for n in range(count)
        ]
        return [one.result() for one in made]


def check_whole(streams: list[Stream]) -> None:
    """Each ends with its reason and the terminator, and says nothing of an error."""
    for stream in streams:
        events = stream.rest()
        assert events[-1] == "[DONE]"
        assert not [one for one in events if isinstance(one, dict) and "error" in one]
        assert events[-2]["choices"][0]["finish_reason"] in {"stop", "length"}


def test_a_model_at_rest_is_told_and_started_by_the_first_request(server):
    ready = ask(server.target, "GET", "/ready")
    assert ready.status == 200
    (absent,) = ready.json()["absent"]
    assert (absent["model"], absent["requests"]) == ("rest", "held")
    answer = complete(server.target, "rest", "Hello", max_tokens=3)
    assert answer.status == 200
    stages = {
        stage: server.metric("cold_start_seconds_sum", f"model=rest,stage={stage}")
        for stage in ("place", "load", "compile", "first_token")
    }
    assert stages["place"] > 0.05, "a process had to start"
    assert 0 < sum(stages.values()) <= answer.seconds
    ttft_s = server.metric("ttft_seconds_sum", "model=rest,slo_class=default")
    assert ttft_s >= stages["place"] + stages["load"], "waiting for it is part of the first token"
    told = ask(server.target, "GET", "/admin/scaling", headers=ADMIN).json()
    assert told["last_start_s"]["rest-0"]["place"] == pytest.approx(stages["place"], abs=0.01)
    assert ask(server.target, "GET", "/ready").json() == {"ready": True, "reason": ""}


def test_a_burst_wakes_the_warm_replica_and_going_to_rest_loses_no_stream(server):
    eventually(lambda: states(server)[:2] == ["ready", "warm"])
    began_s = time.monotonic()
    streams = begun(server.target, 12, 100)
    assert time.monotonic() - began_s < 12.0
    waits = server.metrics()
    woken_s = waits["sluice_wake_seconds_sum", "model=m"]
    assert waits["sluice_wake_seconds_count", "model=m"] >= 1
    assert woken_s < WAKE_S_MAX
    assert "queue_wait" in server.output, "somebody waited for a second"
    assert scaling(server)["wanted"] >= 2
    pin(server, 1)
    assert "draining" in states(server)
    check_whole(streams)
    eventually(lambda: sorted(states(server)) == ["ready", "stopped", "warm"])
    pin(server, None)


def test_settings_are_read_again_while_replicas_start_and_leave(server):
    pin(server, 3)
    settings = server.folder / "sluice.toml"
    settings.write_text(STEADY.format(leave="30s"), encoding="utf-8")
    reloaded = post(server.target, "/admin/reload", {}, ADMIN)
    assert reloaded.json()["applied"] == ["autoscale.leave_max"]
    eventually(lambda: states(server) == ["ready"] * 3)
    streams = begun(server.target, 6, 40)
    pin(server, 1)
    settings.write_text(STEADY.format(leave="50s"), encoding="utf-8")
    server.send(signal.SIGHUP)
    check_whole(streams)
    eventually(lambda: sorted(states(server)) == ["ready", "stopped", "warm"])
    pin(server, None)


def test_a_replica_that_is_stuck_while_it_loads_is_ended_tried_again_and_seen(server):
    pin(server, 1)
    eventually(lambda: sorted(states(server)) == ["ready", "stopped", "warm"])
    before = set(server.replica_pids())
    pin(server, 3)
    stuck: list[int] = []

    def stop_one() -> bool:
        # Until its own program runs, a child is a copy of the server, and the server waits for it.
        started = set(server.replica_pids()) - before
        stuck.extend(pid for pid in started if "replica_id" in str(psutil.Process(pid).cmdline()))
        return bool(stuck)

    eventually(stop_one, every_s=0.001)
    psutil.Process(stuck[0]).send_signal(signal.SIGSTOP)
    eventually(lambda: "backoff" in states(server), timeout_s=10)
    told = ask(server.target, "GET", "/admin/replicas", headers=ADMIN).json()["replicas"]
    (late,) = [one for one in told if one["state"] == "backoff"]
    assert "not loaded within 3 s (load_max)" in late["error"]
    assert late["starts_in_s"] <= 0.5
    assert complete(server.target, "m", "Hello", max_tokens=2).status == 200
    eventually(lambda: states(server) == ["ready"] * 3)
    pin(server, 1)
    eventually(lambda: sorted(states(server)) == ["ready", "stopped", "warm"])


def test_the_operator_sets_a_number_within_bounds_only(server):
    for number, words in ((9, "1 to 3"), (0, "1 to 3")):
        body = {"model": "m", "replicas": number}
        answer = post(server.target, "/admin/scale", body, ADMIN)
        assert answer.status == 400
        assert words in answer.error["message"]
    answer = post(server.target, "/admin/scale", {"model": "none", "replicas": 1}, ADMIN)
    assert "m, rest" in answer.error["message"]
    changes = json.loads(ask(server.target, "GET", "/dashboard/data", headers=ADMIN).body)
    assert "scale" in [one["what"] for one in changes["changes"]]


def test_the_commands_of_the_page_look_and_decide(server, tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text("utf-8")
    (commands,) = re.findall(r"```sh\n(curl .*?)```", page, re.DOTALL)
    (tmp_path / "admin.key").write_text("boss")
    here = commands.replace("http://127.0.0.1:8000", server.url).replace('"chat"', '"m"')
    printed = Shell(tmp_path).run(here.replace("curl ", "curl -s "))
    before, after = (json.loads(one) for one in printed.replace("}{", "}\n{").splitlines())
    assert {one["model"] for one in before["models"]} == {"m", "rest"}
    assert {one["model"]: one["wanted"] for one in after["models"]}["m"] == 3
    pin(server, 1)


def test_a_gateway_that_is_killed_while_replicas_start_leaves_none_and_begins_anew(
    server, tmp_path
):
    """The last test of the module: the server is gone afterwards."""
    pin(server, 3)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2, "one serves, one is warm"
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    second = serve(tmp_path)
    try:
        second.wait_ready()
        eventually(lambda: sorted(states(second)) == ["ready", "stopped", "warm"])
        assert len(second.replica_pids()) == 2, "those of its own settings, once each"
        assert second.stop() == 0
    finally:
        second.destroy()
