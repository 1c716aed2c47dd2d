"""What one budget does for a compound path: TTFT attainment with a slow-tailed retriever.

    python -m benchmarks.pipelines --virtual [--requests N] [--rate R]
    python -m benchmarks.pipelines [--requests N] [--rate R] [--model SOURCE]

The retriever answers in lognormal time, p50 60 ms and p99 800 ms; the target is a first token
within 1 s. Three ways to one model: with the budget, without it, and with no retrieval. Poisson
arrivals, each question with passages of its own. Admitted are requests that got an answer.

With ``--virtual`` the whole path in front of the replica, pipeline, admission and fleet, runs on a
clock that jumps; the replica takes the times of SmolLM2-135M on two cores (2,000 prompt tokens a
second, 20 ms a step). What comes out does not depend on how busy the machine is. Without it a
server is started as a process of its own and asked over HTTP, and the retriever is a service on
loopback; ``--model`` may name a ``sim:`` model, which computes nothing. Last comes what the stage
costs beside the retriever's own time.
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, quantiles
from urllib.parse import urlsplit

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.observer import Observer
from sluice.cluster.pipelines import Pipeline, PipelineGateway
from sluice.cluster.retrieving import RetrievalStage, StageLimits
from sluice.cluster.served import ServedModel
from sluice.config.sections import SloSection
from sluice.core.errors import Overloaded
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan
from sluice.retrieval.passages import Passage
from sluice.runtime.generation import Call, ChatPrompt, Delta, ModelCard
from sluice.runtime.quoting import Quotation
from sluice.runtime.templates import ChatTemplate
from sluice.runtime.word_pieces import WordPieces, made_up_facts
from sluice.telemetry.metrics import Metrics
from sluice.testing.executors import FakeExecutor
from sluice.testing.processes import FakeProcess, VirtualTimeLoop
from sluice.testing.retrievers import FakeRetriever

P50_S, P99_S, TTFT_S = 0.060, 0.800, 1.0
PASSAGES, WORDS, OUTPUT_TOKENS = 4, 90, 16
SIGMA = math.log(P99_S / P50_S) / 2.3263
MODES = ("budget on", "budget off", "no retrieval")
NAMES = {"budget on": "on", "budget off": "off", "no retrieval": "m"}
SEED = 7


@dataclass(slots=True)
class Seen:
    """What clients of one mode saw."""

    ttft_s: list[float] = field(default_factory=list)
    passages: list[int] = field(default_factory=list)
    degraded: int = 0
    refused: int = 0
    stage_s: list[float] = field(default_factory=list)

    def note(self, ttft_s: float, passages: int, *, degraded: bool) -> None:
        self.ttft_s.append(ttft_s)
        self.passages.append(passages)
        self.degraded += degraded


def drawn_s(chance: Random) -> float:
    """One retrieval."""
    return P50_S * math.exp(SIGMA * chance.gauss(0.0, 1.0))


def passages_for(chance: Random) -> list[Passage]:
    """Passages that no other question gets."""
    words = ("time", "model", "answer", "token", "window", "river", "stone", "paper", "garden")
    return [
        Passage(
            f"d{chance.randrange(10**6)}", n, " ".join(chance.choices(words, k=WORDS)), "", 1 / n
        )
        for n in range(1, PASSAGES + 1)
    ]


async def arrivals(
    rate_rps: float, requests: int, ask: Callable[[int], Coroutine[None, None, None]]
) -> None:
    """Open-loop Poisson arrivals; returns when all are answered."""
    chance = Random(SEED)
    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(ask(number))
            await asyncio.sleep(chance.expovariate(rate_rps))


# --------------------------------------------------------------------------------------- virtual


def step_ns(plan: Plan) -> int:
    """SmolLM2-135M on two cores, about."""
    return 20_000_000 + 500_000 * max(0, plan.tokens - 8)


@dataclass(frozen=True, slots=True)
class Virtual:
    """The path in this process, and the retriever that it asks."""

    gateway: PipelineGateway
    behind: LocalGateway
    retriever: FakeRetriever


def virtual_path(mode: str, chance: Random) -> Virtual:
    """The path with a replica that takes these times; made within its loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    facts = made_up_facts("m", 8192, 49_152)
    slo = {"chat": SloSection(ttft_s=TTFT_S)}
    served = ServedModel(
        ModelCard("m", 0, 8192),
        WordPieces(facts),
        ChatTemplate(facts, lambda: datetime.now(UTC)),
        ServiceClasses(slo, default="chat"),
        new_id=lambda: "call",
    )
    observer = Observer(Metrics(["m"], slo_classes=list(slo)), None, loop.now_ns)
    limits = BatchingLimits(2048, 32, 8192, sequences_max=32)
    driver = FleetDriver(
        fleet=Fleet([PoolLimits("m", ("m-0",))], chance=Random(SEED)),
        models={"m": served},
        replicas={"m-0": "m"},
        launch=lambda replica_id, listener: FakeProcess(  # type: ignore[arg-type,return-value]
            replica_id,
            listener,
            limits,
            loop.now_ns,
            executor=lambda told: FakeExecutor(told, duration_ns=step_ns),
        ),
        observer=observer,
        clock=loop.now_ns,
    )
    behind = LocalGateway(driver, {"m": served}, observer)
    stage_limits = StageLimits(
        "on",
        passages_max=PASSAGES,
        retrieval_ns_max=60_000_000_000,
        keeps_budget=mode == "budget on",
    )
    retriever = FakeRetriever(delay_s=lambda: drawn_s(chance))
    stage = RetrievalStage(stage_limits, retriever, None, Quotation(), loop.now_ns)
    return Virtual(PipelineGateway(behind, [Pipeline("on", "m", stage)]), behind, retriever)


