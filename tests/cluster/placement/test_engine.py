"""Engines that are started: when, when again, and that they end with who started them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.cluster.placement.engine import StartedEngine
from sluice.cluster.placement.local import LocalPlacement, Machine
from sluice.cluster.placement.placed import Needs, NotPlaced
from sluice.config.sections import ModelSection, UpstreamUrl
from sluice.config.settings import Settings, conflicts
from sluice.executors.stream import EngineFacts, Health, Probe, UpstreamError
from sluice.testing.processes import VirtualTimeLoop

S = 1_000_000_000


class Placed:
    address = ("gpu-1", 8000)

    def __init__(self) -> None:
        self.how: str | None = None
        self.left = 0

    def ending(self) -> str | None:
        return self.how

    async def leave(self, wait_s: float) -> str:
        self.left += 1
        return self.how or "ended"

    async def dismiss(self, wait_s: float) -> None:
        await self.leave(wait_s)


class Client:
    """What listens at the address."""

    def __init__(self) -> None:
        self.health = Health.LOADING
        self.closed = False

    async def probe(self) -> Probe:
        return Probe(0, self.health)

    async def facts(self) -> EngineFacts:
        return EngineFacts(("m",))

    async def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.starts: list[float] = []
        self.refused: NotPlaced | None = None
        self.placed, self.client = Placed(), Client()
        self.engine = StartedEngine("m-0", self.place, self.reach, loop.now_ns, load_s_max=100)

    async def place(self) -> Any:
        self.starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.5)
        if self.refused is not None:
            raise self.refused
        self.placed = Placed()
        return self.placed

    def reach(self, address: tuple[str, int]) -> Any:
        assert address == Placed.address
        self.client = Client()
        return self.client

    async def looks(self, seconds: float) -> Probe:
        """Look once a second for so long, as a remote replica does."""
        probe = await self.engine.probe()
        for _ in range(round(seconds)):
            await asyncio.sleep(1)
            probe = await self.engine.probe()
        return probe


def virtually(work: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        rig = Rig()
        await work(rig)
        await rig.engine.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_it_is_started_when_it_is_looked_at_and_serves_when_it_says_so():
    async def work(rig: Rig) -> None:
        assert (await rig.engine.probe()).fault == "it is being started"
        with pytest.raises(UpstreamError, match="being started"):
            await rig.engine.open(None)  # type: ignore[arg-type]
        assert (await rig.looks(2)).health is Health.LOADING
        rig.client.health = Health.READY
        assert (await rig.looks(200)).health is Health.READY
        assert (await rig.engine.facts()).models == ("m",)
        assert len(rig.starts) == 1

    virtually(work)


def test_one_that_ends_again_and_again_is_started_ever_more_rarely_and_says_why():
    async def work(rig: Rig) -> None:
        probe = await rig.engine.probe()
        for _ in range(600):
            probe = await rig.looks(1)
            rig.placed.how = "the process exited with status 1"
        waits = [round(later - one) for one, later in zip(rig.starts, rig.starts[1:], strict=False)]
        assert waits == sorted(waits)
        assert waits[-1] >= 60
        assert len(rig.starts) < 20
        assert "exited with status 1" in probe.fault
        assert "started again in" in probe.fault

    virtually(work)


def test_one_that_never_serves_is_ended_and_started_again():
    async def work(rig: Rig) -> None:
        await rig.looks(99)
        first = rig.placed
        assert first.left == 0
        await rig.looks(10)
        assert first.left == 1
        assert len(rig.starts) == 2

    virtually(work)


def test_what_has_no_place_says_so_and_is_tried_again():
    async def work(rig: Rig) -> None:
        rig.refused = NotPlaced("it needs 8 GPUs; this machine has 1")
        assert "needs 8 GPUs" in (await rig.looks(1)).fault
        rig.refused = None
        assert (await rig.looks(10)).health is Health.LOADING

    virtually(work)


def test_closing_ends_what_is_being_started():
    async def work(rig: Rig) -> None:
        await rig.engine.probe()
        await rig.engine.close()

    virtually(work)


# ------------------------------------------------------------------------------------ real ones

# An engine with a process of its own, which takes no notice of being told to end.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{child.pid} {sys.argv[2]}")
time.sleep(600)
"""

PARENT = """
import subprocess, sys, time
engine = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def until(holds: Callable[[], object], wait_s: float = 20.0) -> None:
    by = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < by
        time.sleep(0.02)


def test_nothing_of_an_engine_outlives_who_started_it(tmp_path: Path):
    told = tmp_path / "told"
    guard = [sys.executable, "-m", "sluice.cluster.placement.guard", "0.2", sys.executable, "-c"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *guard, STUBBORN, str(told), "8000"]
    )  # fmt: skip
    until(lambda: told.exists() and told.read_text())
    child = int(told.read_text().split()[0])
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: gone(child))


def test_an_engine_whose_guard_is_killed_is_killed(tmp_path: Path):
    told = tmp_path / "told"
    command = (sys.executable, "-m", "sluice.cluster.placement.guard", "0.2", sys.executable, "-c")
    guard = subprocess.Popen([*command, STUBBORN, str(told), "8000"], stdin=subprocess.PIPE)
    until(lambda: told.exists() and told.read_text())
    (engine,) = psutil.Process(guard.pid).children()
    (child,) = engine.children()
    guard.kill()
    guard.communicate()
    until(lambda: gone(engine.pid))
    child.kill()


def test_an_engine_is_ended_with_its_own_processes_and_its_place_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr("sluice.cluster.placement.engine.GRACE_S", 0.2)
    told = tmp_path / "told"

    async def main() -> None:
        placement = LocalPlacement(Machine(cpus=2, gpus=0, memory_bytes=2**34))
        command = (sys.executable, "-c", STUBBORN, str(told), "{port}")
        placed = await placement.place_engine(command, Needs(cpus=2))
        with pytest.raises(NotPlaced):
            await placement.place_engine(command, Needs(cpus=1))
        await asyncio.to_thread(until, lambda: told.exists() and told.read_text())
        child, port = map(int, told.read_text().split())
        assert placed.address == ("127.0.0.1", port)
        assert placed.ending() is None
        await placed.leave(0.0)
        await asyncio.to_thread(until, lambda: gone(child))
        await (await placement.place_engine(("true",), Needs(cpus=2))).leave(10)

    asyncio.run(main())


@pytest.mark.parametrize(("command", "status"), [(("false",), 1), (("/nowhere/vllm",), 127)])
def test_how_a_command_ended_is_told(command, status):
    async def main() -> None:
        placed = await LocalPlacement(Machine.this()).place_engine(command, Needs())
        assert await placed.leave(20) == f"the process exited with status {status}"
        assert placed.ending() == f"the process exited with status {status}"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": ("vllm", "serve", "m")}, "must say {port}"),
        ({"start": ("vllm", "{port}"), "urls": ("x",)}, "leave urls or start out"),
        ({"start": ("vllm", "{port}"), "engine": "openvino"}, "is for remote engines"),
    ],
)
def test_settings_that_do_not_go_together_are_told(fields, words):
    if "urls" in fields:
        fields = {**fields, "urls": (UpstreamUrl("http://gpu-1:8000"),)}
    model = ModelSection(**{"source": "m", "engine": "vllm", **fields})
    told = [conflict.message for conflict in conflicts(Settings(models={"m": model}))]
    assert [message for message in told if words in message]
