"""Public cases about usage, metrics and limits of vendors, with engines that run elsewhere."""

import asyncio
import time

import pytest

from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import AttemptFailed
from sluice.testing.engine_answers import DONE, delta, usage, usage_event
from sluice.testing.simulated_vllm import SimulatedVllm, Speed
from sluice.testing.upstream import Received, Script, Send, Wait, stream, whole
from tests.cluster.remote_rig import Front, Seen, Settings, eventually, front
from tests.executors.stream_rig import run

ROLE = delta({"role": "assistant", "content": ""})
WORDS = ("one ", "two ", "three")
STOP = delta({}, "stop")
PATIENT = Settings(deadline_s=20)


def only(script: Script):
    """An engine that answers every request so, and is well."""

    def route(received: Received) -> Script:
        if received.path == "/metrics":
            return whole(SimulatedVllm().metrics().encode(), kind="text/plain")
        return script if received.path.startswith("/v1/chat") else whole(b"{}")

    return route


# ------------------------------------------------------------------------------------------ D-04

ENGINES = {
    "a usage-only chunk": [*(delta({"content": word}) for word in WORDS), STOP, usage_event(3)],
    "usage in every chunk": [
        *(delta({"content": word}, usage=usage(n + 1)) for n, word in enumerate(WORDS)),
        delta({}, "stop", usage=usage(3)),
    ],
    "no usage": [*(delta({"content": word}) for word in WORDS), STOP],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("asks", [True, False], ids=["asks for usage", "does not"])
def test_d04_usage_of_three_kinds_of_engine(tmp_path, engine, asks):
    script = stream([ROLE, *ENGINES[engine], DONE])
    tells = engine != "no usage"

    async def check():
        async with front(tmp_path, only(script)) as one:
            options = {"include_usage": True} if asks else None
            seen = await one.ask(stream_options=options)
            assert (seen.status, seen.error, seen.text) == (200, None, "".join(WORDS))
            told = [event for event in seen.events if event != "[DONE]" and event.get("usage")]
            if asks and tells:
                last = seen.events[-2]
                assert last["usage"] == usage(3)
                if engine == "a usage-only chunk":
                    assert told == [last]
                    assert last["choices"] == []
            if not asks:
                assert told == []
            await one.quiet()
            counted = await one.metrics()
            assert counted["generated_tokens_total", "m"] == (3 if tells else 4)
            assert counted.get(("usage_estimated_total", "m"), 0) == (not tells)

    run(check)


# ------------------------------------------------------------------------------------ D-20, D-22


def test_d20_a_gauge_shows_the_age_of_the_report_of_each_replica(tmp_path):
    well, mute = SimulatedVllm(), SimulatedVllm()
    is_mute = False

    def route(received: Received) -> Script:
        return whole(b"", 500) if is_mute and received.path == "/metrics" else mute.route(received)

    async def check():
        nonlocal is_mute
        async with front(tmp_path, well.route, route) as one:
            is_mute = True
            await asyncio.sleep(0.5)
            counted = await one.metrics()
            assert counted["replica_report_age_seconds", "m", "m-0"] < 0.3
            assert counted["replica_report_age_seconds", "m", "m-1"] > 0.3
            # Neither refused nor kept from work for that.
            seen = await asyncio.gather(*(one.ask(max_tokens=2) for _ in range(12)))
            assert {each.status for each in seen} == {200}
            assert min(upstream.hits("/v1/chat/completions") for upstream in one.upstreams) > 0

    run(check)


def test_d20_counts_in_flight_include_routes_that_are_only_passed_on(tmp_path):
    def route(received: Received) -> Script:
        slow = received.path == "/v1/embeddings"
        return (Wait(0.3), *whole(b'{"data":[]}')) if slow else only(())(received)

    async def check():
        async with front(tmp_path, route, settings=PATIENT) as one:
            task = asyncio.ensure_future(one.ask(streamed=False, path="/v1/embeddings", input="a"))
            await eventually(lambda: one.in_flight == 1)
            assert (await task).status == 200
            assert one.in_flight == 0

    run(check)


def test_d22_made_up_models_and_paths_add_no_series(tmp_path):
    async def check():
        async with front(tmp_path, SimulatedVllm().route) as one:
            assert (await one.ask(model="nobody", max_tokens=1)).status == 404
            assert (await one.get("/nowhere")).status == 404
            before = await one.metrics()
            for number in range(100):
                assert (await one.ask(model=f"made-up-{number}")).status == 404
                assert (await one.get(f"/made/up/{number}")).status == 404
            after = await one.metrics()
            assert after.keys() == before.keys()

    run(check)


# ------------------------------------------------------------------------------------------ D-23


def test_d23_time_to_first_token_of_remote_engines_holds_the_wait_here(tmp_path):
    """One at a time, 0.1 s to the first token and 0.1 s after it: 0.1, 0.3, 0.5 and 0.7 s."""
    engine = SimulatedVllm(Speed(slots=1, prefill_s=0.1, token_s=0.02))
    one_at_a_time = Settings(deadline_s=20, text="in_flight_max = 1")

    async def first_event_s(one: Front, start_s: float) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        client = await one.send("/v1/chat/completions", {**body, "stream": True})
        await client.read_head()
        await client.read()
        first_s = time.monotonic() - start_s
        while await client.read():
            pass
        one.pool.release(client)
        return first_s

    async def check():
        async with front(tmp_path, engine.route, settings=one_at_a_time) as one:
            start_s = time.monotonic()
            clients = await asyncio.gather(*(first_event_s(one, start_s) for _ in range(4)))
            assert engine.waiting_most <= 1
            counted = await one.metrics()
            ttft_s = counted["ttft_seconds_sum", "m", "default"]
            assert ttft_s == pytest.approx(sum(clients), rel=0.1)
            assert ttft_s == pytest.approx(0.12 + 0.32 + 0.52 + 0.72, rel=0.2)
            assert counted["queue_seconds_sum", "m", "default"] == pytest.approx(
                0.2 + 0.4 + 0.6, rel=0.25
            )

    run(check)


def test_d23_the_engines_own_time_is_kept_under_another_name(tmp_path):
    metrics = {"time_to_first_token_ms": 1500.0, "queue_time_ms": 700.0}
    events = [ROLE, delta({"content": "a"}), STOP, usage_event(1, metrics=metrics), DONE]

    async def check():
        async with front(tmp_path, only(stream(events))) as one:
            assert (await one.ask()).status == 200
            counted = await one.metrics()
            assert counted["engine_ttft_seconds_sum", "m"] == 1.5
            assert counted["ttft_seconds_sum", "m", "default"] < 0.5

    run(check)


# --------------------------------------------------------------------------------------- vendors


class Vendor:
    """Lets so many requests in per second, and says in each answer what is left."""

    def __init__(self, limit: int, per_s: float) -> None:
        self.limit, self.per_s = limit, per_s
        self.level, self.at_s = float(limit), time.monotonic()
        self.refused = self.served = 0

    def route(self, received: Received) -> Script:
        """Answer, or refuse what comes too early."""
        if not received.path.startswith("/v1/chat"):
            return whole(b"{}")
        now_s = time.monotonic()
        self.level = min(self.limit, self.level + self.per_s * (now_s - self.at_s))
        self.at_s = now_s
        let_in = self.level >= 1
        self.level -= let_in
        self.served += let_in
        self.refused += not let_in
        full_s = (self.limit - int(self.level)) / self.per_s
        headers = (
            ("x-ratelimit-limit-requests", str(self.limit)),
            ("x-ratelimit-remaining-requests", str(int(self.level))),
            ("x-ratelimit-reset-requests", f"{full_s:.3f}s"),
        )
        if not let_in:
            return whole(b"{}", 429, ("retry-after", "1"), *headers)
        body = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'
        return whole(body, 200, *headers)


def test_a_vendors_limit_is_foreseen_and_not_run_into(tmp_path):
    vendor = Vendor(limit=5, per_s=20.0)
    settings = Settings(engine="openai", deadline_s=20)

    async def check():
        async with front(tmp_path, vendor.route, settings=settings) as one:
            assert (await one.ask(streamed=False)).status == 200  # what tells of the limit
            start_s = time.monotonic()
            seen = await asyncio.gather(*(one.ask(streamed=False) for _ in range(20)))
            assert [each.status for each in seen] == [200] * 20
            assert vendor.refused == 0
            assert 0.6 < time.monotonic() - start_s < 2.0

    run(check)


def test_the_time_that_a_vendor_names_reaches_the_client_and_is_kept(tmp_path):
    refusal = whole(b"{}", 429, ("retry-after", "20"))

    async def check():
        settings = Settings(engine="openai", text='queue_wait_max = "5s"')
        async with front(tmp_path, only(refusal), settings=settings) as one:
            told: list[Seen] = [await one.ask() for _ in range(5)]
            assert [each.status for each in told] == [429] * 5
            assert one.upstreams[0].hits("/v1/chat/completions") == 1
            assert all(15 <= float(each.headers["retry-after"]) <= 26 for each in told)
            assert told[1].error["code"] == "upstream_busy"

    run(check)


def test_keys_of_engines_are_in_no_log_metric_journal_or_answer(tmp_path, caplog):
    settings = Settings(
        engine="openai", text='key_env = "UP_KEY"', environment={"UP_KEY": "sk-very-secret"}
    )
    answers = iter(
        [
            *([whole(b'{"error":{"message":"bad key sk-very-secret"}}', 401)] * 2),
            *([whole(b'{"error":{"message":"sk-very-secret failed"}}', 500)] * 2),
            *([(Send(b"junk"),)] * 2),
        ]
    )

    def route(received: Received) -> Script:
        if not received.path.startswith("/v1/chat"):
            return whole(b"{}")
        assert received.header("authorization") == "Bearer sk-very-secret"
        return next(answers)

    async def check():
        async with front(tmp_path, route, settings=settings) as one:
            for _ in range(3):
                seen = await one.ask()
                assert seen.status in {502, 503}
                assert "very-secret" not in f"{seen}"
            assert "very-secret" not in f"{await one.metrics()}"

    run(check)
    assert "very-secret" not in caplog.text
    records = [entry.record for entry in JournalReader(tmp_path / "journal").entries()]
    assert any(isinstance(record, AttemptFailed) for record in records)
    assert "very-secret" not in f"{records}"