async def run_virtual(mode: str, rate_rps: float, requests: int) -> Seen:
    """One mode in virtual time."""
    chance, seen = Random(SEED), Seen()
    path = virtual_path(mode, chance)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    await path.behind.start()

    async def ask(number: int) -> None:
        path.retriever.found = passages_for(chance)
        began_ns = loop.now_ns()
        prompt = ChatPrompt([{"role": "user", "content": f"Question {number}: what is it?"}])
        call = Call(
            str(number), "m" if mode == "no retrieval" else "on", began_ns, prompt,
            output_tokens_max=OUTPUT_TOKENS, likeness=number + 1, body_bytes=100,
        )  # fmt: skip
        try:
            stream = await path.gateway.generate(call)
            await stream.settled()
        except Overloaded:
            seen.refused += 1
            return
        first_s = None
        async for piece in stream:
            if isinstance(piece, Delta) and first_s is None:
                first_s = (loop.now_ns() - began_ns) / 1e9
        told = stream.terms.retrieval
        passages = 0 if told is None else len(told.sources)
        if first_s is not None:
            seen.note(first_s, passages, degraded=bool(stream.terms.disclosed))

    await arrivals(rate_rps, requests, ask)
    await path.behind.close()
    return seen


# ------------------------------------------------------------------------------------------ live

SETTINGS = """
[server]
listen = "127.0.0.1:0"
[models.m]
source = "{model}"
slo = "chat"
[slo.chat]
ttft = "1s"
[pipelines.on]
model = "m"
retriever = "http"
url = "{url}"
passages = {passages}
retrieval_max = "60s"
[pipelines.off]
model = "m"
retriever = "http"
url = "{url}"
passages = {passages}
retrieval_max = "60s"
budget = false
[journal]
enabled = false
"""


class Service:
    """A retriever on loopback that takes lognormal time, or ``delay_s``; none where ``quick``."""

    def __init__(self, delay_s: Callable[[], float] | None = None) -> None:
        self.chance, self.quick = Random(SEED), False
        self._delay_s = delay_s or (lambda: drawn_s(self.chance))
        self.own_s: list[float] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                began_s = time.perf_counter()
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                await reader.readexactly(length)
                if not self.quick:
                    await asyncio.sleep(self._delay_s())
                found = [
                    {"text": one.text, "document": one.document, "number": one.number}
                    for one in passages_for(self.chance)
                ]
                body = json.dumps({"passages": found}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
                    + f"{len(body)}\r\n\r\n".encode()
                    + body
                )
                self.own_s.append(time.perf_counter() - began_s)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def chat(port: int, model: str, number: int, seen: Seen) -> None:
    """One streamed chat."""
    asked = {
        "model": model,
        "stream": True,
        "max_tokens": OUTPUT_TOKENS,
        "messages": [{"role": "user", "content": f"Question {number}: what is it?"}],
    }
    body = json.dumps(asked).encode()
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: "
        + f"{len(body)}\r\n\r\n".encode()
        + body
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if " 200 " not in head.partition("\r\n")[0]:
        seen.refused += 1
    else:
        await reader.readuntil(b"data: ")
        first_s = time.perf_counter() - began_s
        told = dict(
            part.split("=", 1)
            for line in head.split("\r\n")
            if line.startswith("x-sluice-retrieval: ")
            for part in line.partition(": ")[2].split("; ")
            if "=" in part
        )
        seen.note(first_s, int(told.get("passages", 0)), degraded="x-sluice-degraded" in head)
        seen.stage_s.append(float(told.get("ms", 0.0)) / 1e3)
        await reader.read()
    writer.close()


