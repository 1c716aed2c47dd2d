"""Cancelling, deadlines, connections and slow readers."""

import asyncio
import contextlib
import json
import ssl
import time
from pathlib import Path

import pytest

from sluice.executors.http_pool import Address, ConnectionLimits
from sluice.executors.remote_answer import AnswerLimits
from sluice.executors.stream import (
    ClientError,
    ConnectFailed,
    ConnectFault,
    Deadlines,
    FirstTokenLate,
    Garbage,
    Lost,
)
from sluice.testing.engine_answers import DONE, ENGINE_ANSWERS, delta
from sluice.testing.upstream import (
    STREAM_HEAD,
    Close,
    Hold,
    Reset,
    ScriptedUpstream,
    Send,
    head,
    http_chunk,
    raw_of,
    stream,
    whole,
)
from tests.executors.stream_rig import engine_for, request, rig, run, take

VLLM = ENGINE_ANSWERS["vllm"]
ROLE, TOKEN, STOP = (
    delta({"role": "assistant", "content": ""}),
    delta({"content": "a"}),
    delta({}, "stop"),
)
CANCELLED_WITHIN_S = 0.1
PATIENT = Deadlines(connect_s=2.0)
CERTIFICATE = Path(__file__).with_name("loopback.pem")

# Where a request can be when its client leaves: what has come by then.
PHASES = {
    "queued, no head": (),
    "head, no output": (Send(STREAM_HEAD),),
    "opened": (Send(STREAM_HEAD + http_chunk(ROLE)),),
    "decoding": (Send(STREAM_HEAD + http_chunk(ROLE) + http_chunk(TOKEN)),),
    "not streamed, no head": (),
    "not streamed, half a body": (
        Send(head(200, ("content-type", "application/json"), length=100) + b'{"choi'),
    ),
}


async def read_on(engine, asked, begun):
    begun.set()
    async with await engine.open(asked) as answer:
        async for _ in answer:
            pass


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_closes_the_socket_and_aborts_within_100_ms(phase):
    streamed = not phase.startswith("not streamed")

    def route(received):
        return whole(b"") if "abort" in received.path else (*PHASES[phase], Hold())

    async def check():
        async with rig(route) as (upstream, engine):
            begun = asyncio.Event()
            asked = request(streamed=streamed, deadlines=PATIENT)
            task = asyncio.get_running_loop().create_task(read_on(engine, asked, begun))
            await upstream.until(lambda: upstream.hits(asked.path) == 1)
            for _ in range(20):  # what the upstream wrote arrives
                await asyncio.sleep(0.001)
            began_s = time.monotonic()
            task.cancel()
            abort = "/inference/v1/abort_requests"
            await upstream.until(lambda: upstream.hits(abort) == 1)
            await upstream.until(lambda: upstream.open_now == 0)
            took_s = time.monotonic() - began_s
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
            ids = json.loads(upstream.requests[-1].body)["request_ids"]
        assert ids == ["chatcmpl-r-1", "cmpl-r-1-0"]
        return took_s

    # The best of three, since another process may have the processor for longer than that.
    assert min(run(check) for _ in range(3)) < CANCELLED_WITHIN_S


def test_closing_an_answer_cancels_it_without_waiting():
    async def check():
        def route(received):
            return whole(b"") if "abort" in received.path else (*PHASES["decoding"], Hold())

        async with rig(route, "sglang") as (upstream, engine):
            answer = await engine.open(request(deadlines=PATIENT))
            await anext(answer)
            answer.close()
            answer.close()
            assert engine.connections_in_use == 0
            await upstream.until(lambda: upstream.hits("/abort_request") == 1)
            assert json.loads(upstream.requests[-1].body) == {"rid": "r-1"}
            with pytest.raises(StopAsyncIteration):
                await anext(answer)

    run(check)


def test_an_answer_that_was_read_to_its_end_is_not_aborted():
    async def check():
        async with rig(VLLM.route()) as (upstream, engine):
            for streamed in (True, False):
                assert (await take(engine, request(streamed=streamed))).fault is None
            answer = await engine.open(request())
            chunks = [chunk async for chunk in answer]  # nobody closes it
            assert chunks[-1].last
            assert engine.requests_open == 0
        assert {received.path for received in upstream.requests} == {request().path}

    run(check)


