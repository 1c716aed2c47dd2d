"""How the server behaves towards clients while its engines fail: over time, and over several."""

import asyncio
import json
import time
from collections import Counter
from hashlib import sha256

import pytest

from sluice.telemetry.journal import JournalReader
from sluice.telemetry.life import find_life
from sluice.testing.engine_answers import DONE, delta, error_body, usage_event
from sluice.testing.simulated_vllm import SimulatedVllm, Speed, text_of
from sluice.testing.upstream import (
    STREAM_HEAD,
    Close,
    Hold,
    Received,
    Script,
    ScriptedUpstream,
    Send,
    http_chunk,
    stream,
    whole,
)
from tests.cluster.remote_rig import CHAT, Front, Settings, eventually, front
from tests.executors.stream_rig import run

ROLE = delta({"role": "assistant", "content": ""})
TOKEN = delta({"content": "a"})
ERROR = b"data: " + error_body("it broke", "InternalServerError", 500) + b"\n\n"
GOOD = stream([ROLE, TOKEN, delta({}, "stop"), usage_event(1), DONE])
BUSY = whole(error_body("queue is full", "ServiceUnavailableError", 503), 503)
CANCELLED_WITHIN_S = 0.1
KEY = b"sk-tenant-t"
AS_TENANT = ("authorization", f"Bearer {KEY.decode()}")
ASKED = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
# Deadlines that no test here is to run into.
PATIENT = Settings(deadline_s=20)
ONE_AT_A_TIME = Settings(deadline_s=20, text="in_flight_max = 1")


def well(received: Received) -> Script | None:
    """What an engine without load says to everything but requests."""
    if received.path == "/metrics":
        return whole(SimulatedVllm().metrics().encode(), kind="text/plain")
    return None if received.path.startswith("/v1/chat") else whole(b"{}")


def only(script: Script):
    """An engine that answers every request so."""
    return lambda received: well(received) or script


def hits(one: Front) -> list[int]:
    return [upstream.hits(CHAT) for upstream in one.upstreams]


# ------------------------------------------------------------------------------------ D-12, D-13


def test_d12_both_fail_early_and_the_client_gets_no_stream(tmp_path):
    first = (Send(STREAM_HEAD), Send(http_chunk(ROLE)), Send(http_chunk(ERROR)), Close())
    second = whole(b"", 503, ("retry-after", "3"))

    async def check():
        async with front(tmp_path, only(first), only(second)) as one:
            seen = await one.ask()
            assert (seen.status, hits(one)) == (503, [1, 1])
            assert seen.headers["content-type"] == "application/json"
            assert seen.headers["retry-after"] == "3"
            assert seen.error["code"] == "upstream_busy"
            return seen.headers["x-request-id"]

    life = find_life(JournalReader(tmp_path / "journal"), run(check))
    assert life is not None
    assert [(one.replica, one.attempt, one.error) for one in life.decisions] == [
        ("m-0", 1, ""),
        ("m-0", 1, "m-0: the engine failed, status 500"),
        ("m-1", 2, ""),
        ("m-1", 2, "m-1: busy, status 503"),
    ]


def test_d12_the_second_answers_with_one_role_and_one_id(tmp_path):
    first = (Send(STREAM_HEAD), Send(http_chunk(ROLE)), Send(http_chunk(ERROR)), Close())
    engine = SimulatedVllm()

    async def check():
        async with front(tmp_path, only(first), engine.route) as one:
            seen = await one.ask(max_tokens=3)
            assert (seen.status, seen.text, hits(one)) == (200, text_of(3), [1, 1])
            chunks = [event for event in seen.events if event != "[DONE]"]
            roles = [c for e in chunks for c in e["choices"] if c["delta"].get("role")]
            assert len(roles) == 1
            assert len({event["id"] for event in chunks}) == 1

    run(check)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_d13_two_retries_are_three_hits(tmp_path, streamed):
    async def check():
        async with front(tmp_path, only(BUSY), text="retries = 2") as one:
            seen = await one.ask(streamed=streamed)
            assert (seen.status, hits(one)) == (503, [3])

    run(check)


def test_d13_with_another_replica_the_attempts_of_a_request_stay_the_same(tmp_path):
    async def check():
        async with front(tmp_path, only(BUSY), only(BUSY), text="retries = 2") as one:
            seen = await one.ask()
            assert (seen.status, sum(hits(one))) == (503, 3)
            assert sorted(hits(one)) == [1, 2]

    run(check)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
