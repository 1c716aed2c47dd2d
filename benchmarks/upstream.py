"""What a request to an upstream costs: ``python benchmarks/upstream.py [--json] [--quick]``.

The client of ``sluice.executors.remote`` beside aiohttp, against a scripted upstream. The upstream
has the first core for itself and the client the second, so figures are of one core. Both run on
uvloop, in turn, each case three times; printed are medians of the client process's own time
(``process_time``), which the speed of the upstream does not enter, and of the wall time of one
request at a time. ``aiohttp`` reads events as ours does; ``aiohttp, bytes only`` looks at nothing.
aiohttp is not a dependency: ``pip install aiohttp``. Run it alone.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import aiohttp
import uvloop

from sluice.executors.answers import StreamReader, read_whole
from sluice.executors.dialects import VLLM
from sluice.executors.faults import Source
from sluice.executors.http_pool import Address
from sluice.executors.remote import RemoteEngine, Upstream
from sluice.executors.stream import Chunk, Deadlines, UpstreamRequest, UsageEvents
from sluice.testing.engine_answers import DONE, delta, usage_event
from sluice.testing.upstream import Received, Script, ScriptedUpstream, stream, whole

_CHAT = "/v1/chat/completions"
_UPSTREAM_CORE, _CLIENT_CORE = 0, 1
_EVENTS = 64
_GAP_S = 0.01
_REPEATS = 3
_EVENT_BYTES_MAX = 1024**2
_SOURCE = Source("upstream", VLLM)

# Streams an answer or reads it whole; returns the tokens that were seen.
Client = Callable[[str, bytes], Awaitable[int]]


def _route(received: Received) -> Script:
    events = [delta({"role": "assistant", "content": ""})]
    events += [delta({"content": " word"})] * _EVENTS
    events += [delta({}, "stop"), usage_event(_EVENTS), DONE]
    match received.header("x-case"):
        case "paced":
            return stream(events, gap_s=_GAP_S)
        case "burst":
            return stream(events)
        case _:
            text = {"role": "assistant", "content": "word " * 60}
            choice = {"index": 0, "message": text, "finish_reason": "stop"}
            used = {"prompt_tokens": 400, "completion_tokens": 60}
            return whole(json.dumps({"choices": [choice], "usage": used}).encode())


async def _serve() -> None:
    os.sched_setaffinity(0, {_UPSTREAM_CORE})
    async with ScriptedUpstream(_route) as upstream:
        print(upstream.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def _own(engine: RemoteEngine) -> Client:
    async def ask(case: str, body: bytes) -> int:
        request = UpstreamRequest(
            "r",
            _CHAT,
            body,
            headers=(("x-case", case),),
            streamed=case != "whole",
            deadlines=Deadlines(first_token_s=10, whole_s=10),
        )
        tokens = 0
        async with await engine.open(request) as answer:
            async for chunk in answer:
                tokens += chunk.tokens
        return tokens

    return ask


def _aiohttp(session: aiohttp.ClientSession, url: str, *, reading: bool) -> Client:
    async def ask(case: str, body: bytes) -> int:
        headers = {"x-case": case, "content-type": "application/json"}
        tokens = 0
        async with session.post(url, data=body, headers=headers) as answer:
            if case == "whole":
                read = await answer.read()
                item = read_whole(_SOURCE, read)[0] if reading else None
                return item.tokens if isinstance(item, Chunk) else 0
            reader = StreamReader(_SOURCE, UsageEvents.AS_SENT, _EVENT_BYTES_MAX)
            async for piece in answer.content.iter_any():
                if reading:
                    found = reader.feed(piece)
                    tokens += sum(chunk.tokens for chunk in found if isinstance(chunk, Chunk))
        return tokens

    return ask


async def _one_at_a_time(client: Client, case: str, body: bytes, count: int) -> float:
    """Median wall time of a request, in microseconds."""
    times = []
    for _ in range(count):
        began_ns = time.perf_counter_ns()
        await client(case, body)
        times.append(time.perf_counter_ns() - began_ns)
    return statistics.median(times) / 1000


async def _together(client: Client, case: str, body: bytes, rounds: int, width: int) -> float:
    """Processor time of the client per request, in microseconds."""

    async def worker() -> None:
        for _ in range(rounds):
            await client(case, body)

    await client(case, body)
    gc.collect()
    began_s = time.process_time()
    await asyncio.gather(*(worker() for _ in range(width)))
    return (time.process_time() - began_s) * 1e6 / (rounds * width)


async def _measure(name: str, port: int, quick: float) -> dict[str, float]:
    small, large = b'{"x":"' + b"x" * 1750 + b'"}', b'{"x":"' + b"x" * 398_000 + b'"}'
    async with AsyncExitStack() as stack:
        if name == "sluice":
            engine = RemoteEngine(Upstream("up", Address("127.0.0.1", port), VLLM))
            stack.push_async_callback(engine.close)
            client = _own(engine)
        else:
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            url = f"http://127.0.0.1:{port}{_CHAT}"
            client = _aiohttp(session, url, reading=name == "aiohttp")
        rounds = max(1, int(60 * quick))
        events = _EVENTS + 4
        return {
            "one whole, wall us": await _one_at_a_time(client, "whole", small, 20 * rounds),
            "whole 2 KB, cpu us": await _together(client, "whole", small, rounds, 64),
            "whole 400 KB, cpu us": await _together(client, "whole", large, rounds, 4),
            "paced event, cpu us": await _together(client, "paced", small, 1, 64) / events,
            "burst event, cpu us": await _together(client, "burst", small, rounds // 6 + 1, 16)
            / events,
        }


def _table(results: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for case in results["sluice"][0]:
        medians = {n: statistics.median(r[case] for r in runs) for n, runs in results.items()}
        spans = {
            n: [min(r[case] for r in runs), max(r[case] for r in runs)]
            for n, runs in results.items()
        }
        rows.append({"case": case, "median": medians, "range": spans})
    return rows


def _print_table(rows: Sequence[dict[str, object]], names: Sequence[str]) -> None:
    print("| case | " + " | ".join(names) + " | aiohttp / sluice |")
    print("|---|" + "--:|" * (len(names) + 1))
    for row in rows:
        medians, spans = row["median"], row["range"]
        assert isinstance(medians, dict)
        assert isinstance(spans, dict)
        cells = [f"{medians[n]:.1f} ({spans[n][0]:.1f}-{spans[n][1]:.1f})" for n in names]
        ratio = medians["aiohttp"] / medians["sluice"]
        print(f"| {row['case']} | " + " | ".join(cells) + f" | {ratio:.2f} |")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(_serve())
        return
    command = [sys.executable, __file__, "--serve"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    port = int(child.stdout.readline())
    os.sched_setaffinity(0, {_CLIENT_CORE})
    names = ("sluice", "aiohttp", "aiohttp, bytes only")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    gc.freeze()
    for _ in range(_REPEATS):
        for name in names:
            results[name].append(uvloop.run(_measure(name, port, 0.1 if options.quick else 1.0)))
    child.communicate()
    rows = _table(results)
    if options.json:
        print(json.dumps({"load": os.getloadavg()[0], "rows": rows}))
    else:
        print(f"load {os.getloadavg()[0]:.1f}")
        _print_table(rows, names)


if __name__ == "__main__":
    main()
