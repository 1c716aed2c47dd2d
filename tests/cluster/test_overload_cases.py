"""Cases D-08 and D-11 through the gateway, over a scripted replica in virtual time."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from sluice.config.sections import SloSection
from sluice.core.errors import ModelNotFound, Overloaded
from sluice.core.limits import TenantLimits
from sluice.core.request import EndReason
from sluice.runtime.generation import Call, Delta, TokenPrompt
from sluice.runtime.streams import PieceStream
from sluice.telemetry.journal import Clocks, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.records import RequestArrived
from sluice.testing.processes import VirtualTimeLoop
from tests.cluster.overload_rig import OverloadRig, S
from tests.cluster.rig import ending, in_virtual_time

STEP_S = 0.1
SERVICE_S = 2.0  # 20 tokens, one for each step


def now_s() -> float:
    return asyncio.get_running_loop().time()


def virtual(work: Callable[[OverloadRig], Awaitable[None]], **settings) -> None:
    """Run a test over a rig that has started."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        rig = OverloadRig(loop.now_ns, **settings)
        await rig.gateway.start()
        await work(rig)
        await rig.gateway.close()

    in_virtual_time(main)


async def first_token_s(stream: PieceStream) -> float:
    """When its first token came; the rest is read."""
    first = None
    async for piece in stream:
        if isinstance(piece, Delta) and first is None:
            first = now_s()
    assert first is not None
    return first


# ------------------------------------------------------------------------------------------ D-11


def test_d11_an_urgent_request_goes_next_and_each_priority_keeps_its_order():
    async def work(rig: OverloadRig) -> None:
        await ending(await rig.generate("warm-up"))
        low = []
        for number in range(30):
            low.append(asyncio.create_task(first_token_s(await rig.generate(f"low{number}"))))
            await asyncio.sleep(0.01)
        arrived_s = now_s()
        high = asyncio.create_task(first_token_s(await rig.generate("high", priority=0)))
        high_s = await high
        low_s = [await one for one in low]
        # The first four began at once, 2 s each: the first of them is over before that.
        assert high_s - arrived_s <= low_s[0] - STEP_S + SERVICE_S - arrived_s + 2 * STEP_S
        assert sum(at_s < high_s for at_s in low_s) <= 4
        assert low_s == sorted(low_s)

    virtual(work)


async def urgent_load(rig: OverloadRig, seconds: float, of_capacity: float) -> list[float]:
    """Requests of tier 0 at a steady rate; the times to their first tokens."""
    interval_s = SERVICE_S / 4 / of_capacity
    numbers = itertools.count()
    waits: list[asyncio.Task[float]] = []

    async def one(number: int) -> float:
        start_s = now_s()
        return await first_token_s(await rig.generate(f"high{number}", priority=0)) - start_s

    end_s = now_s() + seconds
    while now_s() < end_s:
        waits.append(asyncio.create_task(one(next(numbers))))
        await asyncio.sleep(interval_s)
    return [await wait for wait in waits]


async def patient(rig: OverloadRig, count: int) -> list[asyncio.Task[float]]:
    """Requests of tier 5 that arrive together; the times to their first tokens."""
    start_s = now_s()

    async def one(stream: PieceStream) -> float:
        return await first_token_s(stream) - start_s

    streams = [await rig.generate(f"low{number}", priority=5) for number in range(count)]
    return [asyncio.create_task(one(stream)) for stream in streams]


def test_d11_with_aging_every_patient_request_starts_within_the_bound():
    async def work(rig: OverloadRig) -> None:
        await ending(await rig.generate("warm-up"))
        load = asyncio.create_task(urgent_load(rig, 600.0, 0.95))
        await asyncio.sleep(20.0)
        low = await patient(rig, 20)
        waits_s = [await one for one in low]
        assert max(waits_s) <= 30.0 + SERVICE_S
        assert waits_s == sorted(waits_s)
        high_s = await load
        assert len(high_s) > 1000

    virtual(work, pool={"aging_ns": 30 * S, "queue_wait_ns_max": 900 * S})


def test_d11_with_strict_order_the_longest_wait_of_the_tier_rises_instead():
    async def work(rig: OverloadRig) -> None:
        await ending(await rig.generate("warm-up"))
        load = asyncio.create_task(urgent_load(rig, 300.0, 1.0))
        await asyncio.sleep(20.0)
        low = await patient(rig, 20)
        await asyncio.sleep(60.0)
        early = rig.value("tier_wait_seconds", "tiny", "5")
        await asyncio.sleep(60.0)
        late = rig.value("tier_wait_seconds", "tiny", "5")
        assert early == pytest.approx(60, abs=5)
        assert late == pytest.approx(early + 60, abs=5)
        await load
        for one in low:
            await one
        assert rig.value("tier_wait_seconds", "tiny", "5") == 0.0

    virtual(work, pool={"aging_ns": None, "queue_wait_ns_max": 900 * S})


