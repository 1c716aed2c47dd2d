"""What observing costs: CPU time per request, spans, and journal bytes, by what is on.

``python -m benchmarks.telemetry [--requests N] [--rounds N] [--live N] [--engine N]``. First the
observer alone: the same streamed requests with and without a journal, and the export of their spans
as its process does it. Then a real server with a simulated model, asked by a process of its own:
CPU time of the gateway's process for each request, without journal, with it, and with spans. CPU
time is that of single processes, so that other work on the machine disturbs little. Last, where
``--engine`` asks for it, requests/s of the embedded engine at full load. Medians, least, greatest.
"""

import argparse
import gc
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import psutil

from sluice.cluster.observer import Observer
from sluice.core.events import Dispatch, ReplicaScore
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.runtime import messages
from sluice.runtime.generation import Call, Delta, TokenPrompt
from sluice.telemetry.following import Follower
from sluice.telemetry.journal import Clocks, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.metrics import Metrics
from sluice.telemetry.records import Chunk, Step
from sluice.telemetry.span_export import SpanExport, SpanQueue
from sluice.telemetry.spans import Span

MODEL = "m"
CHUNKS = 60
PROMPT = 300
BATCH = 32
_MS = 1_000_000
_DELTA = Delta(0, "", 1)


class Nowhere:
    """Takes all spans and keeps none."""

    def send(self, spans: Sequence[Span]) -> bool:
        """Take them."""
        return bool(spans) or True

    def close(self) -> None:
        """Nothing to close."""


def name_of(number: int) -> str:
    """An id as random as those of a server."""
    return blake2b(str(number).encode(), digest_size=16).hexdigest()


def requests(count: int) -> Iterator[tuple[Call, Request]]:
    """Calls with ids like those of a server."""
    for number in range(count):
        name = name_of(number)
        call = Call(name, MODEL, 0, TokenPrompt(()), client_id="", operation="chat")
        yield call, Request(name, 0, tuple(range(PROMPT)), 200, slo_class="chat", tenant="acme")


def one_life(observer: Observer, call: Call, request: Request) -> None:
    """What the observer is told of one streamed request."""
    score = ReplicaScore("m-0", 1.0, PROMPT, 3, kv_fits=True)
    observer.arrived(call, request, lambda _: "")
    observer.dispatched(Dispatch(request.id, "m-0", 1, (score, score)))
    for _ in range(CHUNKS):
        observer.text(request, _DELTA)
    phases = PhaseTimes(0, _MS, 2 * _MS, 30 * _MS, 600 * _MS, 0)
    usage = Usage(PROMPT, 64, CHUNKS)
    ended = messages.RequestEnded(request.id, EndReason.STOP, usage, phases, 0, "")
    observer.ended(request, ended)


def cpu_us(work: Callable[[], None], count: int) -> float:
    """CPU time of all threads of this process for each request, in microseconds."""
    gc.collect()
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / count / 1000


def observed(count: int, folder: Path | None) -> tuple[float, int]:
    """CPU time per request of an observer, and bytes on disk per request."""
    clocks = Clocks(time.monotonic_ns, time.time_ns)  # noqa: TID251
    limits = JournalLimits(queue_records_max=10**7)
    journal = None if folder is None else JournalWriter(folder, "gateway", clocks, limits)
    observer = Observer(Metrics([MODEL], slo_classes=["chat"]), journal, time.monotonic_ns)
    made = list(requests(count))

    def work() -> None:
        for call, request in made:
            one_life(observer, call, request)
        observer.close()

    spent_us = cpu_us(work, count)
    size = 0 if folder is None else sum(path.stat().st_size for path in folder.iterdir())
    return spent_us, size // count


