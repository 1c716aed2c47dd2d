"""llama.cpp's own server as a child process, for tests that need a real engine elsewhere."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from sluice.executors.http_pool import Address


@contextmanager
def llama_child(gguf: Path, log: Path) -> Iterator[Address]:
    """Run it over a model while the context is open; gives where it listens."""
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("llama_server.py")), str(gguf)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, log.read_text()
        url = urlsplit(line.strip())
        assert url.port is not None
        yield Address("127.0.0.1", url.port)
    finally:
        child.kill()
        child.communicate(timeout=10)
