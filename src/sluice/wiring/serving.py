"""The life of the gateway process: listen, load, serve, drain.

HTTP answers from the first moment, so that probes see a process that is alive and not ready; calls
are refused with the time to ready until a model is loaded. When told to stop, ready turns false,
running requests get the grace period, and everything that was started is stopped.
"""

import asyncio
import gc
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.cluster.overview import Overview
from sluice.server.serve import serve
from sluice.wiring.operations import RunningServer

# Nearly all that a request allocates dies with it, without cycles: the collector's own default of
# 700 objects would look in vain several times for each request.
_GARBAGE_OBJECTS = 20_000


@dataclass(frozen=True, slots=True)
class Stop:
    """Set ``soon`` to let running requests finish, ``now`` to end them with an error each."""

    soon: asyncio.Event = field(default_factory=asyncio.Event)
    now: asyncio.Event = field(default_factory=asyncio.Event)


async def run_server(
    running: RunningServer,
    listener: socket.socket,
    stop: Stop,
    on_ready: Callable[[], None],
) -> None:
    """Serve until told to stop and everything has ended.

    ``on_ready`` is called once, when all models can be served. Raises ``ModelLoadError`` where one
    cannot be loaded.
    """
    gateway, close_listener = running.gateway, asyncio.Event()
    serving = asyncio.create_task(serve(running.app, running.transport, listener, close_listener))
    sampling = asyncio.create_task(_sample_always(running.overview))
    exporting = asyncio.create_task(running.tracing.run())
    following = asyncio.create_task(running.follow_addresses())
    stopping = asyncio.create_task(stop.soon.wait())
    ending = asyncio.create_task(stop.now.wait())
    try:
        loading = asyncio.create_task(gateway.start())
        await asyncio.wait({loading, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GARBAGE_OBJECTS)
            on_ready()
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            running.transport.drain()
            draining = asyncio.create_task(gateway.drain(running.section.grace_s))
            await asyncio.wait({draining, ending}, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
        else:
            loading.cancel()
    finally:
        sampling.cancel()
        following.cancel()
        stopping.cancel()
        ending.cancel()
        await gateway.close()
        exporting.cancel()
        await running.tracing.stop()
        await running.front.close()
        close_listener.set()
        await serving


async def _sample_always(overview: Overview) -> None:
    """Let the dashboard know how things stand, every few seconds."""
    while True:
        await asyncio.sleep(overview.interval_s)
        overview.sample()