def test_d13_what_the_engine_finds_wrong_is_asked_once(tmp_path, status):
    async def check():
        refusal = whole(error_body("no", "invalid_request_error", None), status)
        async with front(tmp_path, only(refusal), only(refusal), text="retries = 3") as one:
            for _ in range(20):
                seen = await one.ask()
                assert seen.status == status
            assert sum(hits(one)) == 20
            assert all(r.breaker != "open" for p in one.gateway.pools() for r in p.replicas)

    run(check)


@pytest.mark.parametrize("status", [401, 403])
def test_a_replica_that_refuses_this_servers_key_does_not_swallow_the_traffic(tmp_path, status):
    async def check():
        refusal = whole(error_body("bad key", "invalid_request_error", None), status)
        async with front(tmp_path, only(refusal), SimulatedVllm().route) as one:
            for _ in range(20):
                assert (await one.ask(max_tokens=2)).status == 200
            assert hits(one) == [5, 20]
            (pool,) = one.gateway.pools()
            assert [replica.breaker for replica in pool.replicas] == ["open", "closed"]

    run(check)


def test_d13_an_outage_is_not_multiplied(tmp_path):
    requests = 300

    async def check():
        async with front(tmp_path, only(whole(b"{}", 500)), text="retries = 2") as one:
            statuses = Counter[int]()
            for _ in range(requests):
                seen = await one.ask(streamed=False)
                statuses[seen.status] += 1
            assert set(statuses) <= {502, 503}
            assert sum(hits(one)) <= 1.1 * requests + 10

    run(check)


def test_d13_a_time_that_the_engine_names_is_kept_before_it_is_asked_again(tmp_path):
    times = []

    def route(received: Received) -> Script:
        if (answer := well(received)) is not None:
            return answer
        times.append(time.monotonic())
        return whole(b"{}", 503, ("retry-after-ms", "300")) if len(times) == 1 else GOOD

    async def check():
        async with front(tmp_path, route) as one:
            seen = await one.ask()
            assert (seen.status, seen.error) == (200, None)
            assert times[1] - times[0] >= 0.3

    run(check)


# -------------------------------------------------------------------------------- several replicas


async def load(one: Front, requests: int, at_once: int = 12, **fields) -> Counter[str]:
    """Ask many times, ``at_once`` at a time; the statuses and errors that clients saw."""
    told, gate = Counter[str](), asyncio.Semaphore(at_once)

    async def ask(number: int) -> None:
        async with gate:
            seen = await one.ask(streamed=number % 2 == 0, **fields)
            told[f"{seen.status}{' error' if seen.error else ''}"] += 1

    await asyncio.gather(*(ask(number) for number in range(requests)))
    return told


def test_a_slow_replica_of_three_gets_less_and_nobody_fails(tmp_path):
    quick, slow = Speed(slots=8, token_s=0.002), Speed(slots=8, prefill_s=0.2, token_s=0.03)
    engines = [SimulatedVllm(quick), SimulatedVllm(slow), SimulatedVllm(quick)]

    async def check():
        routes = [engine.route for engine in engines]
        async with front(tmp_path, *routes, settings=PATIENT) as one:
            assert await load(one, 120, max_tokens=8) == {"200": 120}
            assert hits(one)[1] < 20
            assert min(hits(one)[0], hits(one)[2]) > 40

    run(check)


def test_a_replica_that_lies_about_its_health_is_found_out_and_comes_back(tmp_path):
    liar, engine = SimulatedVllm(fault=lambda _: whole(b"{}", 500)), SimulatedVllm()

    async def check():
        async with front(tmp_path, liar.route, engine.route) as one:
            assert await load(one, 60, at_once=4, max_tokens=2) == {"200": 60}
            assert hits(one)[0] <= 10
            (pool,) = one.gateway.pools()
            assert [replica.breaker for replica in pool.replicas] == ["open", "closed"]
            metrics = await one.metrics()
            assert metrics["replica_breaker_open", "m", "m-0"] == 1
            liar.fault = lambda _: None
            async with asyncio.timeout(5):
                while liar.completed < 3:
                    assert await load(one, 4, at_once=4, max_tokens=2) == {"200": 4}
                    await asyncio.sleep(0.05)

    run(check)