def test_an_answer_of_which_all_has_come_is_not_aborted_when_it_is_left():
    """The caller leaves before it was handed the last chunk; there is nothing left to stop."""
    script = (Send(raw_of(stream([ROLE, TOKEN, STOP, DONE]))),)

    async def check():
        async with rig(lambda _: script) as (upstream, engine):
            answer = await engine.open(request())
            chunk = await anext(answer)
            assert chunk.raw == ROLE + TOKEN + STOP
            answer.close()
            assert (await take(engine, request())).fault is None
        assert upstream.hits(request().path) == len(upstream.requests) == 2
        assert upstream.connections == 1

    run(check)


def test_an_abort_route_that_does_not_exist_is_not_asked_again():
    def route(received):
        if "abort" not in received.path:
            return (*PHASES["decoding"], Hold())
        return whole(b"", 404 if received.path.startswith("/inference") else 200)

    async def check():
        async with rig(route) as (upstream, engine):
            for _ in range(3):
                await engine.abort("r-1")
        assert upstream.hits("/inference/v1/abort_requests") == 1
        assert upstream.hits("/abort_requests") == 3

    run(check)


@pytest.mark.parametrize("name", ["tgi", "llama-server", "openai"])
def test_engines_without_an_abort_route_see_the_closed_socket(name):
    async def check():
        async with rig(lambda _: (*PHASES["decoding"], Hold()), name) as (upstream, engine):
            answer = await engine.open(request(deadlines=PATIENT))
            answer.close()
            await upstream.until(lambda: upstream.open_now == 0)
            await engine.abort("r-1")
        assert len(upstream.requests) == 1

    run(check)


def answering(script):
    return lambda received: whole(b"", 404) if "abort" in received.path else script


def test_d08_streams_that_are_left_or_fail_give_their_connections_back():
    scripts = [
        (*PHASES["decoding"], Hold()),
        (Hold(),),
        whole(b"{}", 502),
        (*PHASES["decoding"], Close()),
    ]
    limits = ConnectionLimits(connections_max=2)
    hasty = Deadlines(connect_s=1.0, first_token_s=0.01, silence_s=0.01)

    async def check():
        async with rig(lambda _: whole(b""), pool=limits) as (upstream, engine):
            for script in scripts:
                upstream.route = answering(script)
                for _ in range(20):
                    taken = await take(engine, request(deadlines=hasty))
                    assert taken.fault is not None
                    assert engine.connections_in_use == 0
            upstream.route = VLLM.route()
            both = await asyncio.gather(*(take(engine, request()) for _ in range(2)))
        assert [taken.fault for taken in both] == [None, None]

    run(check)


def test_deadlines_name_what_was_waited_for():
    def late(script, **deadlines):
        async def check():
            async with rig(lambda _: script, "tgi") as (_, engine):
                asked = request(
                    streamed="whole_s" not in deadlines, deadlines=Deadlines(**deadlines)
                )
                return (await take(engine, asked)).fault

        return run(check)

    first = late((Hold(),), first_token_s=0.03)
    assert isinstance(first, FirstTokenLate)
    assert 0.03 <= first.waited_s < 1
    assert isinstance(late((Hold(),), whole_s=0.03), FirstTokenLate)
    silent = late((*PHASES["decoding"], Hold()), silence_s=0.03)
    assert isinstance(silent, Lost)
    assert "nothing came for 0.03 s" in str(silent)


def test_pings_are_no_sign_of_life():
    """Comments that come more often than the deadline do not put it off."""
    events = [ROLE, TOKEN, *[b": ping\n\n"] * 1000]

    async def check():
        async with rig(lambda _: stream(events, gap_s=0.01), "tgi") as (_, engine):
            deadlines = Deadlines(connect_s=1.0, silence_s=0.05)
            began_s = time.monotonic()
            taken = await take(engine, request(deadlines=deadlines))
            return taken.fault, time.monotonic() - began_s

    fault, took_s = run(check)
    assert isinstance(fault, Lost)
    assert took_s < 2


def test_events_that_come_in_time_put_the_deadline_off():
    events = [ROLE, *[TOKEN] * 20, STOP, DONE]

    async def check():
        async with rig(lambda _: stream(events, gap_s=0.01), "tgi") as (_, engine):
            return await take(engine, request(deadlines=Deadlines(1.0, 0.1, 0.1)))

    taken = run(check)
    assert (taken.fault, taken.tokens) == (None, 20)


