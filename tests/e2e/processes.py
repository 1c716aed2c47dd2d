"""``sluice serve`` as users run it: a process, its signals, its exit code and what it printed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.clients import Target, ask

_ADDRESS = re.compile(r"^API +(http://\S+)/v1$", re.MULTILINE)
START_S_MAX = 120.0


def eventually(holds: Callable[[], object], timeout_s: float = 20.0, every_s: float = 0.01) -> None:
    """Look again and again until something holds. Raises ``TimeoutError``."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not hold within {timeout_s} s")
        time.sleep(every_s)


class Shell:
    """Runs the lines of a page in a folder, with ``sluice`` being this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        sluice = folder / "bin" / "sluice"
        sluice.write_text(f'#!/bin/sh\nexec {sys.executable} -m sluice "$@"\n', encoding="utf-8")
        sluice.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def run(self, lines: str) -> str:
        """What the lines print. Raises ``CalledProcessError``."""
        done = subprocess.run(
            ["/bin/sh", "-ec", lines],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60,
            check=True,
        )  # fmt: skip
        return done.stdout


class ServerProcess:
    """One running server, with a journal of its own in ``folder``."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        listen: str = "127.0.0.1:0",
        cwd: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.journal = folder / "journal"
        self._output = folder / "stderr"
        command = [
            sys.executable, "-m", "sluice", "serve", *arguments, "--listen", listen,
        ]  # fmt: skip
        if not any(argument.startswith("journal.dir=") for argument in arguments):
            command += ["--set", f"journal.dir={self.journal}"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                cwd=cwd,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        self.url = ""

    @property
    def output(self) -> str:
        """What it wrote to standard error so far."""
        return self._output.read_text(errors="replace")

    @property
    def target(self) -> Target:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return Target(parts.hostname, parts.port)

    def wait_ready(self) -> "ServerProcess":
        """Wait until every model is loaded."""

        def told() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"exit code {self.process.returncode}:\n{self.output}")
            found = _ADDRESS.search(self.output)
            self.url = found.group(1) if found else ""
            return bool(self.url)

        eventually(told, START_S_MAX, every_s=0.05)
        assert ask(self.target, "GET", "/ready").status == 200
        return self

    def replica_pids(self) -> list[int]:
        """Process ids of its replicas."""
        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]

    def replica_of(self, model: str) -> int:
        """Process id of the first replica of a model."""
        for pid in self.replica_pids():
            if f'"replica_id":"{model}-0"' in " ".join(psutil.Process(pid).cmdline()):
                return pid
        raise LookupError(f"{model} has no replica")

    def metrics(self, headers: Mapping[str, str] = {}) -> dict[tuple[str, str], float]:
        """Values by name and labels, labels written as ``name=value,...`` in order of name."""
        answer = ask(self.target, "GET", "/metrics", headers=headers)
        assert answer.status == 200
        values = {}
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                values[sample.name, labels] = sample.value
        return values

    def metric(self, name: str, labels: str) -> float:
        return self.metrics().get((f"sluice_{name}", labels), 0.0)

    def send(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """End it as a user would and return its exit code."""
        if self.process.poll() is None:
            self.send(number)
        return self.process.wait(timeout_s)

    def destroy(self) -> None:
        """Leave nothing of it, whatever the test did."""
        pids = self.replica_pids() if self.process.poll() is None else []
        for pid in pids:
            psutil.Process(pid).send_signal(signal.SIGCONT)
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(psutil.Process(pid).memory_info().rss)
