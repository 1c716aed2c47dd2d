"""Whatever clients and replicas do, each admitted call ends once and the gateway then holds nothing.

Case D-08: no permit leaks after any sequence of cancels, losses, refusals and endings.
"""

import asyncio
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sluice.core.errors import ContextExceeded, InvalidRequest, Overloaded
from sluice.core.roster import BatchingLimits
from sluice.runtime.generation import Finished
from sluice.runtime.streams import PieceStream
from tests.cluster.rig import Rig, in_virtual_time

# Small enough that calls wait in the fleet, wait in the replica, and are preempted.
LIMITS = BatchingLimits(60, 4, 18, sequences_max=3, queue_places=100, queue_wait_ns_max=None)


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
    st.tuples(st.just("deaf"), st.integers(0, 1)),
)


@given(st.lists(acts, min_size=5, max_size=40), st.booleans())
def test_d08_every_call_ends_once_and_nothing_is_held(steps, drains):
    async def work() -> None:
        rig = Rig(limits=LIMITS, replicas=2, queue_places=4, queue_wait_s=20.0)
        await rig.gateway.start()
        clients: list[Client] = []
        readers: list[asyncio.Task[None]] = []
        for number, (act, *values) in enumerate(steps):
            match act:
                case "call":
                    prompt, output, choices = values
                    try:
                        stream = await rig.generate(
                            f"r{number % 7}", prompt=prompt, output=output, choices=choices
                        )
                    except (Overloaded, ContextExceeded, InvalidRequest):
                        continue
                    clients.append(Client(stream))
                    readers.append(asyncio.create_task(clients[-1].read()))
                case "leave":
                    if clients:
                        client = clients[values[0] % len(clients)]
                        client.left = True
                        client.stream.cancel()
                case "wait":
                    await asyncio.sleep(values[0])
                case "crash":
                    process = rig.processes[f"tiny-{values[0]}"]
                    if process.replica is not None:
                        process.deaf = False
                        process.crash()
                case "deaf":
                    # It hears nothing more, and is found hung and killed a little later.
                    process = rig.processes[f"tiny-{values[0]}"]
                    process.deaf = True
                    asyncio.get_running_loop().call_later(3.0, _killed, process)
        await (rig.gateway.drain(3.0) if drains else asyncio.sleep(200))
        if drains:
            await rig.gateway.close()
        await asyncio.wait_for(asyncio.gather(*readers), 1)
        rig.check_empty()
        for client in clients:
            assert len(client.endings) <= 1
            assert client.left or len(client.endings) == 1, "a call without an ending"

    in_virtual_time(work)


def _killed(process) -> None:
    if process.deaf:
        process.deaf = False
        if process.replica is not None:
            process.crash()
