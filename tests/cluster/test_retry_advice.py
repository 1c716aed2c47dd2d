"""Clients that come back when they were told to are served, and do not come as a wave."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean

import pytest

from sluice.config.sections import SloSection
from sluice.core.errors import Overloaded
from sluice.testing.processes import VirtualTimeLoop
from tests.cluster.overload_rig import OverloadRig
from tests.cluster.rig import ending, in_virtual_time

SLOTS = 4
CAPACITY_RPS = 2.0  # four slots, 2 s each
LOAD = 2.0
SECONDS = 150.0
WINDOW_S = 5.0
# Clients use milliseconds, and their requests take a moment to get here.
ON_THE_WAY_S = 0.005


@dataclass
class Crowd:
    """Clients that arrive at random; a share of those refused comes back once, as told."""

    rig: OverloadRig
    patience: float
    chance: Random
    served: int = 0
    served_rps: float = 0.0
    retries: list[str] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)

    async def ask(self, name: str, like: str) -> None:
        """One request, with the prompt of another. Raises ``Overloaded``."""
        call = replace(self.rig.call(like), id=name)
        stream = await self.rig.gateway.generate(call)
        await stream.settled()
        await ending(stream)
        self.served += 1

    async def client(self, name: str) -> None:
        try:
            await self.ask(name, name)
        except Overloaded as refusal:
            wait_s = refusal.retry_after_s
            if wait_s is None or not refusal.should_retry:
                return
        else:
            return
        self.told_s.append(asyncio.get_running_loop().time() + wait_s)
        if self.chance.random() >= self.patience:
            return
        await asyncio.sleep(wait_s + ON_THE_WAY_S)
        try:
            await self.ask(f"{name} again", name)
        except Overloaded as refusal:
            self.retries.append(refusal.reason)
        else:
            self.retries.append("served")

    async def arrive(self, load: float) -> None:
        loop = asyncio.get_running_loop()
        clients: list[asyncio.Task[None]] = []
        end_s = loop.time() + SECONDS
        while loop.time() < end_s:
            clients.append(asyncio.create_task(self.client(f"client{len(clients)}")))
            await asyncio.sleep(self.chance.expovariate(load * CAPACITY_RPS))
        self.served_rps = self.served / SECONDS
        await asyncio.gather(*clients)

    def peak_to_mean(self) -> float:
        """Of the told times in windows, without the first and the last part of the crowd."""
        inner = [at_s for at_s in self.told_s if SECONDS / 3 <= at_s < SECONDS]
        windows = [0] * int(2 * SECONDS / 3 / WINDOW_S)
        for at_s in inner:
            windows[int((at_s - SECONDS / 3) / WINDOW_S)] += 1
        return max(windows) / mean(windows)


TARGET = {"slo": {"quick": SloSection(ttft_s=3.0)}, "slo_default": "quick"}
NO_TARGET = {"pool": {"queue_places_max": 4}}


@pytest.mark.parametrize("settings", [TARGET, NO_TARGET], ids=["target", "no-target"])
@pytest.mark.parametrize("patience", [1.0, 0.5])
def test_nine_of_ten_that_wait_as_told_are_served_at_the_first_retry(patience, settings):
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        rig = OverloadRig(loop.now_ns, slots=SLOTS, **settings)
        await rig.gateway.start()
        crowd = Crowd(rig, patience, Random(3))
        await crowd.arrive(LOAD)
        assert len(crowd.retries) > 100
        assert crowd.retries.count("served") >= 0.9 * len(crowd.retries)
        assert crowd.peak_to_mean() < 1.5
        # Places are kept for those who come back, and the slots are busy all the same.
        assert crowd.served_rps >= 0.8 * CAPACITY_RPS
        await rig.gateway.close()

    in_virtual_time(work)
