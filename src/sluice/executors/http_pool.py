"""Connections to one address: opened within a deadline, bounded, kept for reuse for a short time.

``remote.py`` takes a connection for each exchange and gives it back. A connection is reused only
while the peer surely keeps it: servers close idle ones after as little as five seconds, and a
request that is written into a closing connection is lost. Names are resolved at each opening, so a
changed address is followed; no proxy is used.
"""

import asyncio
import re
import socket
import ssl
from collections import deque
from dataclasses import dataclass

from sluice.executors.http_connection import Connection
from sluice.executors.stream import ConnectFailed, ConnectFault

_KEEP_ALIVE_TIMEOUT = re.compile(r"timeout=(\d+)")
_KEEP_ALIVE_MAX = re.compile(r"max=(\d+)")
# How much earlier than the peer we stop to reuse a connection.
_IDLE_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where an upstream listens. ``tls`` is set for https."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds on connections; ``idle_s_max`` applies where the peer names no shorter time."""

    connections_max: int = 1024
    idle_max: int = 64
    idle_s_max: float = 4.0


class Pool:
    """The connections to one address. ``name`` is how errors call it."""

    def __init__(self, name: str, address: Address, limits: PoolLimits) -> None:
        self._name, self._address, self._limits = name, address, limits
        self._opening = 0
        self._open = set[Connection]()  # until the loop says that they are lost
        self._idle: list[Connection] = []
        self._in_use = set[Connection]()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._all_gone = asyncio.Event()

    @property
    def open_connections(self) -> int:
        """Connections that exist or are being opened."""
        return self._opening + len(self._open)

    @property
    def in_use(self) -> int:
        """Connections that carry an exchange."""
        return len(self._in_use)

    async def acquire(self, connect_s: float) -> Connection:
        """A connection that nobody else uses, kept or new. Raises ``ConnectFailed``."""
        if connection := self._idle_connection():
            return connection
        return await self.acquire_fresh(connect_s)

    async def acquire_fresh(self, connect_s: float) -> Connection:
        """A new connection; at the bound, one that comes back. Raises ``ConnectFailed``."""
        end_s = asyncio.get_running_loop().time() + connect_s
        try:
            async with asyncio.timeout_at(end_s):
                if idle := await self._room_or_idle():
                    return idle
        except TimeoutError as error:
            raise self._failed(ConnectFault.CROWDED, f"none free in {connect_s:g} s") from error
        self._opening += 1
        try:
            async with asyncio.timeout_at(end_s):
                connection = await self._connect()
        except TimeoutError as error:
            raise self._failed(ConnectFault.LATE, f"not within {connect_s:g} s") from error
        except ssl.SSLError as error:
            raise self._failed(ConnectFault.CERTIFICATE, error.reason or str(error)) from error
        except socket.gaierror as error:
            raise self._failed(ConnectFault.NAME, error.strerror or str(error)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self._failed(ConnectFault.REFUSED, reason) from error
        finally:
            self._opening -= 1
            self._call_next()
        if not connection.usable:
            raise self._failed(ConnectFault.REFUSED, "closed at once")
        self._open.add(connection)
        self._in_use.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Give a connection back after its exchange; one that cannot be reused is closed."""
        if connection not in self._in_use:
            return
        self._in_use.remove(connection)
        self._note_keep_alive(connection)
        if connection.reusable and len(self._idle) < self._limits.idle_max:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.break_off(ConnectionAbortedError())
        self._call_next()

    async def close(self) -> None:
        """Close all connections, also those in use, and wait until they are gone."""
        self._idle.clear()
        for connection in tuple(self._open):
            connection.break_off(ConnectionAbortedError("the pool is closed"))
        if self._open:
            self._all_gone.clear()
            await self._all_gone.wait()

    async def _connect(self) -> Connection:
        address = self._address
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._closed),
            address.host,
            address.port,
            ssl=address.tls,
            server_hostname=address.host if address.tls else None,
        )
        return connection

    async def _room_or_idle(self) -> Connection | None:
        """Wait until a connection may be opened (``None``) or one has come back."""
        while self.open_connections >= self._limits.connections_max:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # Its turn may have come in the same moment; then it goes to the next.
                if waiter.done() and not waiter.cancelled():
                    self._call_next()
                raise
            if idle := self._idle_connection():
                return idle
        return None

    def _idle_connection(self) -> Connection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the one used last, which is the least likely to be gone
            limit_s = self._limits.idle_s_max
            if connection.idle_s_max is not None:
                limit_s = min(limit_s, connection.idle_s_max)
            if connection.usable and now_s - connection.idle_since_s < limit_s:
                self._in_use.add(connection)
                return connection
            connection.break_off(ConnectionAbortedError())
        return None

    def _note_keep_alive(self, connection: Connection) -> None:
        promise = connection.head.header("keep-alive") if connection.head else None
        if promise is None:
            return
        if found := _KEEP_ALIVE_TIMEOUT.search(promise):
            connection.idle_s_max = int(found[1]) - _IDLE_MARGIN_S
        if (found := _KEEP_ALIVE_MAX.search(promise)) and int(found[1]) <= connection.exchanges:
            connection.idle_s_max = 0.0

    def _closed(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        self._open.discard(connection)
        if not self._open:
            self._all_gone.set()
        self._in_use.discard(connection)
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _failed(self, fault: ConnectFault, message: str) -> ConnectFailed:
        return ConnectFailed(
            self._name, fault, f"cannot connect to {self._address}: {fault}, {message}"
        )
