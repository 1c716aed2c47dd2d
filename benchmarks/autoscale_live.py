"""A burst that wakes a warm replica, on this machine: ``python benchmarks/autoscale_live.py``.

Two embedded replicas of one processor thread each, of which one serves and one waits loaded. First
the capacity of one is measured, with a server of its own. Then requests come evenly at 0.4 times
that rate, for ``--burst-s`` seconds at ``--burst`` times, and at 0.4 times again. At the end the
operator lets one replica go while both answer long requests.

Prints the time from the first request of the burst to the decision, to the warm replica being
ready and to its first request; the time to first token over time; and what became of every
stream. Takes about two minutes. Exits with 1 where the wake took more than 3 s, or a stream was not
whole.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

WAKE_S_MAX = 3.0
_BASE, _BEFORE_S, _AFTER_S, _BIN_S = 0.4, 10.0, 20.0, 2.0
_PROMPT_WORDS, _OUTPUT_TOKENS, _LONG_TOKENS = 60, 24, 160
_SEATS = 4
_KEY = "bench"
_SETTINGS = """
[server]
listen = "127.0.0.1:0"
admin_key_file = "{key}"
allow_unauthenticated = true
[models.m]
source = "{source}"
threads = 1
context_tokens_max = 2048
kv_bytes = "128MiB"
sequences_max = {seats}
queue_requests_max = 1000
replicas = {{ min = 1, max = {most}, warm = {warm} }}
[journal]
dir = "{journal}"
"""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; times in seconds of the monotonic clock."""

    planned_s: float
    status: int = 0
    first_s: float | None = None
    end_s: float = 0.0
    replica: str = ""
    is_whole: bool = False


class Server:
    """``sluice serve`` as a process."""

    def __init__(self, folder: Path, source: str, *, most: int, warm: int) -> None:
        folder.mkdir(parents=True)
        self.journal = folder / "journal"
        self._log = folder / "log"
        settings, key = folder / "sluice.toml", folder / "key"
        key.write_text(_KEY, encoding="utf-8")
        told = _SETTINGS.format(
            source=source, journal=self.journal, most=most, warm=warm, seats=_SEATS, key=key
        )
        settings.write_text(told, encoding="utf-8")
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self.host, self.port = "127.0.0.1", 0

    async def __aenter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sluice", "serve", "-c", str(self._settings),
                stdout=log, stderr=log,
            )  # fmt: skip
        while True:
            text = self._log.read_text(errors="replace")
            if "API  " in text:
                break
            if self._process.returncode is not None:
                raise SystemExit(f"the server did not start:\n{text}")
            await asyncio.sleep(0.1)
        self.port = int(text.split("API ")[1].split("/v1")[0].rsplit(":", 1)[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
            await self._process.wait()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the server answers to its operator."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        sent = b"" if body is None else json.dumps(body).encode()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {_KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n"
            "connection: close\r\n\r\n".encode()
            + sent
        )
        answer = await reader.read()
        writer.close()
        return json.loads(answer.split(b"\r\n\r\n", 1)[1])

    async def states(self) -> list[str]:
        """The states of all replicas."""
        told = await self.call("GET", "/admin/replicas")
        return [one["state"] for one in told["replicas"]]

    async def until(self, wanted: Sequence[str], wait_s: float = 60.0) -> None:
        """Wait until the replicas are in these states."""
        async with asyncio.timeout(wait_s):
            while sorted(await self.states()) != sorted(wanted):  # noqa: ASYNC110 - by HTTP
                await asyncio.sleep(0.05)

    async def stream(self, number: int, tokens: int, planned_s: float) -> Seen:
        """Ask for one answer and read it to its end."""
        seen = Seen(planned_s)
        body = {
            "model": "m", "stream": True, "max_tokens": tokens, "temperature": 0,
            "prompt": f"Story {number}: " + " ".join(
                f"word{(number * 7 + n) % 997}" for n in range(_PROMPT_WORDS)
            ),
        }  # fmt: skip
        sent = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent
            )
            await self._read(reader, seen)
        except (OSError, asyncio.IncompleteReadError):
            seen.is_whole = False
        finally:
            writer.close()
        seen.end_s = time.monotonic()
        return seen

    async def _read(self, reader: asyncio.StreamReader, seen: Seen) -> None:
        seen.status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            if name.lower() == "x-sluice-replica":
                seen.replica = value.strip()
        finished = failed = False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if seen.first_s is None:
                seen.first_s = time.monotonic()
            failed = failed or b'"error"' in line
            finished = finished or b'"finish_reason":"' in line
            if line.startswith(b"data: [DONE]"):
                seen.is_whole = seen.status == 200 and finished and not failed


async def capacity_rps(server: Server, span_s: float) -> float:
    """Requests per second that one replica ends while it always has more to do."""
    ends: list[float] = []
    stop_s = time.monotonic() + span_s

    async def client(first: int) -> None:
        number = first
        while time.monotonic() < stop_s:
            await server.stream(number, _OUTPUT_TOKENS, time.monotonic())
            ends.append(time.monotonic())
            number += 1000

    await asyncio.gather(*(client(n) for n in range(2 * _SEATS)))
    steady = [end for end in ends if stop_s - 0.75 * span_s <= end <= stop_s]
    return len(steady) / (0.75 * span_s)


async def play(server: Server, parts: Sequence[tuple[float, float]]) -> tuple[float, list[Seen]]:
    """Send requests evenly, for so many seconds at so many a second; whatever becomes of them.

    Gives the time of the first request of the second part, and all of them.
    """
    tasks, number, at_s = [], 100_000, time.monotonic() + 0.1
    starts = []
    async with asyncio.TaskGroup() as group:
        for span_s, rate in parts:
            starts.append(at_s)
            for step in range(round(span_s * rate)):
                planned_s = at_s + step / rate
                await asyncio.sleep(max(0.0, planned_s - time.monotonic()))
                asked = server.stream(number, _OUTPUT_TOKENS, planned_s)
                tasks.append(group.create_task(asked))
                number += 1
            at_s += span_s
    return starts[1], [task.result() for task in tasks]