def test_all_gone_is_told_with_the_time_to_ready_and_service_goes_on_when_one_is_back(tmp_path):
    engine = SimulatedVllm()

    async def check():
        async with front(tmp_path, engine.route) as one:
            assert (await one.ask()).status == 200
            (upstream,) = one.upstreams
            port = upstream.port
            await upstream.stop()
            async with asyncio.timeout(5):
                while (seen := await one.ask()).status != 503:
                    assert seen.status == 502
                    await asyncio.sleep(0.02)
            assert seen.error["code"] == "not_ready"
            assert 1 <= int(seen.headers["retry-after"]) <= 30
            assert (await one.get("/health")).status == 200
            await upstream.start(port)
            statuses = [seen.status]
            async with asyncio.timeout(5):
                while statuses[-1] != 200:
                    await asyncio.sleep(0.02)
                    statuses.append((await one.ask()).status)
            assert set(statuses[:-1]) <= {503}

    run(check)


def test_a_replica_that_hangs_is_left_for_another_one(tmp_path):
    engine, hangs = SimulatedVllm(), False

    def route(received: Received) -> Script:
        return (Hold(),) if hangs else engine.route(received)

    async def check():
        nonlocal hangs
        async with front(tmp_path, route, SimulatedVllm().route) as one:
            assert await load(one, 10, max_tokens=2) == {"200": 10}
            hangs = True
            before = hits(one)[0]
            assert await load(one, 60, at_once=6, max_tokens=2) == {"200": 60}
            assert hits(one)[0] - before <= 12
            one.upstreams[0].release()

    run(check)


def test_what_a_dead_engine_holds_goes_elsewhere_though_nothing_bounds_the_answer(tmp_path):
    is_dead = False

    def route(received: Received) -> Script:
        if is_dead and not received.path.startswith("/v1/chat"):
            return whole(b"", 500)
        return well(received) or (Hold(),)

    settings = Settings(deadline_s=0.3, whole_s=60)

    async def check():
        nonlocal is_dead
        async with front(tmp_path, route, SimulatedVllm().route, settings=settings) as one:
            asked = asyncio.ensure_future(one.ask(streamed=False, max_tokens=2))
            await one.upstreams[0].until(lambda: hits(one)[0] == 1)
            is_dead = True
            assert ((await asked).status, hits(one)) == (200, [1, 1])
            one.upstreams[0].release()

    run(check)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_another_model_answers_for_one_whose_engines_fail_and_says_so(tmp_path, streamed):
    engine = SimulatedVllm()

    async def check():
        async with ScriptedUpstream(engine.route) as other:
            table = f"""[models.n]
engine = "vllm"
urls = ["http://127.0.0.1:{other.port}"]"""
            settings = Settings(text='fallback = ["n"]', tables=table)
            async with front(tmp_path, only(whole(b"", 500)), settings=settings) as one:
                seen = await one.ask(streamed=streamed, max_tokens=3)
                assert (seen.status, seen.error, seen.text) == (200, None, text_of(3))
                assert seen.headers["x-sluice-model"] == "n"
                assert seen.headers["x-sluice-degraded"].startswith("fallback")
                forbids = ("x-sluice-degrade", "never")
                refused = await one.ask(streamed=streamed, headers=[forbids])
                assert refused.status == 502
                assert (hits(one), other.hits(CHAT)) == ([4], 1)
                counted = await one.metrics()
                assert counted["degradations_total", "m", "fallback"] == 1

    run(check)


