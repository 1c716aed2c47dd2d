"""The HTTP server in a thread, for tests that speak to it as clients do: over a socket.

``served`` binds a free loopback port. The gateway's coroutines run on the server's loop; ``call``
runs something there from the test's thread.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from sluice.config.sections import ServerSection
from sluice.server.app import create_app
from sluice.server.bodies import Bodies
from sluice.server.exchange import AsgiApp
from sluice.server.limits import Limits
from sluice.server.ports import Gateway, Operations
from sluice.server.serve import address_of, bind, new_event_loop, serve
from sluice.server.stamp import Sources
from sluice.server.transport import Transport

Result = TypeVar("Result")
CREATED_S = 1_750_000_000


@dataclass(frozen=True, slots=True)
class Served:
    """A running server. ``url`` is its base address, without ``/v1``."""

    url: str
    host: str
    port: int
    loop: asyncio.AbstractEventLoop
    transport: Transport

    def call(self, work: Callable[[], Awaitable[Result]], timeout_s: float = 10.0) -> Result:
        """Run a coroutine on the server's loop and wait for its result."""

        async def run() -> Result:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout_s)

    def eventually(self, holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Let the server's loop turn until something holds. Raises ``TimeoutError``."""

        async def turn() -> None:
            async with asyncio.timeout(timeout_s):
                while not holds():  # noqa: ASYNC110  nothing tells when a fake has recorded
                    await asyncio.sleep(0)

        self.call(turn, timeout_s + 1)


@contextmanager
def served(
    gateway: Gateway,
    section: ServerSection | None = None,
    limits: Limits | None = None,
    operations: Operations | None = None,
) -> Iterator[Served]:
    """Serve a gateway on a free loopback port while the context is open.

    ``limits`` replaces those that the section gives.
    """
    section = section or ServerSection(listen="127.0.0.1:0")
    ids = itertools.count(1)
    sources = Sources(
        wall_s=lambda: CREATED_S,
        monotonic_ns=time.monotonic_ns,
        new_id=lambda: f"call{next(ids):04d}",
        version="test",
    )
    bodies = Bodies(limits or Limits.of(section))
    app = create_app(gateway, section, sources, operations=operations, bodies=bodies)
    with served_app(app, section, Transport.of(section)) as running:
        yield running


@contextmanager
def served_app(app: AsgiApp, section: ServerSection, transport: Transport) -> Iterator[Served]:
    """Serve an app at the address of the section while the context is open."""
    listener = bind(section)
    host, port = listener.getsockname()[:2]
    loop = new_event_loop()
    stop = asyncio.Event()
    url = address_of(listener, transport.scheme)
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(serve(app, transport, listener, stop)), daemon=True
    )
    thread.start()
    try:
        yield Served(url, host, port, loop, transport)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=20)
        loop.close()