async def let_go(server: Server) -> tuple[float, list[Seen]]:
    """Let one replica go while both answer; gives how long that took, and the streams."""
    await server.call("POST", "/admin/scale", {"model": "m", "replicas": 2})
    await server.until(["ready", "ready"])
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(server.stream(200_000 + n, _LONG_TOKENS, time.monotonic()))
            for n in range(2 * _SEATS)
        ]
        await asyncio.sleep(1.5)
        began_s = time.monotonic()
        await server.call("POST", "/admin/scale", {"model": "m", "replicas": 1})
    seen = [stream.result() for stream in streams]
    await server.until(["ready", "warm"])
    return time.monotonic() - began_s, seen


def wakes(journal: Path, burst_s: float) -> dict[str, float]:
    """Seconds from the beginning of the burst to each step of the wake, from the journal."""
    from sluice.telemetry.journal import JournalReader  # noqa: PLC0415
    from sluice.telemetry.records import (  # noqa: PLC0415
        FleetScaled,
        RequestDispatched,
        StartStage,
    )

    found: dict[str, float] = {}
    woken = ""
    for entry in JournalReader(journal).entries():
        record, after_s = entry.record, entry.record.t_ns / 1e9 - burst_s
        if after_s < 0:
            continue
        match record:
            case FleetScaled(number=2):
                found.setdefault("decided_s", after_s)
            case StartStage(stage="wake"):
                found.setdefault("ready_s", after_s)
                found.setdefault("wake_s", record.duration_ns / 1e9)
                woken = record.replica
            case RequestDispatched() if record.replica == woken:
                found.setdefault("first_request_s", after_s)
            case _:
                pass
    return found


async def measure(source: str, burst: float, burst_s: float) -> dict[str, Any]:
    """All of it, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sluice-live-") as name:
        folder = Path(name)
        _tell("capacity of one replica")
        async with Server(folder / "one", source, most=1, warm=0) as server:
            rate = await capacity_rps(server, 10.0)
        _tell(f"{rate:.2f} requests/s; then a burst to {burst:g} times of it")
        async with Server(folder / "two", source, most=2, warm=1) as server:
            await server.until(["ready", "warm"])
            parts = ((_BEFORE_S, _BASE * rate), (burst_s, burst * rate), (_AFTER_S, _BASE * rate))
            began_s, seen = await play(server, parts)
            _tell("letting one replica go while both answer")
            left_s, streams = await let_go(server)
        return {
            "capacity_rps": rate,
            "burst": burst,
            "burst_s": burst_s,
            "wake": wakes(folder / "two" / "journal", began_s),
            "over_time": _bins(seen, began_s),
            "requests": len(seen),
            "whole": sum(one.is_whole for one in seen),
            "let_go": {
                "seconds": left_s,
                "streams": len(streams),
                "replicas": len({one.replica for one in streams}),
                "dropped": sum(not one.is_whole for one in streams),
            },
        }


def _bins(seen: Sequence[Seen], began_s: float) -> list[dict[str, float]]:
    """Time to first token by when requests were planned, in seconds after the burst began."""
    bins: dict[int, list[float]] = {}
    for one in seen:
        if one.first_s is not None:
            place = int((one.planned_s - began_s) // _BIN_S)
            bins.setdefault(place, []).append(one.first_s - one.planned_s)
    return [
        {
            "from_s": place * _BIN_S,
            "requests": len(times),
            "ttft_p50_s": statistics.median(times),
            "ttft_max_s": max(times),
        }
        for place, times in sorted(bins.items())
    ]


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _print(result: Mapping[str, Any]) -> None:
    wake, gone = result["wake"], result["let_go"]
    print(f"capacity of one replica: {result['capacity_rps']:.2f} requests/s\n")
    print("| seconds after the burst began | |\n|---|---|")
    for name, words in (
        ("decided_s", "one more is to serve"),
        ("ready_s", "the warm replica serves"),
        ("first_request_s", "it is given its first request"),
    ):
        print(f"| {words} | {wake.get(name, float('nan')):.2f} |")
    print("\n| from, s | requests | TTFT p50, s | TTFT max, s |\n|---|---|---|---|")
    for row in result["over_time"]:
        times = f"{row['ttft_p50_s']:.2f} | {row['ttft_max_s']:.2f}"
        print(f"| {row['from_s']:+.0f} | {row['requests']} | {times} |")
    print(f"\nrequests: {result['requests']}, whole answers: {result['whole']}")
    print(
        f"let go: {gone['streams']} streams on {gone['replicas']} replicas, {gone['dropped']} "
        f"dropped; the replica was warm again after {gone['seconds']:.1f} s"
    )


def main() -> int:
    """Measure and print; 1 where it does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, path or sim:…")
    parser.add_argument("--burst", type=float, default=3.0, help="times the capacity of one")
    parser.add_argument("--burst-s", type=float, default=8.0, help="length of the burst")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    result = asyncio.run(measure(asked.model, asked.burst, asked.burst_s))
    if asked.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    first_s = result["wake"].get("first_request_s")
    held = first_s is not None and first_s <= WAKE_S_MAX
    whole = result["whole"] == result["requests"] and not result["let_go"]["dropped"]
    print(f"woken within {WAKE_S_MAX:g} s: {held}; no stream dropped: {whole}", file=sys.stderr)
    return 0 if held and whole else 1


if __name__ == "__main__":
    sys.exit(main())