def test_a_slow_reader_stops_the_upstream_and_is_not_the_upstreams_silence():
    count = 5_000
    events = [delta({"content": "x" * 1000}) for _ in range(count)]

    async def check():
        async with rig(lambda _: stream([*events, STOP, DONE]), "tgi") as (_, engine):
            asked = request(deadlines=Deadlines(1.0, 1.0, 0.05))
            async with await engine.open(asked) as answer:
                tokens = (await anext(answer)).tokens
                await asyncio.sleep(0.2)  # the reader takes longer than the silence allowed
                held_bytes = answer._connection._held_bytes
                assert 0 < held_bytes < 2 * 1024**2
                async for chunk in answer:
                    tokens += chunk.tokens
        return tokens

    assert run(check) == count


def test_connections_are_reused_for_as_long_as_the_upstream_keeps_them():
    async def check():
        async with rig(VLLM.route()) as (upstream, engine):
            for number in range(20):
                taken = await take(engine, request(streamed=number % 2 == 0))
                assert taken.fault is None
        assert upstream.connections == 1

    run(check)


@pytest.mark.parametrize(
    "header",
    [("keep-alive", "timeout=1"), ("keep-alive", "timeout=5, max=1"), ("connection", "close")],
)
def test_a_connection_that_the_upstream_will_not_keep_is_not_used_again(header):
    async def check():
        script = whole(VLLM.body(["a"]), 200, header)
        async with rig(lambda _: script) as (upstream, engine):
            for _ in range(3):
                assert (await take(engine, request(streamed=False))).fault is None
        assert upstream.connections == 3

    run(check)


def test_a_kept_connection_that_was_closed_meanwhile_costs_one_more_dial_and_no_request():
    """The upstream closes right when the next request comes in on a kept connection."""
    scripts = [whole(VLLM.body(["a"])), (Close(),), whole(VLLM.body(["b"])), (Close(),), (Close(),)]

    async def check():
        upcoming = iter(scripts)
        async with rig(lambda _: next(upcoming)) as (upstream, engine):
            first = await take(engine, request(streamed=False))
            second = await take(engine, request(streamed=False))
            assert upstream.connections == 2
            third = await take(engine, request(streamed=False))
        assert (first.fault, second.raw) == (None, VLLM.body(["b"]))
        # The fresh connection is the last word.
        assert isinstance(third.fault, Lost)
        assert len(upstream.requests) == 5

    run(check)


@pytest.mark.parametrize(
    ("script", "stale_s_max"),
    [((Send(b"HTTP/1.1 200"), Close()), 1.0), ((Close(),), -1.0)],
    ids=["after a byte of the answer", "after some time"],
)
def test_a_request_that_was_being_worked_on_is_not_sent_again(script, stale_s_max, monkeypatch):
    monkeypatch.setattr("sluice.executors.remote._STALE_S_MAX", stale_s_max)

    async def check():
        async with rig(VLLM.route()) as (upstream, engine):
            await take(engine, request(streamed=False))
            upstream.route = lambda _: script
            taken = await take(engine, request(streamed=False))
        assert isinstance(taken.fault, Lost)
        assert (len(upstream.requests), upstream.connections) == (2, 1)

    run(check)


def test_what_comes_behind_the_end_of_a_stream_is_in_no_later_answer(monkeypatch):
    monkeypatch.setattr("sluice.executors.remote._FRAMING_END_S", 0.1)
    script = (
        Send(STREAM_HEAD + b"".join(http_chunk(one) for one in (ROLE, TOKEN, STOP, DONE))),
        Hold(),
        Send(http_chunk(b": bye\n\n") + http_chunk(b"")),
    )

    async def check():
        async with rig(lambda _: script) as (upstream, engine):
            first = await take(engine, request())
            assert engine.connections_in_use == 1  # it waits for the end of the framing
            upstream.release()
            for _ in range(1000):  # the last bytes arrive
                if engine.connections_in_use == 0:
                    break
                await asyncio.sleep(0.001)
            upstream.route = lambda _: stream([ROLE, TOKEN, STOP, DONE], gap_s=0.05)
            second = await take(engine, request())
        assert (first.fault, second.fault) == (None, None)
        assert first.raw == second.raw == ROLE + TOKEN + STOP + DONE
        assert upstream.connections == 1

    run(check)


def test_an_upstream_that_a_request_brings_down_is_told_as_lost_and_not_as_refusing():
    async def check():
        async with rig(lambda _: whole(VLLM.body(["a"]))) as (upstream, engine):
            await take(engine, request(streamed=False))

            def crash(_):
                upstream.refuse()
                return (Reset(),)

            upstream.route = crash
            return (await take(engine, request(streamed=False))).fault

    assert isinstance(run(check), Lost)


