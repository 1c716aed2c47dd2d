"""Engines that the server starts: served, started again when they die, and gone with it."""

import sys
from pathlib import Path

import psutil

from tests.e2e.clients import post
from tests.e2e.processes import ServerProcess, eventually

COMMAND = [
    sys.executable, "-m", "sluice", "serve", "sim:llama-3.1-8b@h100", "--listen",
    "127.0.0.1:{port}", "--set", "journal.enabled=false",
]  # fmt: skip
CHAT = "/v1/chat/completions"
BODY = {"model": "large", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
SETTINGS = f"""
[models.small]
source = "sim:llama-3.1-8b@h100"

[models.large]
engine = "openai"
start = {COMMAND!r}
upstream_model = "sim-llama-3-1-8b-h100"
probe = "200ms"
replicas = {{ min = 1 }}
needs = {{ cpus = 1 }}
"""


def test_an_engine_is_started_again_when_it_dies_and_ends_with_the_server(tmp_path: Path):
    (tmp_path / "s.toml").write_text(SETTINGS, encoding="utf-8")
    server = ServerProcess(tmp_path / "s", ["-c", str(tmp_path / "s.toml")])
    try:

        def serves() -> bool:
            return post(server.target, CHAT, BODY).status == 200

        server.wait_ready()
        # The gateway's own line and the engine's: that one answers 503 until it is loaded.
        eventually(lambda: server.output.count("loading done") == 2, 60)
        eventually(serves, 30, every_s=0.5)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = [
            one
            for one in processes
            if "serve" in one.cmdline() and "sluice.cluster.placement.guard" not in one.cmdline()
        ]
        engine.kill()
        eventually(lambda: server.output.count("loading done") == 3, 60)
        eventually(serves, 30, every_s=0.5)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0, server.output
        _, alive = psutil.wait_procs(processes, timeout=15)
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    finally:
        server.destroy()
