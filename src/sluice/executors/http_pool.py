"""Connections to one address: opened within a deadline, bounded, kept for reuse for a short time.

``remote.py`` takes a connection for each exchange and gives it back. A connection is reused only
while the peer surely keeps it: servers close idle ones after as little as five seconds, and a
request that is written into a closing connection is lost. Names are resolved at each opening, so a
changed address is followed; no proxy is used. At the bound callers are served in the order in which
they came: each is given its connection, or the right to open one, and nobody can take it meanwhile.
"""

import asyncio
import logging
import os
import re
import socket
import ssl
from collections import deque
from dataclasses import dataclass

from sluice.executors.http_connection import Connection
from sluice.executors.stream import ConnectFailed, ConnectFault

_log = logging.getLogger(__name__)

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
class ConnectionLimits:
    """Bounds on connections; ``idle_s_max`` applies where the peer names no shorter time."""

    connections_max: int = 1024
    idle_max: int = 64
    idle_s_max: float = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class _Caller:
    """Waits for ``turn``: a kept connection, or ``None`` to open one; ``fresh`` takes no other."""

    turn: asyncio.Future[Connection | None]
    fresh: bool


class ConnectionPool:
    """The connections to one address. ``name`` is how errors call it."""

    def __init__(self, name: str, address: Address, limits: ConnectionLimits) -> None:
        self._name, self._address, self._limits = name, address, limits
        self._opening = 0  # promised to callers or under way
        self._open = set[Connection]()  # until the loop says that they are lost
        self._idle: list[Connection] = []
        self._in_use = set[Connection]()
        self._callers: deque[_Caller] = deque()
        self._all_gone = asyncio.Event()
        self._is_down = False  # since the last attempt to connect

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
        if not self._callers and (kept := self._idle_connection()):
            return kept
        return await self._acquire(connect_s, fresh=False)

    async def acquire_fresh(self, connect_s: float) -> Connection:
        """A new connection; at the bound, a kept one is closed for it. Raises ``ConnectFailed``."""
        return await self._acquire(connect_s, fresh=True)

    async def _acquire(self, connect_s: float, *, fresh: bool) -> Connection:
        if not fresh and self._next_caller() is None and (kept := self._idle_connection()):
            return kept
        end_s = asyncio.get_running_loop().time() + connect_s
        try:
            if kept := await self._turn(end_s, fresh=fresh):
                return kept
        except TimeoutError as error:
            raise self._failed(ConnectFault.CROWDED, f"none free in {connect_s:g} s") from error
        try:
            async with asyncio.timeout_at(end_s):
                connection = await self._connect()
        except TimeoutError as error:
            raise self._failed(ConnectFault.LATE, f"not within {connect_s:g} s") from error
        except ssl.SSLError as error:
            raise self._failed(ConnectFault.CERTIFICATE, error.reason) from error
        except socket.gaierror as error:
            raise self._failed(ConnectFault.NAME) from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else ""
            raise self._failed(ConnectFault.REFUSED, reason) from error
        except ValueError as error:
            raise self._failed(ConnectFault.NAME) from error
        else:
            if not connection.usable:
                raise self._failed(ConnectFault.REFUSED, "closed at once")
            self._open.add(connection)
            self._in_use.add(connection)
            self._is_down = False
            return connection
        finally:
            self._give_up_opening()

    def release(self, connection: Connection) -> None:
        """Give a connection back after its exchange; one that cannot be reused is closed."""
        if connection not in self._in_use:
            return
        self._in_use.remove(connection)
        self._note_keep_alive(connection)
        if connection.reusable and (
            len(self._idle) < self._limits.idle_max or self._next_caller() is not None
        ):
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.break_off(ConnectionAbortedError())
        self._serve()

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

    async def _turn(self, end_s: float, *, fresh: bool) -> Connection | None:
        """A kept connection, or ``None`` with the right to open one. Raises ``TimeoutError``."""
        caller = _Caller(asyncio.get_running_loop().create_future(), fresh)
        self._callers.append(caller)
        self._serve()
        while True:
            if not caller.turn.done():
                try:
                    async with asyncio.timeout_at(end_s):
                        await caller.turn
                except (asyncio.CancelledError, TimeoutError):
                    self._hand_on(caller)
                    raise
            connection = caller.turn.result()
            if connection is None or connection.usable:
                return connection
            # It was closed between the moment in which it was given and this one.
            self.release(connection)
            caller = _Caller(asyncio.get_running_loop().create_future(), fresh)
            self._callers.appendleft(caller)
            self._serve()

    def _hand_on(self, caller: _Caller) -> None:
        """Pass on what fell to a caller in the moment in which it left."""
        caller.turn.cancel()
        if caller.turn.cancelled():
            return
        connection = caller.turn.result()
        if connection is None:
            self._give_up_opening()
            return
        self._in_use.discard(connection)
        self._idle.append(connection)
        self._serve()

    def _give_up_opening(self) -> None:
        self._opening -= 1
        self._serve()

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
        promise = connection.keep_alive_promise
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
        self._serve()

    def _serve(self) -> None:
        """Give the callers, the first one first, what there is."""
        while caller := self._next_caller():
            if not caller.fresh and (kept := self._idle_connection()):
                caller.turn.set_result(kept)
            elif self.open_connections < self._limits.connections_max:
                self._opening += 1
                caller.turn.set_result(None)
            else:
                if caller.fresh and self._idle:
                    # There is room once the loop says that it is closed.
                    self._idle.pop(0).break_off(ConnectionAbortedError())
                return

    def _next_caller(self) -> _Caller | None:
        while self._callers and self._callers[0].turn.done():
            self._callers.popleft()
        return self._callers[0] if self._callers else None

    def _failed(self, fault: ConnectFault, message: str | None = None) -> ConnectFailed:
        """What callers are told, and through them clients: no address, which is the operator's to
        know and is logged once, and no words of the system, which may hold it."""
        reason = ", ".join(filter(None, (str(fault), message)))
        if fault is not ConnectFault.CROWDED and not self._is_down:
            self._is_down = True
            _log.warning("%s at %s cannot be connected to: %s", self._name, self._address, reason)
        return ConnectFailed(self._name, fault, f"cannot connect: {reason}")