def test_at_the_bound_requests_wait_for_a_connection_and_are_told_when_none_comes_free():
    async def check():
        limits = ConnectionLimits(connections_max=1)
        async with rig(lambda _: (*PHASES["decoding"], Hold()), "tgi", pool=limits) as (
            upstream,
            engine,
        ):
            first = await engine.open(request(deadlines=PATIENT))
            crowded = await take(engine, request(deadlines=Deadlines(connect_s=0.03)))
            assert isinstance(crowded.fault, ConnectFailed)
            assert crowded.fault.fault is ConnectFault.CROWDED
            upstream.route = VLLM.route()
            waiting = asyncio.get_running_loop().create_task(take(engine, request()))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            first.close()
            assert (await waiting).fault is None
        assert upstream.connections == 2

    run(check)


def test_bytes_that_belong_to_no_request_end_the_connection_and_nothing_else():
    async def check():
        surplus = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
        script = (Send(raw_of(whole(VLLM.body(["a"]))) + surplus),)
        async with rig(lambda _: script) as (upstream, engine):
            for _ in range(3):
                taken = await take(engine, request(streamed=False))
                assert (taken.fault, taken.raw) == (None, VLLM.body(["a"]))
        assert upstream.connections == 3

    run(check)


def test_an_answer_before_the_request_was_read_is_taken():
    async def check():
        body = b'{"prompt":"' + b"x" * 5_000_000 + b'"}'
        async with rig(lambda _: whole(b"{}", 413)) as (upstream, engine):
            taken = await take(engine, request(body=body))
            assert upstream.requests[0].body == body
        assert isinstance(taken.fault, ClientError)

    run(check)


def test_an_answer_over_the_limit_is_cut():
    async def check():
        body = b'{"data":"' + b"x" * 100_000 + b'"}'
        limits = AnswerLimits(whole_bytes_max=50_000)
        async with rig(lambda _: whole(body), "tgi", answers=limits) as (_, engine):
            return (await take(engine, request(streamed=False))).fault

    assert isinstance(run(check), Garbage)


def test_closing_the_engine_ends_what_runs():
    async def check():
        async with rig(lambda _: (*PHASES["decoding"], Hold()), "tgi") as (upstream, engine):
            answer = await engine.open(request(deadlines=PATIENT))
            await engine.close()
            assert engine.connections_in_use == 0
            await upstream.until(lambda: upstream.open_now == 0)
            with pytest.raises(StopAsyncIteration):
                await anext(answer)

    run(check)


# TLS


def tls_server():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    return context


@pytest.mark.parametrize("streamed", [True, False])
def test_answers_come_through_tls(streamed):
    async def check():
        trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
        async with ScriptedUpstream(VLLM.route(), tls_server()) as upstream:
            address = Address("localhost", upstream.port, trusted)
            async with engine_for(upstream, address=address) as engine:
                for _ in range(2):
                    assert (await take(engine, request(streamed=streamed))).fault is None
            assert upstream.connections == 1

    run(check)


def test_a_certificate_that_nobody_vouches_for_is_told_as_such():
    async def check():
        distrustful = ssl.create_default_context()
        async with ScriptedUpstream(VLLM.route(), tls_server()) as upstream:
            async with engine_for(upstream, address=upstream.address(distrustful)) as engine:
                fault = (await take(engine, request())).fault
            assert upstream.requests == []
        assert isinstance(fault, ConnectFailed)
        assert fault.fault is ConnectFault.CERTIFICATE

    run(check)


def test_a_certificate_for_another_name_is_refused():
    async def check():
        trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
        async with ScriptedUpstream(VLLM.route(), tls_server()) as upstream:
            by_number = upstream.address(trusted)  # the certificate is for localhost
            async with engine_for(upstream, address=by_number) as engine:
                return (await take(engine, request())).fault

    fault = run(check)
    assert isinstance(fault, ConnectFailed)
    assert fault.fault is ConnectFault.CERTIFICATE


def test_a_handshake_that_nobody_answers_is_late():
    async def check():
        async with rig(VLLM.route()) as (upstream, _):
            address = upstream.address(ssl.create_default_context())
            async with engine_for(upstream, address=address) as engine:
                asked = request(deadlines=Deadlines(connect_s=0.05))
                return (await take(engine, asked)).fault

    fault = run(check)
    assert isinstance(fault, ConnectFailed)
    assert fault.fault is ConnectFault.LATE
