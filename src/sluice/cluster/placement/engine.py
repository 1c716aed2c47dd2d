"""Engines that sluice starts: a command in a place, and a remote engine once it listens.

``StartedEngine`` stands where ``executors.remote.EngineClient`` does. It finds a place when it is
first looked at, speaks with what listens there, and finds another place when that has ended, later
each time that it ends soon. Whether the engine serves is asked of the engine; what requests it gets
is the fleet's decision.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from sluice.cluster.placement.placed import NotPlaced
from sluice.executors.stream import (
    Answer,
    ConnectFailed,
    ConnectFault,
    EngineClient,
    EngineFacts,
    Health,
    Probe,
    UpstreamRequest,
)

PORT = "{port}"
# From SIGTERM to SIGKILL, for an engine that nobody wants any more.
GRACE_S = 10.0
# Between two starts of an engine that ends; doubled each time, to the most.
_BACKOFF_S_MIN, _BACKOFF_S_MAX = 1.0, 60.0


class EnginePlaced(Protocol):
    """A running command that will listen at an address, or has ended."""

    @property
    def address(self) -> tuple[str, int]:
        """Where it will listen."""
        ...

    def ending(self) -> str | None:
        """How it has ended, ``None`` while it runs."""
        ...

    async def leave(self, wait_s: float) -> str:
        """Wait until it has ended, ending it after ``wait_s``, and say how; may be called again."""
        ...

    async def dismiss(self, wait_s: float) -> None:
        """The same for one that is not wanted any more; see ``placed.Placed``."""
        ...


PlaceEngine = Callable[[], Awaitable[EnginePlaced]]


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def guarded(command: Sequence[str], port: int) -> list[str]:
    """The command at this port, ended when who starts it is gone; see ``guard``."""
    filled = [word.replace(PORT, str(port)) for word in command]
    return [sys.executable, "-m", "sluice.cluster.placement.guard", str(GRACE_S), *filled]


class StartedEngine:
    """One engine over its starts. ``reach`` makes the client of what listens at an address.

    One that does not serve within ``load_s_max`` is ended.
    """

    def __init__(
        self,
        name: str,
        place: PlaceEngine,
        reach: Callable[[tuple[str, int]], EngineClient],
        clock: Callable[[], int],
        load_s_max: float,
    ) -> None:
        self._name, self._place, self._reach, self._clock = name, place, reach, clock
        self._load_s_max = load_s_max
        self._serve_by_ns: int | None = None  # until it serves
        self._placed: EnginePlaced | None = None
        self._client: EngineClient | None = None
        self._placing: asyncio.Task[EnginePlaced] | None = None
        self._backoff_s = _BACKOFF_S_MIN
        self._start_ns = 0  # not before
        self._why = "it has not been started"

    async def probe(self) -> Probe:
        """Look at it, starting it where it does not run. Never raises ``UpstreamError``."""
        if self._placed is not None and (how := self._placed.ending()) is not None:
            await self._ended(how)
        if self._client is None:
            self._start()
        if self._client is None:
            return Probe(self._clock(), Health.DOWN, fault=self._why)
        probe = await self._client.probe()
        if probe.health is Health.READY:
            self._serve_by_ns, self._backoff_s = None, _BACKOFF_S_MIN
        elif self._serve_by_ns is not None and self._clock() >= self._serve_by_ns:
            await self._ended(f"it did not serve within {self._load_s_max:g} s (load_max)")
        return probe

    async def open(self, request: UpstreamRequest) -> Answer:
        """See ``executors.stream.StreamExecutor``."""
        if self._client is None:
            raise ConnectFailed(self._name, ConnectFault.REFUSED, self._why)
        return await self._client.open(request)

    async def abort(self, request_id: str) -> None:
        """See ``executors.stream.StreamExecutor``."""
        if self._client is not None:
            await self._client.abort(request_id)

    async def facts(self) -> EngineFacts:
        """See ``executors.stream.StreamExecutor``."""
        return EngineFacts() if self._client is None else await self._client.facts()

    async def sleep(self) -> str:
        """See ``executors.stream.Sleeper``."""
        return self._why if self._client is None else await self._client.sleep()

    async def wake(self) -> str:
        """See ``executors.stream.Sleeper``."""
        return self._why if self._client is None else await self._client.wake()

    async def close(self) -> None:
        """Cancel what runs, and end the engine."""
        if self._placing is not None:
            self._placing.cancel()
            with contextlib.suppress(asyncio.CancelledError, NotPlaced):
                self._placed = await self._placing
        if self._client is not None:
            await self._client.close()
        if self._placed is not None:
            await self._placed.dismiss(0.0)

    def _start(self) -> None:
        """Look for a place, or take the one that was found."""
        if self._placing is None:
            if self._clock() >= self._start_ns:
                self._why = "it is being started"
                self._placing = asyncio.get_running_loop().create_task(self._find())
            return
        if not self._placing.done():
            return
        placing, self._placing = self._placing, None
        try:
            self._placed = placing.result()
        except NotPlaced as refused:
            self._later(str(refused))
            return
        self._client = self._reach(self._placed.address)
        self._serve_by_ns = self._clock() + round(self._load_s_max * 1e9)

    async def _find(self) -> EnginePlaced:
        return await self._place()

    async def _ended(self, how: str) -> None:
        if self._client is not None:
            await self._client.close()
        if self._placed is not None:
            await self._placed.leave(0.0)
        self._client = self._placed = None
        self._later(how)

    def _later(self, why: str) -> None:
        self._why = f"{why}; it is started again in {self._backoff_s:g} s"
        self._start_ns = self._clock() + round(self._backoff_s * 1e9)
        self._backoff_s = min(_BACKOFF_S_MAX, 2 * self._backoff_s)
