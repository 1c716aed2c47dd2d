"""A process that exits, crashes, hangs or will not leave is noticed, told and gone."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from sluice.cluster.placement import replica
from sluice.cluster.placement.local import LocalPlacement, Machine
from sluice.cluster.placement.placed import Needs, Place
from sluice.cluster.placement.replica import Patience, PlacedReplica
from sluice.runtime.messages import Cancel, FromReplica, LoadFailed

# What each child does once it has its channel; it speaks through the real one.
CHILD = """
import os, signal, socket, sys, time
from sluice.cluster.channel import ReplicaChannel
from sluice.runtime.messages import *
channel = ReplicaChannel(socket.socket(fileno=int(sys.argv[1])))
"""


class Watcher:
    """Hears what a process says and when it is lost."""

    def __init__(self) -> None:
        self.messages: list[FromReplica] = []
        self.losses: list[str] = []
        self.silent = False
        self.works = True
        self.something = asyncio.Event()

    def received(self, replica_id: str, messages: Sequence[FromReplica]) -> None:
        if self.messages is None:
            raise RuntimeError("a bug in the gateway")
        self.messages += messages
        self.something.set()

    def lost(self, replica_id: str, error: str, *, silent: bool = False) -> None:
        self.losses.append(error)
        self.silent = silent
        self.something.set()

    def busy(self, replica_id: str) -> bool:
        return self.works

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                self.something.clear()
                await self.something.wait()


def place(command: Sequence[str]) -> Place:
    """A child of this machine with this command."""
    return partial(LocalPlacement(Machine.this()).place, command, Needs())


def run(
    body: str,
    work: Callable[[PlacedReplica, Watcher], Awaitable[None]],
    silence_s: float = 30.0,
    load_s: float = 30.0,
) -> None:
    async def main() -> None:
        watcher = Watcher()
        command = (sys.executable, "-c", CHILD + body)
        process = PlacedReplica("r", place(command), watcher, Patience(load_s, silence_s))
        process.start()
        try:
            await work(process, watcher)
        finally:
            await process.stop()
        assert process.pid is None or not psutil.pid_exists(process.pid)

    asyncio.run(main())


async def lost(process: PlacedReplica, watcher: Watcher) -> str:
    await watcher.until(lambda: watcher.losses)
    assert len(watcher.losses) == 1
    return watcher.losses[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(3)", "exited with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise RuntimeError('no')", "exited with status 1"),
    ],
)
def test_an_end_is_told_with_how_it_ended(body, words):
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        assert words in await lost(process, watcher)

    run(body, work)


def test_what_it_said_before_it_ended_is_heard():
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        await lost(process, watcher)
        assert watcher.messages == [LoadFailed("cut short")]

    run("channel.send([LoadFailed('cut short')])", work)


def test_one_that_is_silent_with_work_at_hand_is_killed():
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        told = await lost(process, watcher)
        assert "silent" in told
        assert "SIGKILL" in told
        assert watcher.silent

    run("channel.send([DrainDone()])\ntime.sleep(100)", work, silence_s=0.3)


def test_one_that_is_stopped_is_found_and_killed():
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.messages)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        assert "silent" in await lost(process, watcher)

    run("while True: channel.send([DrainDone()]); time.sleep(0.02)", work, silence_s=0.5)


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_one_that_is_stopped_with_much_unsent_is_killed(monkeypatch, asked_to_stop):
    monkeypatch.setattr(replica, "_EXIT_WAIT_S", 0.2)
    much = Cancel("x" * (8 << 20))  # more than the socket holds

    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.messages)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        process.send(much)
        async with asyncio.timeout(10):
            if asked_to_stop:
                await process.stop()
                assert watcher.losses == []
            else:
                assert "silent" in await lost(process, watcher)
        assert not psutil.pid_exists(process.pid)

    silence_s = 30.0 if asked_to_stop else 0.5
    run("while True: channel.send([DrainDone()]); time.sleep(0.02)", work, silence_s)


@pytest.mark.parametrize("works", [False, True])
def test_one_that_does_not_load_in_time_is_killed_and_told_as_a_model_that_cannot_be_loaded(works):
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        watcher.works = works
        told = await lost(process, watcher)
        assert "not loaded within 0.3 s" in told
        assert "SIGKILL" in told
        (failed,) = watcher.messages
        assert isinstance(failed, LoadFailed)
        assert "load_max" in failed.error

    run("time.sleep(100)", work, load_s=0.3)


def test_one_that_is_silent_without_work_is_left_alone():
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        watcher.works = False
        await watcher.until(lambda: watcher.messages)
        for _ in range(3):
            watcher.messages.clear()
            await asyncio.sleep(0.12)  # longer than the silence that would be a fault
            process.send(Cancel("are you there"))
            await watcher.until(lambda: watcher.messages)
        assert watcher.losses == []

    run(
        "channel.send([DrainDone()])\nwhile True:\n"
        "    if channel.receive(60): channel.send([DrainDone()])",
        work,
        silence_s=0.1,
    )


def test_silence_counts_from_the_work_and_not_from_the_idle_time_before_it():
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        watcher.works = False
        await watcher.until(lambda: watcher.messages)
        watcher.messages.clear()
        await asyncio.sleep(0.7)  # idle for most of the silence that would be a fault
        watcher.works = True
        process.send(Cancel("work"))
        await watcher.until(lambda: watcher.messages or watcher.losses)
        assert watcher.losses == []

    run(
        "channel.send([DrainDone()])\nchannel.receive(60)\ntime.sleep(0.6)\n"
        "channel.send([DrainDone()])\nchannel.receive(60)",
        work,
        silence_s=1.0,
    )


def test_one_that_talks_nonsense_is_killed(monkeypatch):
    monkeypatch.setattr(replica, "_EXIT_WAIT_S", 0.2)

    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        assert "undecodable" in await lost(process, watcher)

    run("channel._socket.send(b'\\0\\0\\0\\2xx')\ntime.sleep(100)", work)


def test_one_that_will_not_leave_is_killed(monkeypatch):
    monkeypatch.setattr(replica, "_EXIT_WAIT_S", 0.2)

    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.messages)
        await process.stop()
        assert watcher.losses == []

    run("channel.send([DrainDone()])\ntime.sleep(100)", work)


def test_one_that_closes_its_channel_and_stays_is_killed_and_told(monkeypatch):
    monkeypatch.setattr(replica, "_EXIT_WAIT_S", 0.2)

    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        assert "SIGKILL" in await lost(process, watcher)
        assert not watcher.silent

    run("channel._socket.close()\ntime.sleep(100)", work)


def test_it_can_be_started_again_and_messages_to_none_are_dropped():
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        await lost(process, watcher)
        first = process.pid
        process.send(Cancel("nobody"))
        process.start()
        await watcher.until(lambda: len(watcher.losses) == 2)
        assert process.pid != first

    run("sys.exit(0)", work)


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
def test_stopping_while_it_is_being_started_leaves_nothing(turns):
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await process.stop()
        assert watcher.losses == []

    run("while True: channel.receive(60)", work)


def test_a_command_that_cannot_be_run_is_a_loss(tmp_path: Path):
    async def main() -> None:
        watcher = Watcher()
        nowhere = place((str(tmp_path / "none"),))
        process = PlacedReplica("r", nowhere, watcher, Patience(30, 30))
        process.start()
        assert "could not be started" in await lost(process, watcher)
        await process.stop()

    asyncio.run(main())


def test_what_a_listener_cannot_take_ends_the_process_and_is_told():
    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        watcher.messages = None  # type: ignore[assignment]
        assert "could not be taken" in await lost(process, watcher)
        watcher.messages = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    run("channel.send([DrainDone()])\ntime.sleep(100)", work)


def test_one_that_is_warm_is_ready_again_when_it_is_started():
    ready = "channel.send([Ready(ReplicaLimits(1, 1, 1, 1), 7)])\nchannel.receive(60)"

    async def work(process: PlacedReplica, watcher: Watcher) -> None:
        watcher.works = False
        await watcher.until(lambda: watcher.messages)
        (told,) = watcher.messages
        pid = process.pid
        process.warm()
        process.start()
        await watcher.until(lambda: len(watcher.messages) == 2)
        assert watcher.messages == [told, told]
        assert (process.pid, watcher.losses) == (pid, [])

    run("from sluice.core.events import ReplicaLimits\n" + ready, work)
