"""What the HTTP server costs per streamed event, with a scripted gateway behind it.

``python benchmarks/server.py`` starts the server in a child process and reads its streams here.
Paced streams resemble serving: nothing coalesces, so events per CPU second is what counts.
The peer in the same run is the smallest ASGI app that writes the same bytes under the same uvicorn.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
import timeit
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sluice.config.sections import ServerSection
from sluice.runtime.generation import Call, ChoiceEnded, Delta
from sluice.server.app import create_app
from sluice.server.chat_answers import ChatChunks
from sluice.server.exchange import AsgiApp
from sluice.server.serve import bind, new_event_loop, serve
from sluice.server.stamp import Sources, Stamp
from sluice.server.transport import Transport
from sluice.testing.gateway import FakeGateway, Pause, Script, Step, finished

TEXT = " wording"
BODY = json.dumps(
    {
        "model": "tiny",
        "stream": True,
        "messages": [{"role": "user", "content": "Tell me something. " * 100}],
    }
).encode()


def script(events: int, gap_s: float) -> Script:
    steps: list[Step] = []
    for _ in range(events):
        steps.append(Delta(0, TEXT, 1))
        if gap_s:
            steps.append(Pause(gap_s))
    return Script([*steps, ChoiceEnded(0, "stop"), finished()])


def bare(events: int, gap_s: float) -> AsgiApp:
    """The peer: reads the body, writes a constant event."""
    chunk = ChatChunks(Stamp("id", 1, "tiny", ""), with_usage=False)
    chunk.delta(Delta(0, TEXT, 1))
    event = chunk.delta(Delta(0, TEXT, 1))

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for _ in range(events):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if gap_s:
                await asyncio.sleep(gap_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def run_server(port: Connection, kind: str, events: int, gap_s: float) -> None:
    """Child process: serve until killed; its memory and CPU are read from outside."""
    section = ServerSection(listen="127.0.0.1:0")
    sources = Sources(lambda: 1, time.monotonic_ns, iter(map(str, range(10**9))).__next__)
    plan = script(events, gap_s)
    gateway = FakeGateway(lambda _call: plan)
    app = create_app(gateway, section, sources) if kind == "sluice" else bare(events, gap_s)
    listener = bind(section)
    port.send(listener.getsockname()[1])
    loop = new_event_loop()
    loop.run_until_complete(serve(app, Transport.of(section), listener, asyncio.Event()))


async def read_streams(port: int, streams: int, rounds: int) -> int:
    """Read streams to their end, ``streams`` at a time; returns the events seen."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(BODY)}\r\n\r\n"
    ).encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        seen = 0
        for _ in range(rounds):
            writer.write(head + BODY)
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                part = await reader.read(65536)
                seen += part.count(b"data: {")
                tail = (tail + part)[-5:]
        writer.close()
        return seen

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().split("\n")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def measure(kind: str, streams: int, events: int, gap_s: float, rounds: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=run_server, args=(theirs, kind, events, gap_s), daemon=True)
    child.start()
    port = ours.recv()
    assert child.pid is not None
    asyncio.run(read_streams(port, streams, 1))
    memory, before, began = rss_mb(child.pid), cpu_s(child.pid), time.monotonic()
    seen = asyncio.run(read_streams(port, streams, rounds))
    took, used = time.monotonic() - began, cpu_s(child.pid) - before
    child.kill()
    child.join()
    return {
        "events_s": seen / took,
        "events_cpu_s": seen / used,
        "us_event": used / seen * 1e6,
        "rss_mb": memory,
    }


def encoder_us() -> float:
    """Microseconds to turn one piece into the bytes of its event."""
    chunks = ChatChunks(Stamp("id", 1, "tiny", ""), with_usage=False)
    delta = Delta(0, TEXT, 1)
    chunks.delta(delta)
    return min(timeit.repeat(lambda: chunks.delta(delta), number=20_000, repeat=5)) / 20_000 * 1e6


def call_us() -> float:
    """Microseconds from a 2 KB body to a ``Call``, without HTTP."""
    from sluice.server import chat, wire  # noqa: PLC0415
    from sluice.server.exchange import Exchange  # noqa: PLC0415
    from sluice.server.limits import Limits  # noqa: PLC0415

    async def run() -> float:
        scope = {"method": "POST", "path": "/", "headers": []}
        exchange = Exchange(scope, None, None, Limits(), "id", 0)  # type: ignore[arg-type]

        def one() -> Call:
            return chat.call_of(wire.decode(wire.decode_chat, BODY), exchange)

        return min(timeit.repeat(one, number=5_000, repeat=5)) / 5_000 * 1e6

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"encoder: {encoder_us():.2f} us per event; 2 KB body to Call: {call_us():.1f} us")
    print(f"{'':20}{'events/s':>10}{'events/CPU s':>14}{'us/event':>10}{'RSS MB':>8}")
    for name, gap_s, rounds in (("paced 20 ms", 0.02, 1), ("as fast as it goes", 0.0, 5)):
        for kind in ("sluice", "bare"):
            runs = [
                measure(kind, options.streams, options.events, gap_s, rounds)
                for _ in range(options.repeats)
            ]
            mid = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(
                f"{kind:7}{name:13.13}{mid['events_s']:10.0f}{mid['events_cpu_s']:14.0f}"
                f"{mid['us_event']:10.1f}{mid['rss_mb']:8.1f}"
            )


if __name__ == "__main__":
    main()
