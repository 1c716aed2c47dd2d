"""Signals of a running server: two ask it to stop, one to read its settings again.

Called by ``serve``. What stopping and reading again mean is the business of ``wiring``.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import click

from sluice.core.errors import ConfigError
from sluice.wiring.serving import Stop


def listen_to_signals(stop: Stop, reload: Callable[[], Awaitable[object]]) -> None:
    """Follow signals until the event loop ends.

    The first SIGINT or SIGTERM drains, the second ends what runs, a third ends the process at once.
    SIGHUP reads the settings again; where it comes because the terminal of the server was closed,
    it stops as the others do. Under nohup SIGHUP is ignored, and stays so.
    """
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    reloads: set[asyncio.Task[None]] = set()

    def stop_further() -> None:
        if not stop.soon.is_set():
            stop.soon.set()
            with suppress(OSError):  # who read it may be gone
                click.echo("draining; press Ctrl-C again to end running requests", err=True)
            return
        stop.now.set()
        for each in numbers:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    def hung_up(*, had_terminal: bool) -> None:
        if had_terminal and not has_terminal():
            stop_further()
            return
        task = loop.create_task(_read_again(reload))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in numbers:
        loop.add_signal_handler(number, stop_further)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
        had_terminal = has_terminal()
        loop.add_signal_handler(signal.SIGHUP, lambda: hung_up(had_terminal=had_terminal))


def has_terminal() -> bool:
    """Whether the process can reach a terminal that could be closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _read_again(reload: Callable[[], Awaitable[object]]) -> None:
    with suppress(ConfigError):  # its problems are in the log
        await reload()
