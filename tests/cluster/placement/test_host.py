"""A replica lets in who knows its secret, reads the gateway's clock, and waits for the next one."""

import asyncio
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sluice.cluster.channel import ChannelClosed, ReplicaChannel
from sluice.cluster.placement.greeting import SECRET_BYTES, greet
from sluice.cluster.placement.host import ReplicaHost
from sluice.core.events import ReplicaLimits
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.messages import Drain, Ready

AHEAD_NS = 3_600_000_000_000


class Clockwork:
    """A replica that tells what the gateway's clock says, until it is drained."""

    closed = 0

    def live(self, channel: ReplicaChannel, clock: Callable[[], int]) -> None:
        channel.send([Ready(ReplicaLimits(1, 1, 1, 1), clock())])
        while not any(isinstance(message, Drain) for message in channel.receive(10)):
            pass

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def host(monkeypatch) -> Iterator[Any]:
    """A host of ``Clockwork``; ``life`` is that, ``over`` is set when its process would end."""
    life, over = Clockwork(), threading.Event()
    program: Any = types.ModuleType("clockwork_program")
    program.life_of = lambda boot: life
    monkeypatch.setitem(sys.modules, "clockwork_program", program)
    host: Any = ReplicaHost("clockwork_program", "boot", "127.0.0.1", 5.0, over.set)
    host.life, host.over = life, over
    yield host
    if not over.is_set():
        asyncio.run(told(host, drain=True))
    assert over.wait(10)


async def told(host: ReplicaHost, clock: Callable[[], int] = monotonic_ns, *, drain=False) -> int:
    """What the replica thinks of the gateway's clock, less what that says."""
    facts = host.facts()
    channel = await greet(facts.address, facts.secret, clock)
    (message,) = await channel.receive()
    assert isinstance(message, Ready)
    difference = clock() - message.load_ns
    if drain:
        channel.send_nowait(Drain(0))
        with pytest.raises(ChannelClosed):
            await channel.receive()
    channel.abort()
    return difference


@pytest.mark.parametrize("ahead_ns", [AHEAD_NS, -AHEAD_NS, 0])
def test_a_replica_reads_the_clock_of_a_gateway_on_another_machine(host, ahead_ns):
    difference = asyncio.run(told(host, lambda: monotonic_ns() + ahead_ns))
    assert 0 <= difference + 5_000_000 < 1_000_000_000, "within what the way takes"


def test_one_gateway_after_another_is_served_and_then_it_ends(host):
    for _ in range(3):
        asyncio.run(told(host))
    assert not host.over.is_set()
    asyncio.run(told(host, drain=True))
    assert host.over.wait(10)
    assert "told to end" in host.ending()
    assert host.life.closed == 1


def test_a_stranger_is_dropped_and_keeps_nobody_out(host):
    address = host.facts().address
    with socket.create_connection(address) as stranger:
        stranger.settimeout(10)
        stranger.sendall(b"x" * SECRET_BYTES)
        assert stranger.recv(1) == b"", "not even asked for its clock"
    asyncio.run(told(host))


def test_a_second_gateway_is_not_answered_while_one_is_served(host, monkeypatch):
    monkeypatch.setattr("sluice.cluster.placement.greeting.GREETING_S_MAX", 0.3)

    async def main() -> None:
        facts = host.facts()
        first = await greet(facts.address, facts.secret, monotonic_ns)
        await first.receive()
        assert host.facts().is_taken
        with pytest.raises(ChannelClosed, match="TimeoutError"):
            await greet(facts.address, facts.secret, monotonic_ns)
        first.abort()

    asyncio.run(main())
