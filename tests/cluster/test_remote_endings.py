"""How calls to engines elsewhere end that were tried again, cut short or given up; their cost."""

import asyncio

import pytest

from sluice.cluster.calls import LiveCalls
from sluice.cluster.classes import ServiceClasses
from sluice.cluster.observer import Observer
from sluice.cluster.remote_model import RemoteModel
from sluice.core.events import (
    AttemptFailed,
    Cancelled,
    Dispatch,
    Ended,
    FleetEvent,
    Progress,
    Retarget,
)
from sluice.core.request import EndReason, Rung
from sluice.executors.faults import RETRY_AFTER_S_MAX
from sluice.runtime.generation import Call, ModelCard, RawPrompt, SentBody
from sluice.telemetry.metrics import Metrics
from sluice.testing.engine_answers import DONE, delta, usage_event
from sluice.testing.upstream import (
    STREAM_HEAD,
    Close,
    Hold,
    Received,
    Reset,
    Script,
    ScriptedUpstream,
    Send,
    Wait,
    http_chunk,
    stream,
    whole,
)
from tests.cluster.remote_rig import CHAT, Front, Settings, eventually, front
from tests.cluster.test_failure_conduct import (
    ASKED,
    ERROR,
    GOOD,
    PATIENT,
    ROLE,
    TOKEN,
    hits,
    only,
    well,
)
from tests.executors.stream_rig import run

STOP = delta({}, "stop")
WITHIN = ("x-sluice-deadline-ms", "400")


def told(one: Front) -> list[FleetEvent]:
    """What the fleet is told from now on."""
    fleet = one.gateway._driver._fleet
    handle, events = fleet.handle, list[FleetEvent]()

    def noting(event: FleetEvent, now_ns: int):
        events.append(event)
        return handle(event, now_ns)

    fleet.handle = noting  # type: ignore[method-assign]
    return events


# ----------------------------------------------------------------------------------- empty answers


@pytest.mark.parametrize("end", [Close(), Reset()], ids=["closed", "reset"])
def test_d12_an_empty_answer_that_breaks_before_its_end_was_not_sent(tmp_path, end):
    broken = (Send(STREAM_HEAD + http_chunk(ROLE) + http_chunk(STOP)), Wait(0.05), end)

    async def check():
        async with front(tmp_path, only(broken), only(GOOD)) as one:
            seen = await one.ask()
            assert (seen.status, seen.text, hits(one)) == (200, "a", [1, 1])
            choices = [c for e in seen.events if e != "[DONE]" for c in e["choices"]]
            assert [c["delta"].get("role") for c in choices].count("assistant") == 1
            assert [c["finish_reason"] for c in choices].count("stop") == 1

    run(check)


def test_an_empty_answer_comes_whole(tmp_path):
    async def check():
        async with front(tmp_path, only(stream([ROLE, STOP, usage_event(0), DONE]))) as one:
            seen = await one.ask()
            assert (seen.status, seen.text, seen.error) == (200, "", None)
            assert [c["finish_reason"] for e in seen.events[:-1] for c in e["choices"]][
                -1
            ] == "stop"
            assert seen.events[-1] == "[DONE]"

    run(check)


# -------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_request_that_failed_once_and_then_ran_out_of_time_is_told_so(tmp_path, streamed):
    busy = whole(b"{}", 503, ("retry-after-ms", "900"))

    async def check():
        async with front(tmp_path, only(busy), settings=PATIENT) as one:
            seen = await one.ask(streamed=streamed, headers=[WITHIN], max_tokens=2)
            assert hits(one) == [1]
            assert (seen.status, seen.error["code"]) == (429, "deadline_expired")

    run(check)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_an_ending_by_the_clients_deadline_says_whether_anything_came(tmp_path, streamed):
    async def check():
        async with front(tmp_path, only((Hold(),)), settings=PATIENT) as one:
            events = told(one)
            await one.ask(streamed=streamed, headers=[WITHIN], max_tokens=2)
            (ended,) = [event for event in events if isinstance(event, Ended)]
            assert (ended.reason, ended.silent) == (EndReason.EXPIRED, streamed)

    run(check)


