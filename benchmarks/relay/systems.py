"""The gateways under test: how each is started, what it uses, how peers are installed.

All have the gateway's core to themselves and are stopped (``SIGSTOP``) while another one is
measured. Peers live in virtual environments below one folder.
"""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.relay.programs import GATEWAY_CORE, on_core, put_first

MODEL = "mock"
KEY = "a-key-of-this-benchmark-alone"
START_S_MAX = 90.0
PEERS = {
    "vllm-router": "vllm-router",
    "sglang-router": "sglang-router",
    "litellm": "litellm[proxy]",
}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_SLUICE = """
[server]
listen = "127.0.0.1:{port}"

[models.{model}]
engine = "vllm"
urls = [{urls}]
queue_requests_max = 2_000
queue_tokens_max = 10_000_000

[slo.interactive]
ttft = "30s"
tpot = "2s"

[tenants.bench]
key_sha256_env = "BENCH_KEY_SHA256"
requests_per_minute = 100_000_000
tokens_per_minute = 1_000_000_000_000
concurrency = 100_000
slo = "interactive"

[journal]
dir = "{folder}/journal"
"""

_LITELLM = """
model_list:
{deployments}
router_settings: {{routing_strategy: simple-shuffle}}
litellm_settings: {{telemetry: false}}
"""
_DEPLOYMENT = """  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: {url}/v1, api_key: none}}
"""


@dataclass(slots=True)
class System:
    """A gateway's process, or none where the load goes to the engine itself."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    headers: str = "no-headers"
    log: Path = field(default_factory=Path)

    def processes(self) -> Iterator[Path]:
        """The folders in ``/proc`` of the process and of all that it started."""
        waiting = [] if self.process is None else [self.process.pid]
        while waiting:
            folder = Path(f"/proc/{waiting.pop()}")
            yield folder
            with suppress(OSError):
                for task in (folder / "task").iterdir():
                    waiting += map(int, (task / "children").read_text().split())

    def cpu_s(self) -> float:
        """Processor time so far."""
        used = 0
        for folder in self.processes():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                used += int(fields[11]) + int(fields[12])
        return used / _TICKS_PER_S

    def resident_mb(self) -> float:
        """Resident memory at this moment."""
        pages = 0
        for folder in self.processes():
            with suppress(OSError):
                pages += int((folder / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of it."""
        if self.process is not None:
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def has(name: str, peers: Path) -> bool:
    """Whether a gateway can be started here."""
    return name not in PEERS or _binary(name, peers).exists()


def install(peers: Path) -> None:
    """Make the peers' environments, where they are missing."""
    for name, requirement in PEERS.items():
        if not _binary(name, peers).exists():
            python = peers / name / "bin" / "python"
            subprocess.run([sys.executable, "-m", "venv", str(peers / name)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", requirement], check=True)


def start(name: str, peers: Path, folder: Path, engines: Sequence[int]) -> System:
    """Start a gateway in front of the engines on these ports and wait until it answers."""
    port, spare = free_ports(2)
    folder = folder / name
    folder.mkdir()
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    command, environment = _command(name, port, spare, urls, peers, folder)
    log = folder / "log"
    with log.open("wb") as output, on_core(GATEWAY_CORE):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},  # noqa: TID251 - a process of its own
            start_new_session=True,
        )
    put_first(process.pid)
    headers = "key-header" if name == "sluice" else "no-headers"
    system = System(name, port, process, headers, log)
    _wait_ready(system)
    return system


def _command(
    name: str, port: int, spare: int, urls: Sequence[str], peers: Path, folder: Path
) -> tuple[list[str], Mapping[str, str]]:
    match name:
        case "sluice":
            config = folder / "sluice.toml"
            quoted = ", ".join(f'"{url}"' for url in urls)
            config.write_text(_SLUICE.format(port=port, model=MODEL, urls=quoted, folder=folder))
            digest = hashlib.sha256(KEY.encode()).hexdigest()
            command = [sys.executable, "-m", "sluice", "serve", "-c", str(config)]
            return command, {"BENCH_KEY_SHA256": digest}
        case "vllm-router" | "sglang-router":
            launch = ["launch"] if name == "sglang-router" else []
            command = [str(_binary(name, peers)), *launch, "--port", str(port), "--worker-urls"]
            options = ["--policy", "round_robin", "--log-level", "error"]
            return [*command, *urls, *options, "--prometheus-port", str(spare)], {}
        case "litellm":
            config = folder / "litellm.yaml"
            deployments = "".join(_DEPLOYMENT.format(model=MODEL, url=url) for url in urls)
            config.write_text(_LITELLM.format(deployments=deployments))
            options = ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
            return [str(_binary(name, peers)), "--config", str(config), *options], {
                "LITELLM_LOG": "ERROR",
                "LITELLM_MODE": "PRODUCTION",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            }
    raise ValueError(f"there is no gateway called {name}")


def _binary(name: str, peers: Path) -> Path:
    return peers / name / "bin" / name


def _wait_ready(system: System) -> None:
    assert system.process is not None
    end_s = time.monotonic() + START_S_MAX
    while not _serves(system):
        if system.process.poll() is not None or time.monotonic() > end_s:
            system.stop()
            tail = system.log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{system.name} did not start:\n{tail}")
        time.sleep(0.2)


def _serves(system: System) -> bool:
    """Whether it passes a request on to the engines."""
    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"Hello"}}]}}'
    url = f"http://127.0.0.1:{system.port}/v1/chat/completions"
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
