"""What the way from HTTP to the engine costs: ``python benchmarks/hops.py [--json] [--quick]``.

Starts ``sluice serve`` with the default model on a free port, with a journal of its own, and prints

- the hop: TTFT at the client less the wall time of the steps that computed the prompt, at
  concurrency 1, and what is added to the gap between two tokens;
- start to first token with a cached model;
- resident memory of the gateway and the replica before and after many requests.

Step times are the replica's own, read from the journal. Run it alone.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import RequestArrived, Step

_WORDS = ("river", "stone", "cloud", "paper", "green", "seven", "light", "water", "north", "glass")


class Server:
    """A ``sluice serve`` process."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.began_s = time.monotonic()
        command = [sys.executable, "-m", "sluice", "serve", "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, "--set", f"journal.dir={journal}"], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.port = 0
        for line in self.process.stderr:
            if found := re.match(r"API\s+http://[^:]+:(\d+)/v1", line):
                self.port = int(found[1])
            if found := re.search(r'"model": "([^"]+)"', line):
                self.model = found[1]
                return
        raise SystemExit("the server did not start")

    def resident_mb(self) -> Mapping[str, float]:
        """Resident memory of the gateway and of its replica."""
        gateway = self.process.pid
        children = Path(f"/proc/{gateway}/task/{gateway}/children").read_text().split()
        return {
            "gateway": _resident_mb(str(gateway)),
            "replica": sum(_resident_mb(child) for child in children),
        }

    def stop(self) -> None:
        """Drain and wait."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=30)


def _resident_mb(pid: str) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


async def stream(server: Server, id_: str, prompt: str, tokens: int) -> list[float]:
    """Stream one completion; the times of its chunks, in seconds from sending."""
    body = json.dumps(
        {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"x-request-id: {id_}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    began_s = time.monotonic()
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answer:
        raise SystemExit(answer.decode())
    times = []
    while (line := await reader.readline()).strip() != b"data: [DONE]":
        if not line:
            raise SystemExit("the stream ended early")
        if line.startswith(b"data: ") and b'"text":""' not in line:
            times.append(time.monotonic() - began_s)
    writer.close()
    return times


def step_times(journal: Path) -> tuple[Mapping[str, float], Mapping[str, list[float]]]:
    """Per client id: seconds of the steps of its prompt, and of each of its decode steps."""
    client_ids: dict[str, str] = {}
    prefill: dict[str, float] = defaultdict(float)
    decode: dict[str, list[float]] = defaultdict(list)
    for entry in JournalReader(journal).entries():
        record = entry.record
        if isinstance(record, RequestArrived):
            client_ids[record.id] = record.client_id
        elif isinstance(record, Step):
            for chunk in record.prefill:
                prefill[chunk.id] += record.measured_ns / 1e9
            for request_id, _choice in record.decode:
                decode[request_id].append(record.measured_ns / 1e9)
    return (
        {client_ids[id_]: seconds for id_, seconds in prefill.items() if id_ in client_ids},
        {client_ids[id_]: seconds for id_, seconds in decode.items() if id_ in client_ids},
    )


async def measure_hops(server: Server, requests: int) -> dict[str, float]:
    """Sequential streams; the difference between what the client and the engine measured."""
    seen = {}
    for number in range(requests):
        words = " ".join(_WORDS[(number * 7 + i * i) % len(_WORDS)] for i in range(90))
        seen[f"hop-{number}"] = await stream(server, f"hop-{number}", f"{number}: {words}", 16)
    await asyncio.sleep(1.5)  # the journal is flushed every half second
    prefill, decode = step_times(server.journal)
    hops = [times[0] - prefill[id_] for id_, times in seen.items()]
    gaps = [
        (times[-1] - times[0]) / (len(times) - 1) - statistics.fmean(decode[id_])
        for id_, times in seen.items()
    ]
    return {
        "ttft_ms": statistics.median(times[0] for times in seen.values()) * 1e3,
        "hop_ms_p50": statistics.median(hops) * 1e3,
        "hop_ms_p95": statistics.quantiles(hops, n=20)[-1] * 1e3,
        "gap_added_ms_p50": statistics.median(gaps) * 1e3,
    }


async def run_many(server: Server, numbers: range, concurrency: int) -> None:
    """Short requests, so that what leaks per request shows."""
    waiting = iter(numbers)

    async def client() -> None:
        for number in waiting:
            await stream(server, f"many-{number}", f"Say {number}", 2)

    await asyncio.gather(*(client() for _ in range(concurrency)))


def measure(requests: int, hops: int) -> dict[str, float]:
    """All figures, by name."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            asyncio.run(stream(server, "first", "Hello", 1))
            result = {"start_to_first_token_s": time.monotonic() - server.began_s}
            result |= asyncio.run(measure_hops(server, hops))
            first = requests // 5
            for numbers in (range(first), range(first, requests)):
                asyncio.run(run_many(server, numbers, 16))
                for name, resident_mb in server.resident_mb().items():
                    result[f"{name}_mb_after_{numbers.stop}"] = resident_mb
        finally:
            server.stop()
    return result | {"load_average": os.getloadavg()[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    options = parser.parse_args()
    result = measure(*((1000, 20) if options.quick else (5000, 60)))
    if options.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name:<28}{value:>10.2f}\n")


if __name__ == "__main__":
    main()
