"""The mock engines and the load driver: compiling them, running them, reading what they print.

Both are C files beside this one, which say what they do. They share one core, the gateway under
test has the other.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GATEWAY_CORE, LOAD_CORE = 0, 1
_HERE = Path(__file__).parent
_SPIN = """
import os
os.sched_setaffinity(0, {%d})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True: pass
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Connections that ask alike; ``rate`` is requests per second of all, ``None`` closed loop."""

    connections: int
    body: str
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """One run of the driver. It ends by itself after ``requests_max`` answers."""

    groups: tuple[Group, ...]
    measured_s: float
    warm_up_s: float = 0.2
    requests_max: int | None = None


# What the driver printed for one group; see there.
Printed = Mapping[str, Any]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes that are started in the block run on this core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def put_first(process_id: int) -> None:
    """Let other work on the machine wait for a process and its session, where that is allowed."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process_id, -10)
        Path(f"/proc/{process_id}/autogroup").write_text("-10")


class Programs:
    """The compiled programs, in a folder that is the caller's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._upstream: subprocess.Popen[str] | None = None
        for name in ("upstream", "driver"):
            source = _HERE / f"{name}.c"
            subprocess.run(["gcc", "-O2", "-o", str(folder / name), str(source)], check=True)  # noqa: S607

    def start_upstream(self, ports: Sequence[int]) -> None:
        """Start the engines, one on each port."""
        command = [str(self._folder / "upstream"), *map(str, ports)]
        with on_core(LOAD_CORE):
            self._upstream = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._upstream.stdout is not None
        if not self._upstream.stdout.readline():
            raise SystemExit("the mock engines did not start")

    def stop(self) -> None:
        """End the engines."""
        if self._upstream is not None:
            with self._upstream:
                self._upstream.kill()

    def put(self, name: str, content: bytes) -> None:
        """Keep a body or headers under a name that loads can refer to."""
        (self._folder / name).write_bytes(content)

    def drive(self, port: int, headers: str, load: Load, tick: Callable[[], None]) -> list[Printed]:
        """Run a load. ``tick`` is called when measuring begins and when it ends."""
        arguments = [
            str(self._folder / "driver"),
            str(port),
            str(self._folder / headers),
            str(round(load.warm_up_s * 1000)),
            str(round(load.measured_s * 1000)),
            str(load.requests_max or 0),
        ]
        arguments += [
            f"{group.connections}:{self._folder / group.body}:{group.rate or 0}"
            for group in load.groups
        ]
        printed: list[Printed] = []
        with on_core(LOAD_CORE):
            driver = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        with driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                if line.strip() in {"begin", "end"}:
                    tick()
                else:
                    printed = json.loads(line)
        if driver.returncode or not printed:
            raise SystemExit("the load driver failed")
        return printed


@contextmanager
def awake() -> Iterator[None]:
    """Keep both cores from halting, which costs tens of microseconds at each wake-up."""
    spinners = [
        subprocess.Popen([sys.executable, "-c", _SPIN % core]) for core in (GATEWAY_CORE, LOAD_CORE)
    ]
    time.sleep(0.1)
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
