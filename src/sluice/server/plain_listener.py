"""Accepts connections as they come, all that wait at a time.

The event loop's own way accepts one connection per turn. A turn of a busy server lasts tens of
milliseconds, so that the last of a hundred new clients would wait for seconds. Used by ``serve``.
"""

import asyncio
import socket
from collections.abc import Callable

# So that a flood of connections does not hold up those that are open.
_TOGETHER_MAX = 64
# A process without a free file descriptor cannot accept; it looks again after so long.
_AGAIN_S = 0.1


class PlainListener:
    """Gives each connection to a protocol of its own."""

    def __init__(self, new_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._new_protocol = new_protocol
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self, listener: socket.socket) -> None:
        """Accept from a listening socket until ``stop``."""
        self._listeners.append(listener)
        self._watch(listener)

    async def stop(self) -> None:
        """Accept nothing more."""
        loop = asyncio.get_running_loop()
        if self._pause is not None:
            self._pause.cancel()
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
        self._listeners.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _watch(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_TOGETHER_MAX):
            try:
                opened = listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                loop.remove_reader(listener.fileno())
                self._pause = loop.call_later(_AGAIN_S, self._watch, listener)
                return
            opened.settimeout(0)
            task = loop.create_task(self._connect(opened))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, opened: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._new_protocol, opened)
        except OSError:  # gone already
            opened.close()