def test_d11_the_trace_shows_the_priority_that_was_used(tmp_path):
    async def work(rig: OverloadRig) -> None:
        await ending(await rig.generate("as-default"))
        await ending(await rig.generate("as-class", slo_class="urgent"))
        await ending(await rig.generate("as-asked", slo_class="urgent", priority=7))

    clocks = Clocks(lambda: 0, lambda: 0)
    journal = JournalWriter(tmp_path, "gateway", clocks, JournalLimits())
    virtual(work, slo={"urgent": SloSection(tier=0)}, journal=journal)
    journal.close()
    arrived = {
        entry.record.id: entry.record.tier
        for entry in JournalReader(tmp_path).entries()
        if isinstance(entry.record, RequestArrived)
    }
    assert arrived == {"as-default": 1, "as-class": 0, "as-asked": 7}


# ------------------------------------------------------------------------------------------ D-08

TWO = (TenantLimits("acme", concurrency=2, requests_per_minute=10_000),)


async def begun(rig: OverloadRig, name: str) -> PieceStream:
    """A stream of the limited tenant that has given its first token."""
    stream = await rig.generate(name, tenant="acme", output=100)
    async for piece in stream:
        if isinstance(piece, Delta):
            break
    return stream


async def leave(rig: OverloadRig, name: str) -> None:
    (await begun(rig, name)).cancel()


async def hang(rig: OverloadRig, name: str) -> None:
    """The replica falls silent with the call on board and is killed for it."""
    stream = await begun(rig, name)
    rig.process.deaf = True
    rig.process.crash("silent", silent=True)
    rig.process.deaf = False
    assert (await ending(stream)).reason is EndReason.FAILED
    while not rig.gateway.readiness().ready:  # noqa: ASYNC110 - time is virtual
        await asyncio.sleep(0.01)


async def fail(rig: OverloadRig, name: str) -> None:
    """The engine cannot compute the call."""
    rig.failing.add(name)
    stream = await rig.generate(name, tenant="acme")
    assert (await ending(stream)).reason is EndReason.FAILED


async def mistake(rig: OverloadRig, name: str) -> None:
    with pytest.raises(ModelNotFound):
        await rig.gateway.generate(
            Call(name, "unknown", rig.clock(), TokenPrompt((1,)), tenant="acme")
        )


async def stall(rig: OverloadRig, name: str) -> None:
    """The client stops reading; the server gives it up while the answer goes on."""
    stream = await begun(rig, name)
    await asyncio.sleep(1.0)
    stream.cancel()


CYCLES = (*[leave] * 50, *[hang] * 20, *[fail] * 20, *[mistake] * 20, *[stall] * 20)


def test_d08_no_permit_leaks_in_any_way_to_end():
    async def work(rig: OverloadRig) -> None:
        for number, cycle in enumerate(CYCLES):
            # One beside it: at no time is the second refused.
            beside = await rig.generate(f"beside{number}", tenant="acme", output=1)
            await cycle(rig, f"call{number}")
            beside.cancel()
        await asyncio.sleep(2.0)
        assert rig.value("requests_in_flight") == 0
        assert not rig.driver._fleet._ledger._reserved
        assert rig.value("refusals_total", "concurrency") == 0
        last = [await rig.generate(name, tenant="acme") for name in ("one", "two")]
        with pytest.raises(Overloaded) as caught:
            await rig.generate("three", tenant="acme")
        assert (caught.value.reason, caught.value.measured) == ("concurrency", 3)
        for stream in last:
            assert (await ending(stream)).reason is EndReason.LENGTH

    virtual(work, tenants=TWO)


def test_d08_a_refused_request_uses_up_no_other_quota():
    async def work(rig: OverloadRig) -> None:
        streams = [await rig.generate(name, tenant="acme") for name in ("a", "b")]
        before = rig.gateway.allowance("acme")
        assert before is not None
        for number in range(20):
            with pytest.raises(Overloaded):
                await rig.generate(f"refused{number}", tenant="acme")
        assert rig.gateway.allowance("acme") == before
        for stream in streams:
            await ending(stream)

    virtual(work, tenants=TWO)


def test_d08_calls_of_other_tenants_are_not_counted():
    async def work(rig: OverloadRig) -> None:
        streams = [await rig.generate(str(number), tenant="other") for number in range(8)]
        streams += [await rig.generate(name, tenant="acme") for name in ("a", "b")]
        for stream in streams:
            assert (await ending(stream)).reason is EndReason.LENGTH

    virtual(work, tenants=TWO)
