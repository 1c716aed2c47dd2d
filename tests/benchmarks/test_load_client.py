"""The load generator is honest: it sends what was planned, and a stall shows with its full mass.

The server is scripted and runs on the client's loop, so that a stall of the machine is one call.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise

import pytest

from benchmarks.load.answers import read_answer
from benchmarks.load.client import Client, Target
from benchmarks.load.outcomes import Outcome, Targets
from benchmarks.load.plans import FRAME_TOKENS, Ask, Lengths, Plan, Span, poisson

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nretry-after-ms: %d\r\n"
    b"x-sluice-reason: queue_full\r\ncontent-length: 2\r\n\r\n{}"
)
EVENTS = (
    b'data: {"choices":[{"delta":{"content":""}}]}\n\ndata: {"choices":[{"text":"one"}]}\n\n',
    b'data: {"choices":[{"delta":{"content":" two"}}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n',
)
Script = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def chunked(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


ANSWER = HEAD + b"".join(map(chunked, EVENTS)) + b"0\r\n\r\n"


async def against(script: Script, plan: Plan, *, retry: bool = False) -> list[Outcome]:
    """Play a plan against a server that does what the script says for each request id."""

    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.append(task)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await reader.readexactly(int(headers["content-length"]))
        await script(headers["x-request-id"], writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = Client(Target(f"http://127.0.0.1:{port}", "m"))
        outcomes = await client.play(plan, retry=retry)
        await asyncio.gather(*serving)
        return outcomes


def plan_of(*at_s: float, end_s: float = 5.0) -> Plan:
    return Plan(tuple(Ask(f"r{number}", t_s) for number, t_s in enumerate(at_s)), 0.0, 1.0, end_s)


def test_requests_go_out_at_their_planned_times_however_many_are_unanswered():
    at_s = [0.005 * number for number in range(80)]
    seen: dict[str, float] = {}
    all_here = asyncio.Event()

    async def answer_when_all_are_here(id_: str, writer: asyncio.StreamWriter) -> None:
        seen[id_] = time.monotonic()
        if len(seen) == len(at_s):
            all_here.set()
        await all_here.wait()
        writer.write(ANSWER)

    outcomes = asyncio.run(against(answer_when_all_are_here, plan_of(*at_s)))
    assert all(one.whole for one in outcomes)
    began_s = min(seen.values())
    lags_s = sorted(seen[f"r{number}"] - began_s - t_s for number, t_s in enumerate(at_s))
    assert lags_s[len(lags_s) // 2] < 0.05
    assert all(one.lag_s >= 0 for one in outcomes)


def test_a_stalled_server_shows_in_every_request_that_was_planned_meanwhile():
    at_s = [0.02 * number for number in range(15)]
    until_s = 0.4
    released = asyncio.Event()

    async def hold(id_: str, writer: asyncio.StreamWriter) -> None:
        if id_ == "r0":
            asyncio.get_running_loop().call_later(until_s, released.set)
        await released.wait()
        writer.write(ANSWER)

    outcomes = asyncio.run(against(hold, plan_of(*at_s)))
    for one in outcomes:
        assert one.ttft_s is not None
        assert one.ttft_s > until_s - one.at_s - 0.01


def test_a_stalled_client_counts_its_own_lag_into_latency():
    stall_s = 0.2

    async def stall_at_first(id_: str, writer: asyncio.StreamWriter) -> None:
        if id_ == "r0":
            time.sleep(stall_s)  # noqa: ASYNC251 - the machine stands still
        writer.write(ANSWER)

    outcomes = asyncio.run(against(stall_at_first, plan_of(0.0, 0.1, 0.12)))
    late = outcomes[1]
    assert late.lag_s > stall_s / 4
    assert late.ttft_s is not None
    assert late.ttft_s >= late.lag_s


def test_requests_without_an_answer_at_the_end_are_not_good_and_not_refused():
    async def never(_id: str, _writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)

    (outcome,) = asyncio.run(against(never, plan_of(0.0, end_s=0.1)))
    assert (outcome.served, outcome.whole, outcome.good(Targets())) == (True, False, False)


def test_a_refused_client_comes_back_when_it_was_told_to():
    async def refuse_once(id_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER if "~" in id_ else REFUSAL % 150)

    first, second = asyncio.run(against(refuse_once, plan_of(0.0), retry=True))
    assert (first.status, first.reason, first.served) == (429, "queue_full", False)
    assert first.refused_s is not None
    assert second.id == "r0~1"
    assert second.whole
    assert second.at_s == pytest.approx(first.refused_s + 0.15, abs=0.01)


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_an_answer_reads_the_same_however_its_bytes_are_split(size):
    pieces = [(float(at), ANSWER[at : at + size]) for at in range(0, len(ANSWER), size)]
    answer = read_answer(pieces, closed=True)
    assert (answer.status, answer.whole, answer.tokens) == (200, True, 3)
    assert len(answer.text_s) == 2
    assert all(earlier <= later for earlier, later in pairwise(answer.text_s))


def test_a_stream_that_ends_with_an_error_is_not_whole():
    broken = (
        HEAD + chunked(EVENTS[0]) + chunked(b'data: {"error":{"code":"lost"}}\n\n') + b"0\r\n\r\n"
    )
    answer = read_answer([(0.0, broken)], closed=True)
    assert (answer.whole, answer.reason, len(answer.text_s)) == (False, "lost", 1)


def test_a_plan_is_drawn_from_its_seed_alone():
    span = Span(30.0)
    assert poisson(5.0, span, 1) == poisson(5.0, span, 1)
    assert poisson(5.0, span, 1) != poisson(5.0, span, 2)
    count = len(poisson(5.0, span, 1))
    assert count == pytest.approx(5.0 * span.arriving_s, rel=0.25)


def test_prompts_have_their_length_and_share_no_beginning():
    first, second = Ask("a", 0.0, 80), Ask("b", 0.0, 80)
    assert len(first.text.split()) == 80 - FRAME_TOKENS
    assert first.text.split()[:3] != second.text.split()[:3]


def test_lengths_are_scaled_and_cut_to_the_context():
    lengths = Lengths(0.5, 1000)
    assert lengths.of(400, 100) == (200, 50)
    assert lengths.of(14_000, 900) == (750, 250)
