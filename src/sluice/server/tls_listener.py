"""Accepts connections whose first bytes are a TLS handshake, within bounds.

An event loop that listens with TLS itself tells nobody of a connection before its handshake is
over: such connections could be neither counted nor closed. Used by ``serve``.
"""

import asyncio
import socket
from collections.abc import Callable

from sluice.server.tls import Identity

# A process without a free file descriptor cannot accept; it looks again after so long.
_AGAIN_S = 0.1


class TlsListener:
    """Gives each connection to a protocol of its own once its handshake is done.

    ``has_room`` says, of so many handshakes that are going on, whether one more may begin;
    otherwise the connection is closed without a word. ``shutdown_s_max`` is the time for the
    client's part of a closing.
    """

    def __init__(
        self,
        identity: Identity,
        new_protocol: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
        *,
        handshake_s_max: float,
        shutdown_s_max: float,
    ) -> None:
        self._identity = identity
        self._new_protocol = new_protocol
        self._has_room = has_room
        self._handshake_s_max = handshake_s_max
        self._shutdown_s_max = shutdown_s_max
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = 0

    def start(self, listener: socket.socket) -> None:
        """Accept from a listening socket until ``stop``."""
        self._keep(asyncio.get_running_loop().create_task(self._accept_always(listener)))

    async def stop(self) -> None:
        """Accept nothing more and close what has not shaken hands."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept_always(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                opened, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_AGAIN_S)
                continue
            if self._has_room(self._handshakes):
                self._handshakes += 1
                self._keep(loop.create_task(self._secure(opened)))
            else:
                opened.close()

    async def _secure(self, opened: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._new_protocol,
                opened,
                ssl=self._identity.context,
                ssl_handshake_timeout=self._handshake_s_max,
                ssl_shutdown_timeout=self._shutdown_s_max,
            )
        except OSError:  # no TLS, none that both know, too slow, or gone
            opened.close()
        finally:
            self._handshakes -= 1

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