def steps(folder: Path, count: int) -> int:
    """A replica's journal of the same requests; bytes per request."""
    clocks = Clocks(time.monotonic_ns, time.time_ns)  # noqa: TID251
    limits = JournalLimits(queue_records_max=10**7)
    journal = JournalWriter(folder, "replica-m-0", clocks, limits)
    names = [name_of(number) for number in range(count)]
    for number in range(count * (CHUNKS + 1) // BATCH):
        at = number * BATCH // (CHUNKS + 1)
        rows = tuple((name, 0) for name in names[max(0, at - BATCH) : at])
        chunk = (Chunk(names[at], 0, PROMPT, 0),) if at < count else ()
        now_ns = time.monotonic_ns()
        journal.append(Step(now_ns, "m-0", number, 9 * _MS, 10 * _MS, rows, chunk, 0, 900, 32, 4))
    journal.close()
    found = folder.glob("replica-*")
    return sum(path.stat().st_size for path in found) // count


def exported(folder: Path, count: int, share: float) -> tuple[float, float]:
    """CPU time per request of the process that exports, and spans per request."""
    queue = SpanQueue(Nowhere(), 10**7)
    export = SpanExport(queue, share, time.monotonic_ns)
    follower = Follower(folder, 0)

    def work() -> None:
        export.take(follower.news())
        export.finish()
        queue.close(60)

    spent_us = cpu_us(work, count)
    follower.close()
    return spent_us, export.counted.exported / count


VARIANTS = {
    "no journal": ["journal.enabled=false"],
    "journal": [],
    "journal and spans, 1 % kept": ["tracing.endpoint=http://127.0.0.1:9", "tracing.share=0.01"],
}
SIMULATED, EMBEDDED = "sim:llama-3.1-8b@h100x1", "smollm2-135m-instruct"
_SETTINGS = (
    "models.m.sequences_max=64",
    "models.m.queue_requests_max=500",
    "models.m.slo=chat",
    "slo.chat.ttft=30s",
)
_CLIENT = r"""
import asyncio, json, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
left = iter(range(count))
head = (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n")
async def client(n):
    for i in left:
        prompt = [(n * 7919 + i * 104729 + k) % 49000 for k in range(300)]
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 60, "stream": True,
                           "ignore_eos": True}).encode()
        r, w = await asyncio.open_connection(host, port)
        w.write(head % len(body) + body)
        while await r.read(65536):
            pass
        w.close()
async def main():
    await asyncio.gather(*(client(n) for n in range(32)))
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Live:
    """Of requests to a real server: CPU time of gateway and exporter for each, journal, pace."""

    gateway_us: float
    spans_us: float
    journal_bytes: int
    requests_per_s: float


def live(source: str, count: int, options: list[str], folder: Path) -> Live:
    """Serve ``source`` to 32 clients until ``count`` requests are answered."""
    journal = folder / "journal"
    settings = [f"models.m.source={source}", *_SETTINGS, f"journal.dir={journal}", *options]
    command = [sys.executable, "-m", "sluice", "serve", "--listen", "127.0.0.1:0"]
    command += [word for one in settings for word in ("--set", one)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        address = next(line.split()[1] for line in server.stderr if line.startswith("API"))
        host, _, port = address.removeprefix("http://").removesuffix("/v1").partition(":")
        threading.Thread(target=server.stderr.read, daemon=True).start()
        process = psutil.Process(server.pid)
        exporters = [one for one in process.children() if "span_exporter" in str(one.cmdline())]
        ask = [sys.executable, "-c", _CLIENT, host, port]
        subprocess.run([*ask, "100"], check=True)
        before, before_spans = spent_s([process]), spent_s(exporters)
        began_s = time.monotonic()
        subprocess.run([*ask, str(count)], check=True)
        took_s = time.monotonic() - began_s
        time.sleep(2.5)  # until the exporter has seen all
        gateway_us = (spent_s([process]) - before) / count * 1e6
        spans_us = (spent_s(exporters) - before_spans) / count * 1e6
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    size = sum(path.stat().st_size for path in journal.glob("*")) if journal.exists() else 0
    return Live(gateway_us, spans_us, size // (count + 100), count / took_s)


def spent_s(processes: list[psutil.Process]) -> float:
    """CPU time of processes so far."""
    return sum(one.cpu_times().user + one.cpu_times().system for one in processes)


def in_turn(source: str, count: int, rounds: int) -> dict[str, list[Live]]:
    """Each variant ``rounds`` times, one after the other."""
    found: dict[str, list[Live]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, options in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(live(source, count, options, Path(folder)))
    return found


def print_live(count: int, rounds: int) -> None:
    """The second table."""
    found = in_turn(SIMULATED, count, rounds)
    base = statistics.median(one.gateway_us for one in found["no journal"])
    print(f"\n{count} requests to a server, {rounds} rounds; CPU time, µs per request")
    print(f"  {'':32} {'gateway':>20} {'added':>8} {'exporter':>9} {'journal bytes':>14}")
    for name, all_rounds in found.items():
        gateway = [one.gateway_us for one in all_rounds]
        middle = statistics.median(gateway)
        spans = statistics.median(one.spans_us for one in all_rounds)
        size = statistics.median(one.journal_bytes for one in all_rounds)
        spread = f"{middle:.0f} ({min(gateway):.0f}–{max(gateway):.0f})"
        print(f"  {name:32} {spread:>20} {middle - base:8.0f} {spans:9.0f} {size:14.0f}")


def print_engine(count: int, rounds: int) -> None:
    """The third table."""
    found = in_turn(EMBEDDED, count, rounds)
    paces = {name: [one.requests_per_s for one in runs] for name, runs in found.items()}
    print(f"\n{count} requests to the embedded engine, 32 at once, {rounds} rounds; requests/s")
    for name, pace in paces.items():
        pairs = zip(pace, paces["no journal"], strict=True)
        share = statistics.median(one / base for one, base in pairs)
        middle = statistics.median(pace)
        print(f"  {name:32} {middle:.2f} ({min(pace):.2f}–{max(pace):.2f})   {share:7.1%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--live", type=int, default=3000, help="requests to a server; 0: none")
    parser.add_argument("--engine", type=int, default=0, help="requests to the embedded engine")
    given = parser.parse_args()
    count, rounds = given.requests, given.rounds
    rows: dict[str, list[float]] = {}
    sizes: dict[str, float] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            spent, _ = observed(count, None)
            rows.setdefault("metrics and dashboard", []).append(spent)
            spent, size = observed(count, folder)
            rows.setdefault("metrics, dashboard and journal", []).append(spent)
            sizes["gateway's journal, bytes per request"] = size
            sizes["replica's steps, bytes per request"] = steps(folder, count)
            assert sum(1 for _ in JournalReader(folder).entries()) > count
            for share in (0.0, 0.01, 1.0):
                spent, spans = exported(folder, count, share)
                words = f"span exporter's process, {100 * share:g} % kept"
                rows.setdefault(words, []).append(spent)
                sizes[f"spans per request, {100 * share:g} % kept"] = round(spans, 2)
    print(
        f"{count} streamed requests of {CHUNKS} chunks, {rounds} rounds; CPU time, µs per request"
    )
    for words, spent_us in rows.items():
        middle = statistics.median(spent_us)
        print(f"  {words:44} {middle:8.1f}   {min(spent_us):.1f}–{max(spent_us):.1f}")
    for words, value in sizes.items():
        print(f"  {words:44} {value:8}")
    if given.live:
        print_live(given.live, rounds)
    if given.engine:
        print_engine(given.engine, rounds)


if __name__ == "__main__":
    main()
