"""Engines under test as child processes: how each is started, when it is ready, how it is stopped.

Peers live in virtual environments of their own below one folder (``install.py`` makes them). All
listen on loopback and share the cores with the client. vLLM and sluice choose their own number of
threads for the machine; llama.cpp's is set.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load.client import Target
from benchmarks.load.outcomes import Targets
from sluice.catalog.catalogue import Catalogue
from sluice.catalog.models import DEFAULT_MODEL
from sluice.config.load import load_settings

CONTEXT_TOKENS = 4096
SLUICE = ("slo", "fcfs", "static")
PEERS = ("vllm", "llama")
# Sequences that an engine runs at a time, which is also how many requests saturate it.
SEQUENCES = {"slo": 32, "fcfs": 32, "static": 32, "vllm": 64, "llama": 16}
START_S_MAX = {"vllm": 420.0}
THREADS = 2

LLAMA = """
import sys, threading, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.port = sys.argv[1], int(sys.argv[2])
p.n_parallel, p.n_ctx = int(sys.argv[3]), int(sys.argv[3]) * int(sys.argv[4])
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[5])
p.endpoint_metrics, p.n_gpu_layers = True, 0
server = xllamacpp.Server(p)
print(server.listening_address, flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are: the peers' folder, the model file, and where engines write."""

    peers: Path
    gguf: Path
    output: Path

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's virtual environment."""
        return self.peers / f"venv-{peer}" / "bin" / "python"

    def has(self, engine: str) -> bool:
        """Whether an engine can be started here."""
        return engine in SLUICE or self.python(engine).exists()


def default_gguf() -> Path:
    """Fetch the catalogue's default model, or find it in the cache."""
    return Catalogue(load_settings().settings.catalogue).fetch(DEFAULT_MODEL).path


@dataclass(slots=True)
class Engine:
    """One engine's process. ``journal`` is the folder of its journal where it writes one."""

    name: str
    target: Target
    process: subprocess.Popen[bytes]
    journal: Path | None
    log: Path
    started_s: float = field(default=0.0)

    def wait_ready(self) -> None:
        """Wait until it answers. Raises ``RuntimeError`` where it ends or takes too long."""
        began_s = time.monotonic()
        path = "/ready" if self.journal is not None else "/health"
        while not _answers(self.target.url + path):
            if self.process.poll() is not None or time.monotonic() - began_s > START_S_MAX.get(
                self.name, 90.0
            ):
                self.stop()
                tail = self.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} did not start:\n{tail}")
            time.sleep(0.1)
        self.started_s = time.monotonic() - began_s

    def stop(self) -> None:
        """End the process and all that it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if self.journal is not None else signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it started and left behind


def start(name: str, places: Places, targets: Targets) -> Engine:
    """Start an engine and wait until it is ready."""
    port = _free_port()
    folder = places.output / f"{name}-{port}"
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "journal" if name in SLUICE else None
    environment: dict[str, str] = {}
    if name == "vllm":
        command, environment = _vllm(places, port)
    elif name == "llama":
        sizes = [str(n) for n in (port, SEQUENCES[name], CONTEXT_TOKENS, THREADS)]
        command = [str(places.python(name)), "-c", LLAMA, str(places.gguf), *sizes]
    else:
        command = _sluice(name, port, folder, targets)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_environment(), **environment},
            start_new_session=True,
        )
    target = Target(f"http://127.0.0.1:{port}", DEFAULT_MODEL)
    engine = Engine(name, target, process, journal, log)
    engine.wait_ready()
    return engine


def _sluice(policy: str, port: int, folder: Path, targets: Targets) -> list[str]:
    # The classes that requests name; other engines ignore the header.
    classes = [
        f"slo.{name}.{what}={value_s}s"
        for name, pair in targets.classes.items()
        for what, value_s in zip(("ttft", "tpot"), pair, strict=True)
    ]
    chosen = [
        f"journal.dir={folder / 'journal'}",
        f"models.{DEFAULT_MODEL}.policy={policy}",
        f"models.{DEFAULT_MODEL}.context_tokens_max={CONTEXT_TOKENS}",
        f"models.{DEFAULT_MODEL}.sequences_max={SEQUENCES[policy]}",
        f"models.{DEFAULT_MODEL}.static_batch={SEQUENCES[policy]}",
        "server.trust_tenant_header=true",
        *classes,
    ]
    command = [
        sys.executable,
        "-m",
        "sluice",
        "serve",
        DEFAULT_MODEL,
        "--listen",
        f"127.0.0.1:{port}",
    ]
    return [*command, *(part for one in chosen for part in ("--set", one))]


def _vllm(places: Places, port: int) -> tuple[list[str], dict[str, str]]:
    command = [
        str(places.python("vllm")), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(places.peers / "vllm-model"), "--served-model-name", DEFAULT_MODEL,
        "--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS),
        "--max-num-seqs", str(SEQUENCES["vllm"]), "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return command, environment


def _environment() -> Mapping[str, str]:
    return dict(os.environ)  # noqa: TID251 - engines get what the benchmark was started with


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own address
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