# ------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("leaves", [True, False], ids=["is left", "breaks"])
def test_all_tokens_of_a_stream_that_ends_early_are_told_before_that(tmp_path, leaves):
    begun = Send(STREAM_HEAD + http_chunk(ROLE) + http_chunk(TOKEN))
    rest = [act for _ in range(4) for act in (Wait(0.01), Send(http_chunk(TOKEN)))]
    script = (begun, *rest, Hold() if leaves else Send(http_chunk(ERROR)), Close())

    async def check():
        async with front(tmp_path, only(script), settings=PATIENT) as one:
            events = told(one)
            client = await one.send(CHAT, ASKED)
            await client.read_head()
            came = b""
            while came.count(b'"content":"a"') < 5:
                came += await client.read()
            if leaves:
                await one.leave(client)
            await one.quiet()
            ending = Cancelled if leaves else AttemptFailed
            (at,) = [n for n, event in enumerate(events) if isinstance(event, ending)]
            before = [event for event in events[:at] if isinstance(event, Progress)]
            assert sum(event.tokens for event in before) == 5
            assert not any(isinstance(event, Progress) for event in events[at:])

    run(check)


def test_a_client_that_leaves_while_another_model_is_asked_is_asked_for_no_more():
    raw = RawPrompt(CHAT, SentBody(b'{"model":"big"}', {}, lambda: None), False, False, ())  # type: ignore[arg-type,return-value]
    call = Call("a", "big", 0, raw)
    big, other = (RemoteModel(ModelCard(n, 0, 512), ServiceClasses({})) for n in ("big", "other"))
    observer = Observer(Metrics(["big", "other"]), None, lambda: 0)
    calls = LiveCalls(observer, lambda: 0, lambda: None)

    async def check() -> None:
        calls.add(call, await big.submit(call), big, lambda _: None)
        calls.dispatched(Dispatch("a", "big-0", 1))
        calls.attempt_failed("a")
        effect = Retarget("a", "other", 1, 1, Rung.FALLBACK)
        given = calls.call_for_smaller(effect)
        assert calls.cancelled("a") == Cancelled("a")
        calls.end_if_left("a")
        assert calls.arrive_at_smaller(effect, given, await other.submit(given), other) is None
        assert (len(calls), observer._timings) == (0, {})

    asyncio.run(check())


def test_a_server_that_drains_does_not_wait_for_a_client_that_left_between_attempts(tmp_path):
    busy = whole(b"{}", 503, ("retry-after-ms", "400"))

    async def check():
        async with front(tmp_path, only(busy), settings=Settings(deadline_s=20)) as one:
            client = await one.send(CHAT, ASKED)
            await eventually(lambda: hits(one) == [1] and one.gateway.pools()[0].waiting == 1)
            await one.leave(client)
            await one.quiet()
            async with asyncio.timeout(1):
                await one.gateway.drain(20.0)

    run(check)


def test_an_absurd_time_to_wait_is_cut_and_nothing_is_held(tmp_path):
    async def check():
        busy = whole(b"{}", 503, ("retry-after", "1e300"))
        async with front(tmp_path, only(busy), settings=PATIENT) as one:
            seen = await one.ask()
            assert (seen.status, seen.error["code"]) == (503, "upstream_busy")
            assert float(seen.headers["retry-after"]) <= 1.25 * RETRY_AFTER_S_MAX
            await one.quiet()

    run(check)


# ---------------------------------------------------------------------------------- all are gone


@pytest.mark.parametrize("rescued", [True, False], ids=["another model", "no other"])
def test_who_waits_for_an_engine_that_goes_is_answered_by_another_model_or_told(tmp_path, rescued):
    is_gone = False

    def route(received: Received) -> Script:
        if is_gone and not received.path.startswith("/v1/chat"):
            return whole(b"", 500)
        return well(received) or (Hold(),)

    async def check():
        nonlocal is_gone
        async with ScriptedUpstream(only(GOOD)) as other:
            table = f'[models.n]\nengine = "vllm"\nurls = ["http://127.0.0.1:{other.port}"]'
            names = 'fallback = ["n"]' if rescued else ""
            text = f"in_flight_max = 1\n{names}"
            settings = Settings(deadline_s=20, text=text, tables=table if rescued else "")
            async with front(tmp_path, route, settings=settings) as one:
                holds = await one.send(CHAT, ASKED)
                await eventually(lambda: hits(one) == [1])
                waits = asyncio.ensure_future(one.ask())
                await eventually(lambda: one.gateway.pools()[0].waiting == 1)
                is_gone = True
                seen = await waits
                if rescued:
                    assert (seen.status, seen.text) == (200, "a")
                    assert seen.headers["x-sluice-model"] == "n"
                else:
                    assert (seen.status, seen.error["code"]) == (503, "not_ready")
                    assert float(seen.headers["retry-after"]) >= 1
                await one.leave(holds)

    run(check)
