"""A mixed fleet under random faults: one embedded model, a real llama.cpp server, a simulated vLLM.

Every request ends once, nothing is held afterwards, and the usage of each is right: in what its
client saw and in what the journal has of it. `HYPOTHESIS_PROFILE=nightly` sends 2,000 requests; the
default run a part of them.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import uvloop

from sluice.executors.http_connection import Disconnected
from sluice.executors.http_pool import Address
from sluice.telemetry import records
from sluice.telemetry.journal import JournalReader
from sluice.testing.engine_answers import delta, error_body
from sluice.testing.simulated_vllm import SimulatedVllm, Speed, text_of
from sluice.testing.upstream import (
    STREAM_HEAD,
    Close,
    Hold,
    Received,
    Reset,
    Script,
    ScriptedUpstream,
    Send,
    http_chunk,
    whole,
)
from tests.cluster.remote_rig import CHAT, Client, Seen, eventually, read
from tests.e2e.processes import ServerProcess
from tests.executors.llama_child import llama_child

pytestmark = [pytest.mark.model, pytest.mark.slow]

REQUESTS = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 300
AT_ONCE = 24
FAULTS = 0.1  # of the requests to the simulated engine
LEAVING = 0.06
KEY = "sk-mixed"
AS_TENANT = ("authorization", f"Bearer {KEY}")
SHARES = {"vllm": 0.78, "tiny": 0.16, "llama": 0.06}
MODELS = tuple(SHARES)
PROMPT = "Say one word."
SETTINGS = """
[models.tiny]
source = "{folder}"
context_tokens_max = 512
sequences_max = 8
kv_bytes = "64MiB"
threads = 1

[models.llama]
engine = "llama-server"
urls = ["http://127.0.0.1:{llama}"]
first_token_max = "30s"

[models.vllm]
engine = "vllm"
urls = ["http://127.0.0.1:{vllm}"]
first_token_max = "300ms"
silence_max = "300ms"
whole_max = "400ms"
probe = "200ms"

