"""One process at a time: a lock that is a file, over all processes of this machine.

Used while a model is fetched and while it is converted. The system frees the lock of a process that
dies; the file stays.
"""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from sluice.core.errors import ModelLoadError

_WAIT_STEP_S = 0.1


@contextmanager
def file_lock(
    path: Path, wait_s_max: float, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock at ``path``.

    ``on_wait`` is called once where another process holds it. Raises ``ModelLoadError`` where that
    lasts longer than ``wait_s_max``, ``OSError`` where the file cannot be opened.
    """
    deadline_s = time.monotonic() + wait_s_max
    with path.open("w") as file:
        waiting = False
        while not _taken(file):
            if time.monotonic() > deadline_s:
                raise ModelLoadError(
                    f"another process has held {path} for {wait_s_max:.0f} s; end it or remove "
                    "the file"
                )
            if not waiting:
                on_wait()
            waiting = True
            time.sleep(_WAIT_STEP_S)
        yield


@contextmanager
def free_lock(path: Path) -> Iterator[bool]:
    """Hold the lock at ``path`` where no one else does; yields whether that is so."""
    with path.open("w") as file:
        yield _taken(file)


@contextmanager
def shared_lock(path: Path) -> Iterator[None]:
    """Share the lock at ``path``, a file that exists: as long, no one can hold it alone.

    Waits while someone does.
    """
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
