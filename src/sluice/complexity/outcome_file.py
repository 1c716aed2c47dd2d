"""The file of outcomes that clients tell: written by a server, read by ``sluice route train``.

One JSON object a line, with ``prompt`` and ``weak``, ``strong`` or both. Bounded: when the file has
half of its size, it becomes the one before, which replaces an older one. Nothing is decided here
about what an outcome means.
"""

import errno
import os
from io import FileIO
from pathlib import Path
from threading import Lock

import msgspec

_encode = msgspec.json.encode
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT


class OutcomeFile:
    """Adds outcomes to ``path``; together with the file before it, it takes ``bytes_max``."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._lock = Lock()

    def add(self, prompt: str, weak: float | None, strong: float | None) -> None:
        """Add one. Raises ``OSError``."""
        row = {"prompt": prompt, "weak": weak, "strong": strong}
        told = {name: value for name, value in row.items() if value is not None}
        line = _encode(told) + b"\n"
        with self._lock:
            try:
                held = self._path.stat().st_size
            except FileNotFoundError:
                held = 0
                self._path.parent.mkdir(parents=True, exist_ok=True)
            if held and held + len(line) > self._bytes_max // 2:
                self._path.replace(before(self._path))
            # It holds prompts, which are nobody else's to read.
            with os.fdopen(os.open(self._path, _FLAGS, 0o600), "r+b", buffering=0) as file:
                _append(file, line)


def _append(file: FileIO, line: bytes) -> None:
    """Add a whole line, or leave the file as it was: a disk may fill up in the middle of one."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":  # a server was killed in the middle of a line
            line = b"\n" + line
    written = file.write(line)
    if written != len(line):
        file.truncate(end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def before(path: Path) -> Path:
    """Where the outcomes are that are older than those in a file."""
    return path.with_name(path.name + ".1")