# ------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("phase", ["before the head", "after the head", "within the answer"])
def test_d08_a_client_that_leaves_cancels_its_request_at_the_engine(tmp_path, phase, streamed):
    head = STREAM_HEAD if streamed else b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    head = head if streamed else head + b"content-length: 4000\r\n\r\n"
    within_body = http_chunk(ROLE) + http_chunk(TOKEN) if streamed else b'{"choices":'
    acts = {
        "before the head": (Hold(),),
        "after the head": (Send(head), Hold()),
        "within the answer": (Send(head + within_body), Hold()),
    }

    async def check():
        async with front(tmp_path, only(acts[phase]), settings=PATIENT) as one:
            (upstream,) = one.upstreams
            client = await one.send(CHAT, {**ASKED, "stream": streamed})
            await upstream.until(lambda: upstream.hits(CHAT) == 1)
            if streamed and phase == "within the answer":
                await client.read_head()
                assert await client.read()
            else:
                await asyncio.sleep(0.03)  # for what was sent to arrive
            kept = upstream.open_now
            start_s = time.monotonic()
            await one.leave(client)
            await upstream.until(lambda: upstream.open_now < kept)
            assert time.monotonic() - start_s < CANCELLED_WITHIN_S
            await one.quiet(within_s=CANCELLED_WITHIN_S)
            counted = await one.metrics()
            assert counted["requests_ended_total", "m", "cancelled"] == 1

    run(check)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_d08_a_client_that_leaves_while_it_waits_here_costs_the_engine_nothing(tmp_path, streamed):
    async def check():
        async with front(tmp_path, only((Hold(),)), settings=ONE_AT_A_TIME) as one:
            first = await one.send(CHAT, ASKED)
            await one.upstreams[0].until(lambda: hits(one) == [1])
            second = await one.send(CHAT, {**ASKED, "stream": streamed})
            await eventually(lambda: one.in_flight == 2)
            await one.leave(second)
            await eventually(lambda: one.in_flight == 1, CANCELLED_WITHIN_S)
            await one.leave(first)
            assert hits(one) == [1]

    run(check)


def test_d08_a_client_that_leaves_between_two_attempts_is_not_sent_again(tmp_path):
    busy = whole(b"{}", 503, ("retry-after-ms", "400"))

    async def check():
        async with front(tmp_path, only(busy)) as one:
            client = await one.send(CHAT, ASKED)
            await one.upstreams[0].until(lambda: hits(one) == [1])
            await asyncio.sleep(0.05)  # for the refusal to arrive
            counted = await one.metrics()
            assert counted["attempts_failed_total", "m", "full", "m-0"] == one.in_flight == 1
            await one.leave(client)
            await one.quiet(within_s=CANCELLED_WITHIN_S)
            counted = await one.metrics()
            assert counted["requests_ended_total", "m", "cancelled"] == 1
            await asyncio.sleep(0.5)
            assert hits(one) == [1]

    run(check)


def test_d08_no_permit_leaks_over_all_ways_to_fail(tmp_path):
    """Limit 2: streams that are left, late, 502, unknown models, clients that do not read."""
    answers: dict[str, Script] = {
        "left": (Send(STREAM_HEAD + http_chunk(ROLE) + http_chunk(TOKEN)), Hold()),
        "late": (Hold(),),
        "502": whole(b"bad", 502),
        "unread": (Send(STREAM_HEAD), *(Send(http_chunk(TOKEN)) for _ in range(2000)), Hold()),
        "good": GOOD,
    }

    def route(received: Received) -> Script:
        return well(received) or answers[json.loads(received.body)["wanted"]]

    tenant = '[tenants.t]\nkey_sha256_env = "T_KEY"\nconcurrency = 2'
    environment = {"T_KEY": sha256(KEY).hexdigest()}
    limited = Settings(deadline_s=0.1, text="retries = 0", tables=tenant, environment=environment)

    async def ask(one: Front, wanted: str, model: str = "m") -> int:
        seen = await one.ask(model=model, headers=[AS_TENANT], wanted=wanted)
        return seen.status

    async def leave(one: Front, wanted: str) -> None:
        client = await one.send(CHAT, {**ASKED, "wanted": wanted}, AS_TENANT)
        await client.read_head()
        await one.leave(client)

    async def check():
        async with front(tmp_path, route, settings=limited) as one:
            for _ in range(50):
                await leave(one, "left")
            for wanted, status in (("late", 504), ("502", 502)):
                for _ in range(10):  # what works in between keeps the breaker closed
                    two = await asyncio.gather(*(ask(one, wanted) for _ in range(2)))
                    assert two == [status, status]
                    assert [await ask(one, "good") for _ in range(4)] == [200] * 4
            assert [await ask(one, "good", "nobody") for _ in range(20)] == [404] * 20
            for _ in range(20):
                await leave(one, "unread")
            await one.quiet()
            both = await asyncio.gather(*(ask(one, "good") for _ in range(2)))
            assert both == [200, 200]

    run(check)
