"""A machine takes the replicas that fit, and says of others what they need and what there is."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest

from sluice.cluster.placement import local
from sluice.cluster.placement.local import LocalPlacement, Machine
from sluice.cluster.placement.placed import Needs, NotPlaced

GIB = 2**30
MACHINE = Machine(cpus=4, gpus=1, memory_bytes=8 * GIB)
# Waits for its channel to close, as a replica does.
WAITS = (sys.executable, "-c", "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)")


def on_a_machine(work: Callable[[LocalPlacement], Awaitable[None]]) -> None:
    asyncio.run(_run(work))


async def _run(work: Callable[[LocalPlacement], Awaitable[None]]) -> None:
    await work(LocalPlacement(MACHINE))


@pytest.fixture(autouse=True)
def _free_memory(monkeypatch):
    monkeypatch.setattr(local, "free_memory_bytes", lambda: 6 * GIB)


@pytest.mark.parametrize(
    ("needs", "words", "permanent"),
    [
        (Needs(cpus=5), "needs 5 processors; this machine has 4", True),
        (Needs(gpus=2), "needs 2 GPUs; this machine has 1", True),
        (Needs(memory_bytes=9 * GIB), "needs 9.00 GiB of memory; 6.00 GiB are free", True),
        (Needs(memory_bytes=7 * GIB), "needs 7.00 GiB of memory; 6.00 GiB are free", False),
        (Needs(resources=(("tpu", 1.0),)), "no tpu", True),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(needs, words, permanent):
    async def work(placement: LocalPlacement) -> None:
        with pytest.raises(NotPlaced, match=words) as refused:
            await placement.place(WAITS, needs)
        assert refused.value.permanent is permanent

    on_a_machine(work)


def test_processors_of_others_are_counted_until_they_have_ended():
    async def work(placement: LocalPlacement) -> None:
        first = await placement.place(WAITS, Needs(cpus=3))
        with pytest.raises(NotPlaced, match="of which other replicas have 3") as refused:
            await placement.place(WAITS, Needs(cpus=2))
        assert not refused.value.permanent, "it fits when the other one has ended"
        first.channel.abort()
        assert await first.leave(10) == "the process exited with status 0"
        second = await placement.place(WAITS, Needs(cpus=2))
        second.channel.abort()
        await second.leave(0)

    on_a_machine(work)


def test_memory_that_a_loading_replica_will_take_is_not_given_to_another():
    async def work(placement: LocalPlacement) -> None:
        first = await placement.place(WAITS, Needs(memory_bytes=4 * GIB))
        with pytest.raises(NotPlaced, match="for replicas that are loading"):
            await placement.place(WAITS, Needs(memory_bytes=3 * GIB))
        first.channel.abort()
        await first.leave(0)
        second = await placement.place(WAITS, Needs(memory_bytes=3 * GIB))
        second.channel.abort()
        await second.leave(0)

    on_a_machine(work)
