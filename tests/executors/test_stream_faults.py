"""What each fault of an upstream becomes, streamed and not; the table of conduct towards engines.

After each fault the same engine serves the next request, no connection is left in use, and the
upstream was asked once: whether to try again, and where, is for the gateway to say.
"""

import pytest

from sluice.executors.faults import RETRY_AFTER_S_MAX, retry_after_s
from sluice.executors.http_pool import Address
from sluice.executors.stream import (
    ConnectFailed,
    ConnectFault,
    FirstTokenLate,
    Lost,
    Reply,
    UpstreamFailed,
)
from sluice.testing.engine_answers import DONE, usage_event
from sluice.testing.upstream import Reset, ScriptedUpstream, cut, raw_of, stream
from tests.executors.stream_rig import engine_for, request, rig, run, take
from tests.executors.upstream_faults import (
    ERROR_500,
    FAULTS,
    GOOD_WHOLE,
    PIECES,
    ROLE,
    STOP,
    TOKEN,
    VLLM,
    chunks,
    status,
)

ROWS = [
    pytest.param(fault, streamed, id=f"{fault.name}-{'streamed' if streamed else 'whole'}")
    for fault in FAULTS
    for streamed in (True, False)
    if (fault.streamed if streamed else fault.whole) is not None
]


@pytest.mark.parametrize(("fault", "streamed"), ROWS)
def test_d13_a_fault_is_told_as_what_it_is_and_asked_for_once(fault, streamed):
    script = fault.streamed if streamed else fault.whole
    asked = request(streamed=streamed, deadlines=fault.deadlines)

    async def check():
        async with rig(lambda _: script) as (upstream, engine):
            if Reset() in script:
                upstream.release()
            taken = await take(engine, asked)
            assert upstream.hits(asked.path) == 1
            assert engine.connections_in_use == 0
            upstream.route = VLLM.route(PIECES)
            again = await take(engine, request(streamed=streamed))
        assert again.fault is None
        return taken

    taken = run(check)
    expected = fault.expected
    if not streamed and fault.name == "silent within its body":
        expected = FirstTokenLate
    assert type(taken.fault) is expected, repr(taken.fault)
    assert not taken.ended
    if streamed:
        assert taken.tokens == fault.tokens
        assert getattr(taken.fault, "tokens", fault.tokens) == fault.tokens
    if fault.status is not None:
        assert taken.fault.reply.status == fault.status


@pytest.mark.parametrize("streamed", [True, False])
def test_nobody_listening_is_told_as_refused(streamed):
    async def check():
        async with ScriptedUpstream(VLLM.route()) as upstream:
            address = upstream.address()
        async with engine_for(upstream, address=address) as engine:
            return await take(engine, request(streamed=streamed))

    fault = run(check).fault
    assert isinstance(fault, ConnectFailed)
    assert fault.fault is ConnectFault.REFUSED


@pytest.mark.parametrize("streamed", [True, False])
def test_a_name_that_nobody_knows_is_told_as_such(streamed):
    async def check():
        async with rig(VLLM.route(), address=Address("sluice.invalid", 80)) as (_, engine):
            return await take(engine, request(streamed=streamed))

    fault = run(check).fault
    assert isinstance(fault, ConnectFailed)
    assert fault.fault is ConnectFault.NAME


@pytest.mark.parametrize("name", ["bare", "event"])
def test_llama_servers_former_error_lines_are_understood(name):
    line = b"error: " + ERROR_500 if name == "bare" else b"event: error\ndata: " + ERROR_500

    async def check():
        async with rig(lambda _: chunks(ROLE, line + b"\n\n"), "llama-server") as (_, engine):
            return await take(engine, request())

    fault = run(check).fault
    assert isinstance(fault, UpstreamFailed)
    assert fault.message == "EngineCore died"


def test_d12_the_opening_of_a_stream_that_fails_carries_no_tokens():
    """So a gateway that holds it back has shown nothing, and may go elsewhere."""

    async def check():
        async with rig(lambda _: chunks(ROLE, VLLM.error_event, b"")) as (_, engine):
            return await take(engine, request())

    taken = run(check)
    assert [(chunk.raw, chunk.tokens) for chunk in taken.chunks] == [(ROLE, 0)]
    assert taken.fault.tokens == 0


DATE = ("date", "Mon, 30 Nov 2026 16:00:00 GMT")


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ([("retry-after", "3")], 3.0),
        ([("retry-after", "3"), ("retry-after-ms", "2500")], 2.5),
        ([("retry-after", "Mon, 30 Nov 2026 16:00:07 GMT"), DATE], 7.0),
        ([("retry-after", "Mon, 30 Nov 2026 15:00:00 GMT"), DATE], 0.0),
        ([("retry-after", "Mon, 30 Nov 2026 16:00:07 GMT")], None),
        ([("retry-after", "soon"), DATE], None),
        ([("retry-after", "inf")], None),
        ([("retry-after", "99999999999")], RETRY_AFTER_S_MAX),
        ([("retry-after", "1e300")], RETRY_AFTER_S_MAX),
        ([("retry-after-ms", "1e308")], RETRY_AFTER_S_MAX),
        ([("retry-after", "Fri, 30 Nov 2096 16:00:07 GMT"), DATE], RETRY_AFTER_S_MAX),
        ([("retry-after-ms", "soon"), ("retry-after", "3")], 3.0),
        ([], None),
    ],
)
def test_when_to_come_back_is_read_in_all_its_forms(headers, expected_s):
    assert retry_after_s(Reply(503, tuple(headers), b"")) == expected_s


def test_d12_retry_after_of_a_refusal_is_kept():
    async def check():
        async with rig(lambda _: status(503, b"", ("retry-after", "3"))[0]) as (_, engine):
            return await take(engine, request())

    assert run(check).fault.retry_after_s == 3.0


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_the_end_of_the_connection_at_any_byte_is_never_a_clean_end(streamed):
    """What was given out before is a whole number of the events that were sent."""
    events = [ROLE, TOKEN, STOP, usage_event(1), DONE]
    script = stream(events) if streamed else GOOD_WHOLE
    length, body = len(raw_of(script)), b"".join(events)
    prefixes = {b"".join(events[:n]) for n in range(len(events) + 1)}
    # From here on the answer is whole: behind the last event of a stream only framing follows.
    whole_from = raw_of(script).rfind(DONE) + len(DONE) if streamed else length
    at_now = 0

    async def check():
        nonlocal at_now
        async with rig(lambda _: cut(script, at_now)) as (upstream, engine):
            for at_now in range(length + 1):
                taken = await take(engine, request(streamed=streamed))
                if at_now < whole_from:
                    assert isinstance(taken.fault, Lost), at_now
                    assert taken.raw in (prefixes if streamed else {b""})
                    assert not taken.ended
                else:
                    assert (taken.fault, taken.ended) == (None, True), at_now
                    assert taken.raw == (body if streamed else VLLM.body(PIECES))
            assert len(upstream.requests) == length + 1

    run(check)
