"""Servers that the end-to-end tests share. Each is a process with the real model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.e2e.processes import ServerProcess

CONTEXT_TOKENS = 2048
POOL_TOKENS = 1024
KV_BYTES_PER_TOKEN_F32 = 46_080  # SmolLM2-135M: 30 layers x 2 x 3 heads x 64 values x 4 bytes

_MODELS = f"""
[models.exact]
source = "{{folder}}"
numerics = "exact"
context_tokens_max = {CONTEXT_TOKENS}
sequences_max = 8
kv_bytes = {8192 * KV_BYTES_PER_TOKEN_F32}
threads = 2

[models.one]
source = "{{folder}}"
context_tokens_max = {CONTEXT_TOKENS}
sequences_max = 1
queue_requests_max = 8
kv_bytes = "64MiB"

[models.bounded]
source = "{{folder}}"
context_tokens_max = {CONTEXT_TOKENS}
sequences_max = 1
queue_requests_max = 2
kv_bytes = "64MiB"

[models.pool]
source = "{{folder}}"
numerics = "exact"
context_tokens_max = {CONTEXT_TOKENS}
sequences_max = 4
kv_bytes = {POOL_TOKENS * KV_BYTES_PER_TOKEN_F32}
prefix_cache = false
threads = 2
"""

Serve = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def server(
    smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One server with several models: exact, of one slot, with a short queue, with a small pool."""
    folder = tmp_path_factory.mktemp("server")
    settings = folder / "sluice.toml"
    settings.write_text(_MODELS.format(folder=smollm2_folder))
    running = ServerProcess(folder, ["-c", str(settings)])
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


@pytest.fixture
def start(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers of one model called ``tiny`` that end with the test."""
    started: list[ServerProcess] = []

    def make(
        *settings: str,
        source: Path | None = None,
        environment: Mapping[str, str] | None = None,
        listen: str = "127.0.0.1:0",
    ) -> ServerProcess:
        given: Sequence[str] = (
            f"models.tiny.source={source or smollm2_folder}",
            *(
                ()
                if any("kv_bytes" in one for one in settings)
                else ("models.tiny.kv_bytes=64MiB",)
            ),
            *settings,
        )
        arguments = [part for one in given for part in ("--set", one)]
        running = ServerProcess(tmp_path_factory.mktemp("server"), arguments, environment, listen)
        started.append(running)
        return running

    try:
        yield make
    finally:
        for running in started:
            running.destroy()
