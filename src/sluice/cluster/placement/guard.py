"""Runs a command for as long as somebody holds the other end of standard input.

``python -m sluice.cluster.placement.guard GRACE_S COMMAND…``. Engines have processes of their own
and do not notice that who started them is gone; with standard input closed, by whatever death, the
whole group of the command is told to end and killed after ``GRACE_S``. Where this process itself is
killed, so is the command. Exits as the command does.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command of ``sys.argv``; returns its exit status."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this decides
    with contextlib.suppress(OSError):
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - there are no threads yet
        )
        threading.Thread(target=_watch, args=(engine, grace_s), daemon=True).start()
        status = engine.wait()
        _signal(engine, signal.SIGKILL)  # what it has left
        return status if status >= 0 else 128 - status
    print(f"{command[0]} cannot be run", file=sys.stderr)  # noqa: T201 - for who reads its output
    return 127


def _die_with_parent() -> None:
    """Let the kernel kill this process with its parent, see prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(engine: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End the engine when nobody holds standard input any more."""
    while os.read(0, 1024):
        pass
    _signal(engine, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine.wait(grace_s)
    _signal(engine, signal.SIGKILL)


def _signal(engine: "subprocess.Popen[bytes]", what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, what)


if __name__ == "__main__":
    sys.exit(main())
