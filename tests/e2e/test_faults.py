"""Replicas that die, a journal that cannot be written: what clients see, and serving goes on."""

import os
import shutil
import signal

import psutil
import pytest

from tests.e2e.clients import Answer, Stream, ask, at_once, complete, open_stream, stream_text
from tests.e2e.processes import ServerProcess, eventually

pytestmark = pytest.mark.model

STATE = "model=tiny,replica=tiny-0,state="


def is_ready(server: ServerProcess) -> bool:
    return server.metric("replica_state", f"{STATE}ready") == 1


@pytest.fixture(scope="module")
def tiny(smollm2_folder, tmp_path_factory):
    running = ServerProcess(
        tmp_path_factory.mktemp("faults"),
        [
            "--set", f"models.tiny.source={smollm2_folder}",
            "--set", "models.tiny.sequences_max=2",
            "--set", "models.tiny.kv_bytes=64MiB",
        ],
    )  # fmt: skip
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


def test_a_killed_replica_costs_its_begun_streams_and_nothing_else(tiny: ServerProcess):
    gateway = tiny.process.pid
    replica = tiny.replica_of("tiny")
    before = tiny.metrics()
    options = {"max_tokens": 1000, "ignore_eos": True}
    begun = [open_stream(tiny.target, "tiny", f"Tale {n}:", **options) for n in range(2)]
    for stream in begun:
        assert stream.event()["choices"]

    def kill() -> Answer:
        eventually(lambda: tiny.metric("requests_waiting", "model=tiny") == 3)
        os.kill(replica, signal.SIGKILL)
        answer = complete(tiny.target, "tiny", "meanwhile", max_tokens=3)
        assert tiny.process.poll() is None
        return answer

    def wait() -> Answer:
        return complete(tiny.target, "tiny", "waits", max_tokens=3)

    def wait_streaming() -> Answer:
        stream = open_stream(tiny.target, "tiny", "waits", max_tokens=3)
        events = stream.rest()
        assert events[-1] == "[DONE]"
        return Answer(stream.status, {}, b"", 0)

    *waited, meanwhile = at_once([wait, wait, wait_streaming, kill])
    for answer in waited:
        assert answer.status == 200
    # It may have come before the loss was noticed, and is then served by the next incarnation.
    assert meanwhile.status in {200, 503}
    if meanwhile.status == 503:
        assert int(meanwhile.headers["retry-after"]) >= 1
    for stream in begun:
        check_broken(stream)
    eventually(lambda: is_ready(tiny), 60)
    assert complete(tiny.target, "tiny", "next", max_tokens=3).status == 200
    assert tiny.process.pid == gateway
    assert tiny.replica_of("tiny") != replica
    after = tiny.metrics()
    key = "sluice_replica_losses_total", "model=tiny,replica=tiny-0"
    assert after[key] == before.get(key, 0) + 1
    assert after["sluice_requests_in_flight", "model=tiny"] == 0


def test_a_replica_that_hangs_is_found_and_replaced(start):
    server = start("models.tiny.silence_max=2s").wait_ready()
    stream = open_stream(server.target, "tiny", "A tale:", max_tokens=1500, ignore_eos=True)
    assert stream.event()["choices"]
    hung = server.replica_of("tiny")
    os.kill(hung, signal.SIGSTOP)
    check_broken(stream)
    eventually(lambda: is_ready(server), 60)
    assert not psutil.pid_exists(hung)
    assert complete(server.target, "tiny", "next", max_tokens=3).status == 200
    assert server.stop() == 0


@pytest.mark.parametrize("moment", ["loads", "serves"])
def test_replicas_leave_by_themselves_when_their_gateway_is_killed(start, moment):
    server = start()
    stream = None
    if moment == "loads":
        eventually(server.replica_pids, 60)
    else:
        server.wait_ready()
        stream = open_stream(server.target, "tiny", "A tale:", max_tokens=1500, ignore_eos=True)
        assert stream.event()["choices"]
    replicas = server.replica_pids()
    assert replicas
    server.process.kill()
    server.process.wait(20)
    if stream is not None:
        stream.leave()
    # One that loads finds out when it wants to say that it is ready.
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in replicas), 60, every_s=0.1)
    assert "Traceback" not in server.output


def check_broken(stream: Stream) -> None:
    """Text, then one error event, then the end, without a terminator."""
    events = stream.rest()
    assert "[DONE]" not in events
    assert [("error" in event) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["error"]["code"] == "replica_lost"
    assert "replica was lost" in events[-1]["error"]["message"]


def test_a_stopped_gateway_journal_does_not_disturb_serving(tiny: ServerProcess):
    eventually(lambda: is_ready(tiny), 60)
    undisturbed = complete(tiny.target, "tiny", "Tale:", max_tokens=30).text
    shutil.rmtree(tiny.journal)
    tiny.journal.write_text("in the way")

    def dropped() -> float:
        return tiny.metrics()["sluice_journal_dropped_total", ""]

    before = dropped()
    stream = open_stream(tiny.target, "tiny", "Tale:", max_tokens=30)
    assert stream_text(stream.rest()) == undisturbed
    eventually(lambda: dropped() > before)
    assert complete(tiny.target, "tiny", "Tale:", max_tokens=30).text == undisturbed
    tiny.journal.unlink()

    def written() -> bool:
        complete(tiny.target, "tiny", "again", max_tokens=2)
        return tiny.journal.is_dir() and any(tiny.journal.iterdir())

    eventually(written, 30, every_s=0.2)
    assert ask(tiny.target, "GET", "/health").status == 200


def test_a_full_disk_under_the_journal_does_not_disturb_serving(tiny: ServerProcess):
    """The limit of file sizes stands for a disk that fills up: writes fail half-way."""
    eventually(lambda: is_ready(tiny), 60)
    undisturbed = complete(tiny.target, "tiny", "Tale:", max_tokens=20).text
    pids = [tiny.process.pid, tiny.replica_of("tiny")]
    before = tiny.metrics()["sluice_journal_dropped_total", ""]
    for pid in pids:
        set_file_limit(pid, 64)  # less than one frame
    try:

        def is_dropping() -> bool:
            assert complete(tiny.target, "tiny", "Tale:", max_tokens=20).text == undisturbed
            return tiny.metrics()["sluice_journal_dropped_total", ""] > before

        eventually(is_dropping, every_s=0.2)
    finally:
        for pid in pids:
            set_file_limit(pid, None)
    assert complete(tiny.target, "tiny", "Tale:", max_tokens=20).text == undisturbed
    assert (tiny.process.pid, tiny.replica_of("tiny")) == tuple(pids)


def set_file_limit(pid: int, size: int | None) -> None:
    import resource  # noqa: PLC0415

    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))
