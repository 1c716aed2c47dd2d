"""Child processes that measure: one line of JSON asks, one that begins with ``@`` answers.

Shared by the benchmarks that give each engine or setting a process of its own.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Child:
    """The parent's end of one child."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, question: Any) -> Any:
        """Send one question and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("a measuring process ended early")


@contextmanager
def started(script: str, arguments: Sequence[str]) -> Iterator[Child]:
    """Run a script as a child and end it with the block."""
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        yield Child(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)
