"""The simulated vLLM behaves as one behind the real client: slots, gauges, usage, leaving."""

import asyncio
from typing import Any

import msgspec

from sluice.executors.remote import RemoteEngine
from sluice.executors.stream import ClientError
from sluice.testing.simulated_vllm import SimulatedVllm, Speed, text_of
from sluice.testing.upstream import ScriptedUpstream
from tests.executors.stream_rig import engine_for, request, run, take

SLOW = Speed(slots=2, prefill_s=0.0, token_s=0.05)


def asked(tokens: int, *, streamed: bool = True, **more):
    fields: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a b c"}]}
    fields |= {"max_tokens": tokens, "stream": streamed, **more}
    if streamed:
        fields["stream_options"] = {"include_usage": True}
    return request(streamed=streamed, body=msgspec.json.encode(fields))


def with_engine(speed, check):
    async def go():
        engine = SimulatedVllm(speed)
        async with ScriptedUpstream(engine.route) as upstream, engine_for(upstream) as client:
            return await check(engine, client)

    return run(go)


def test_both_kinds_of_answer_have_the_same_text_and_usage():
    async def check(engine: SimulatedVllm, client: RemoteEngine):
        for streamed in (True, False):
            taken = await take(client, asked(5, streamed=streamed))
            assert taken.fault is None
            assert (taken.usage.prompt_tokens, taken.usage.completion_tokens) == (3, 5)
            words = [word for word in text_of(5).split() if word.encode() in taken.raw]
            assert words == ["w0", "w1", "w2", "w3", "w4"]
        assert (engine.completed, engine.running, engine.waiting) == (2, 0, 0)

    with_engine(Speed(), check)


def test_what_has_no_slot_waits_in_it_and_its_gauges_say_so():
    async def check(engine: SimulatedVllm, client: RemoteEngine):
        tasks = [asyncio.ensure_future(take(client, asked(2))) for _ in range(5)]
        await engine.until(lambda: engine.running + engine.waiting == 5)
        gauges = (await client.probe()).gauges
        assert gauges is not None
        assert (gauges.running, gauges.waiting) == (2, 3)
        assert all(taken.fault is None for taken in await asyncio.gather(*tasks))

    with_engine(SLOW, check)


def test_who_leaves_frees_its_slot_and_its_place_in_the_queue():
    async def check(engine: SimulatedVllm, client: RemoteEngine):
        tasks = [asyncio.ensure_future(take(client, asked(500))) for _ in range(4)]
        await engine.until(lambda: engine.running + engine.waiting == 4)
        for task in tasks:
            task.cancel()
        await engine.until(lambda: not engine.running + engine.waiting, within_s=1)
        assert engine.left == 4
        assert (await take(client, asked(1))).fault is None

    with_engine(SLOW, check)


def test_more_than_the_context_is_the_clients_fault():
    async def check(_: SimulatedVllm, client: RemoteEngine):
        fault = (await take(client, asked(5000))).fault
        assert isinstance(fault, ClientError)
        assert fault.reply.status == 400

    with_engine(Speed(), check)