[tenants.all]
key_sha256_env = "MIXED_KEY"
concurrency = {at_once}
"""


def faults(chance: Random) -> Any:
    """What the simulated engine does to some requests, instead of answering."""
    token = http_chunk(delta({"role": "assistant", "content": ""}) + delta({"content": "x"}))
    broken = http_chunk(b"data: " + error_body("it broke", "InternalServerError", 500) + b"\n\n")
    scripts: list[Script] = [
        (Close(),),
        (Reset(),),
        (Hold(),),
        whole(b"<html>", 502, kind="text/html"),
        whole(b"{}", 503, ("retry-after-ms", "50")),
        whole(error_body("bad", "BadRequestError", 400), 400),
        (Send(STREAM_HEAD + broken), Close()),
        (Send(STREAM_HEAD + token), Close()),
        (Send(STREAM_HEAD + token + broken), Close()),
        (Send(STREAM_HEAD + token), Hold()),
        (Send(b"\x16\x03\x01"), Close()),
    ]

    def fault(_: Received) -> Script | None:
        return chance.choice(scripts) if chance.random() < FAULTS else None

    return fault


@dataclass
class Tally:
    """What became of all requests. ``usage`` is by request id, as clients were told."""

    endings: Counter[str] = field(default_factory=Counter)
    usage: dict[str, tuple[str, int, int]] = field(default_factory=dict)


class Crowd:
    """Clients that ask, read, and sometimes leave."""

    def __init__(self, client: Client, chance: Random) -> None:
        self.client = client
        self.chance = chance
        self.tally = Tally()

    async def run(self, requests: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with gate:
                self.tally.endings[await self.ask()] += 1

        await asyncio.gather(*(one() for _ in range(requests)))

    async def ask(self) -> str:
        """One request; what became of it, in a word."""
        (model,) = self.chance.choices(MODELS, tuple(SHARES.values()))
        tokens = self.chance.randint(1, 8 if model == "vllm" else 3)
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "temperature": 0,
        }
        if self.chance.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if model != "llama" and self.chance.random() < 0.03:  # which generates without end then
            body["max_tokens"] = -1
        connection = await self.client.send(CHAT, body, AS_TENANT)
        if self.chance.random() < LEAVING:
            with suppress(TimeoutError, Disconnected):
                async with asyncio.timeout(self.chance.random() * 0.05):
                    await connection.read_head()
            await self.client.leave(connection)
            return "left"
        try:
            seen = await read(connection)
        finally:
            self.client.pool.release(connection)
        return self._judged(seen, model, body)

    def _judged(self, seen: Seen, model: str, body: dict[str, Any]) -> str:
        assert not seen.cut
        if seen.status != 200:
            assert seen.error["message"]
            assert not seen.headers["content-type"].startswith("text/event-stream")
            return str(seen.status)
        if seen.error is not None:
            assert "stream" in body
            assert "[DONE]" not in seen.events
            return "error event"
        if "stream" in body:
            assert seen.events[-1] == "[DONE]"
            told = [one["usage"] for one in seen.events[:-1] if one.get("usage")]
            assert len(told) == 1
            usage = told[0]
        else:
            usage = seen.json["usage"]
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        assert usage["total_tokens"] == prompt + completion
        assert 1 <= completion <= body["max_tokens"]
        if model == "vllm":
            assert (prompt, completion) == (len(PROMPT.split()), body["max_tokens"])
            assert seen.text == text_of(completion)
        self.tally.usage[seen.headers["x-request-id"]] = (model, prompt, completion)
        return "whole"


@pytest.fixture
def llama(smollm2_gguf: Path, tmp_path: Path) -> Iterator[Address]:
    with llama_child(smollm2_gguf, tmp_path / "llama.log") as address:
        yield address


def test_every_request_of_a_mixed_fleet_ends_once_and_nothing_leaks(
    llama: Address, smollm2_folder: Path, tmp_path: Path
) -> None:
    chance = Random(20261130)
    engine = SimulatedVllm(Speed(slots=16), faults(chance))

    async def check(server: ServerProcess, upstream: ScriptedUpstream) -> Tally:
        await asyncio.to_thread(server.wait_ready)
        client = Client(Address(server.target.host, server.target.port))
        crowd = Crowd(client, chance)
        await crowd.run(REQUESTS // 2)
        # A native crash, with work on board.
        await asyncio.gather(crowd.run(REQUESTS - REQUESTS // 2), kill_later(server))
        upstream.release()
        await drained(client, llama)
        await eventually(lambda: engine.running + engine.waiting == 0)
        engine.fault = lambda _: None
        async with asyncio.timeout(20):
            while not await recovered(client):  # an open breaker is closed by a request
                await crowd.run(3)
                await asyncio.sleep(0.1)
        await drained(client, llama)
        assert await at_once(client) == [200] * AT_ONCE
        await drained(client, llama)
        tally = crowd.tally
        assert tally.endings.total() >= REQUESTS
        counted = await client.metrics()
        await client.pool.close()
        check_counts(counted, tally)
        return tally

    async def kill_later(server: ServerProcess) -> None:
        await asyncio.sleep(0.5)
        psutil.Process(server.replica_of("tiny")).send_signal(signal.SIGKILL)

    async def go() -> Tally:
        async with ScriptedUpstream(engine.route) as upstream:
            text = SETTINGS.format(
                folder=smollm2_folder, llama=llama.port, vllm=upstream.port, at_once=AT_ONCE
            )
            (tmp_path / "sluice.toml").write_text(text)
            environment = {**os.environ, "MIXED_KEY": sha256(KEY.encode()).hexdigest()}
            server = ServerProcess(
                tmp_path / "server", ["-c", str(tmp_path / "sluice.toml")], environment
            )
            try:
                tally = await check(server, upstream)
                assert await asyncio.to_thread(server.stop) == 0, server.output
            finally:
                server.destroy()
            return tally

    tally = uvloop.run(go())
    check_journal(tmp_path / "server" / "journal", tally)


async def drained(client: Client, llama: Address) -> None:
    """Wait until neither the server nor the real engine holds anything."""
    gauges = ("requests_in_flight", "requests_running", "requests_waiting", "queue_places")
    async with asyncio.timeout(20):
        while True:
            counted = await client.metrics()
            held = [counted[gauge, model] for gauge in gauges for model in MODELS]
            if not any(held) and counted["kv_blocks_used", "tiny", "tiny-0"] == 0:
                break
            await asyncio.sleep(0.05)
    engine = Client(llama)
    page = await engine.get("/metrics")
    await engine.pool.close()
    assert b"llamacpp:requests_processing 0" in page.body
    assert b"llamacpp:requests_deferred 0" in page.body


async def recovered(client: Client) -> bool:
    """Whether the replica that was killed serves again, and none is shut for its faults."""
    counted = await client.metrics()
    states = {(key[0], key[-1]): number for key, number in counted.items() if "tiny-0" in key}
    shut = any(number for key, number in counted.items() if key[0] == "replica_breaker_open")
    return states["replica_state", "ready"] == 1 and not shut


async def at_once(client: Client) -> list[int]:
    """As many requests as the tenant may have: one permit that leaked would refuse one of them."""
    asked = (
        client.ask(
            model=MODELS[number % 3],
            headers=[AS_TENANT],
            streamed=False,
            max_tokens=2,
        )
        for number in range(AT_ONCE)
    )
    return [seen.status for seen in await asyncio.gather(*asked)]


def check_counts(counted: dict[tuple[str, ...], float], tally: Tally) -> None:
    """The server counts an ending for each request, as its client saw it."""
    ended = Counter[str]()
    for key, number in counted.items():
        if key[0] in {"requests_ended_total", "refusals_total"}:
            ended[key[2]] += int(number)
    finished = tally.endings["whole"] + AT_ONCE
    # Some of those who left had been answered by then, or had failed, or were refused.
    left = tally.endings["left"]
    asked = tally.endings.total() + AT_ONCE
    assert asked - left <= ended.total() <= asked
    assert finished <= ended["stop"] + ended["length"] <= finished + left
    assert ended["cancelled"] <= left
    told = sum(
        number for ending, number in tally.endings.items() if ending not in {"whole", "left"}
    )
    others = ended.total() - ended["stop"] - ended["length"] - ended["cancelled"]
    assert told <= others <= told + left


def check_journal(folder: Path, tally: Tally) -> None:
    """Each request has one ending there, with the usage that its client was told."""
    endings = dict[str, records.RequestEnded]()
    for entry in JournalReader(folder).entries():
        record = entry.record
        if isinstance(record, records.RequestEnded):
            assert record.id not in endings
            endings[record.id] = record
    for request_id, (model, prompt, completion) in tally.usage.items():
        record = endings[request_id]
        assert record.model == model
        assert (record.prompt_tokens, record.completion_tokens) == (prompt, completion)
        assert record.reason in {"stop", "length"}
    for record in endings.values():
        if record.reason == "failed" and record.completion_tokens == 0 and record.model != "tiny":
            assert record.prompt_tokens == 0
    assert {model for model, _, _ in tally.usage.values()} == set(MODELS)