async def port_of(server: asyncio.subprocess.Process) -> int:
    """Where a server listens, once it can be asked."""
    assert server.stderr is not None
    while line := (await server.stderr.readline()).decode():
        if line.startswith("API "):
            return urlsplit(line.split()[1]).port or 0
    raise SystemExit("the server ended early")


async def run_live(model: str, rate_rps: float, requests: int) -> tuple[dict[str, Seen], Seen]:
    """All modes against a server of its own, and then the quick retriever one by one."""
    service = Service()
    listener = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/search"
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "sluice.toml"
        settings.write_text(SETTINGS.format(model=model, url=url, passages=PASSAGES))
        arguments = ("-m", "sluice", "serve", "-c", str(settings))
        server = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stderr=asyncio.subprocess.PIPE
        )
        try:
            port = await port_of(server)
            for number in range(10):  # speeds are learned
                await chat(port, "off", number, Seen())
            found = {}
            for mode in MODES:
                found[mode] = seen = Seen()
                await arrivals(rate_rps, requests, partial(chat, port, NAMES[mode], seen=seen))
            service.quick, one = True, Seen()
            service.own_s.clear()
            for number in range(100):
                await chat(port, "on", number, one)
            pairs = zip(one.stage_s, service.own_s, strict=True)
            one.stage_s = [stage_s - own_s for stage_s, own_s in pairs]
        finally:
            server.terminate()
            await server.wait()
    listener.close()
    return found, one


# ---------------------------------------------------------------------------------------- report


def table(found: dict[str, Seen]) -> None:
    """A line for each mode."""
    print(f"{'':14}{'admitted':>9}{'refused':>9}{'TTFT<=1s':>10}{'p50':>8}{'p95':>8}{'p99':>8}"
          f"{'passages':>10}{'degraded':>10}")  # fmt: skip
    for mode, seen in found.items():
        times = sorted(seen.ttft_s)
        cuts = quantiles(times, n=100, method="inclusive")
        met = sum(one <= TTFT_S for one in times) / len(times)
        print(
            f"{mode:14}{len(times):9}{seen.refused:9}{met:10.2%}{cuts[49]:8.3f}{cuts[94]:8.3f}"
            f"{cuts[98]:8.3f}{fmean(seen.passages):10.2f}{seen.degraded / len(times):10.1%}"
        )


def overhead(times_s: Sequence[float]) -> None:
    """What the stage adds."""
    cuts = quantiles(times_s, n=20, method="inclusive")
    print(
        f"stage beside the retriever's own time: median {cuts[9] * 1e3:.2f} ms, "
        f"p95 {cuts[18] * 1e3:.2f} ms (with the HTTP hop to it)"
    )


async def cpu_s(model: str, calls: int) -> float:
    """Processor time until a call is admitted; new passages each time, which come at once."""
    path, chance, spent_s = virtual_path("budget on", Random(SEED)), Random(SEED), 0.0
    await path.behind.start()
    path.retriever.delay_s = lambda: 0.0
    for number in range(calls):
        path.retriever.found = passages_for(chance)
        prompt = ChatPrompt([{"role": "user", "content": f"Question {number}?"}])
        now_ns = round(asyncio.get_running_loop().time() * 1e9)
        call = Call(f"{number}", model, now_ns, prompt, output_tokens_max=1, body_bytes=100)
        began_s = time.process_time()
        stream = await path.gateway.generate(call)
        spent_s += time.process_time() - began_s
        async for _ in stream:
            pass
    await path.behind.close()
    return spent_s / calls


def virtual_overhead() -> None:
    """What the stage and the longer prompt take, per call."""
    taken = []
    for model in ("m", "on"):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            taken.append(runner.run(cpu_s(model, 300)))
    print(
        f"processor time until admitted: {taken[0] * 1e3:.2f} ms for the model, "
        f"{taken[1] * 1e3:.2f} ms for the pipeline over it"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    asked = parser.parse_args()
    print(
        f"retriever lognormal p50 {P50_S * 1e3:.0f} ms, p99 {P99_S * 1e3:.0f} ms; "
        f"TTFT {TTFT_S:g} s; {PASSAGES} passages of about {WORDS} words; {asked.rate:g} requests/s"
    )
    if asked.virtual:
        found = {}
        for mode in MODES:
            with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                found[mode] = runner.run(run_virtual(mode, asked.rate, asked.requests or 3000))
        table(found)
        virtual_overhead()
    else:
        found, one = asyncio.run(run_live(asked.model, asked.rate, asked.requests or 200))
        table(found)
        overhead(one.stage_s)


if __name__ == "__main__":
    main()
