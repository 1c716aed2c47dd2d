"""Whatever clients and replicas do, each call ends once and the gateway then holds nothing.

Case D-08: no permit leaks after any sequence of cancels, losses, refusals and endings.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sluice.core.errors import ContextExceeded, InvalidRequest, Overloaded
from sluice.core.roster import BatchingLimits
from sluice.runtime.generation import Finished
from sluice.runtime.streams import PieceStream
from tests.cluster.rig import Rig, in_virtual_time

# Small enough that calls wait in the fleet, wait in the replica, and are preempted.
LIMITS = BatchingLimits(60, 4, 18, sequences_max=3)


@dataclass
class Client:
    """Reads one call to its end, or leaves."""

    stream: PieceStream
    left: bool = False
    endings: list[str] = field(default_factory=list)

    async def read(self) -> None:
        try:
            async for piece in self.stream:
                if isinstance(piece, Finished):
                    self.endings.append(piece.reason)
        except Overloaded as refusal:
            self.endings.append(refusal.reason)


calls = st.tuples(
    st.just("call"), st.integers(1, 50), st.integers(1, 40), st.sampled_from([1, 1, 1, 2, 4])
)
acts = st.one_of(
    calls,
    calls,
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.1, 0.7, 5.0])),
    st.tuples(st.just("crash"), st.integers(0, 1)),
    st.tuples(st.just("deafen"), st.integers(0, 1)),
)


class World:
    """Clients and replicas that act at random on one gateway."""

    def __init__(self) -> None:
        self.rig = Rig(limits=LIMITS, replicas=2, queue_places=4, queue_wait_s=20.0)
        self.clients: list[Client] = []
        self.readers: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()

    async def call(self, prompt: int, output: int, choices: int) -> None:
        name = f"r{next(self._numbers)}"
        try:
            stream = await self.rig.generate(name, prompt=prompt, output=output, choices=choices)
        except (Overloaded, ContextExceeded, InvalidRequest):
            return
        self.clients.append(Client(stream))
        self.readers.append(asyncio.create_task(self.clients[-1].read()))

    async def leave(self, which: int) -> None:
        if self.clients:
            client = self.clients[which % len(self.clients)]
            client.left = True
            client.stream.cancel()

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def crash(self, which: int) -> None:
        process = self.rig.processes[f"tiny-{which}"]
        process.deaf = False
        if process.replica is not None:
            process.crash()

    async def deafen(self, which: int) -> None:
        """It hears nothing more, and is found hung and killed a little later."""
        process = self.rig.processes[f"tiny-{which}"]
        process.deaf = True

        def killed() -> None:
            if process.deaf and process.replica is not None:
                process.crash()
            process.deaf = False

        asyncio.get_running_loop().call_later(3.0, killed)


@given(st.lists(acts, min_size=5, max_size=40), st.booleans())
def test_d08_every_call_ends_once_and_nothing_is_held(steps, drains):
    async def work() -> None:
        world = World()
        gateway = world.rig.gateway
        await gateway.start()
        for act, *values in steps:
            await getattr(world, act)(*values)
        await (gateway.drain(3.0) if drains else asyncio.sleep(200))
        if drains:
            await gateway.close()
        async with asyncio.timeout(1):
            await asyncio.gather(*world.readers)
        world.rig.check_empty()
        for client in world.clients:
            assert len(client.endings) <= 1
            assert client.left or len(client.endings) == 1, "a call without an ending"

    in_virtual_time(work)
