"""Incidents on a real server with the embedded engine, for ``benchmarks/doctor.py live``.

Each has a healthy window and one with its fault; the fault is made from outside, as an operator
would meet it: by what clients send, by processes that take the processors, by signals to the
replica, by a retriever that becomes slow, or by a restart with other settings. The traffic is open
loop, at a share of the throughput that is measured first. What was started is ended; nothing else
is touched.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import psutil

from benchmarks.pipelines import Service, port_of
from sluice.doctor.windows import Window

ADMIN_KEY = "of-this-benchmark"  # of a server on loopback that lives for some minutes
SHARED, OWN, OUTPUT = 192, 40, 10
TENANTS = ("t0", "t1", "t2", "t3")
# Share of the throughput at which requests usually come.
LOAD = 0.5
# Of each window; a percentile of fewer says nothing.
REQUESTS_MIN = 60
_REQUEST_S_MAX = 60.0
_READY_S_MAX = 120.0
_DRAIN_S_MAX = 40.0
_SETTINGS = """
[server]
listen = "127.0.0.1:0"
trust_tenant_header = true
[models.m]
source = "{source}"
sequences_max = {sequences_max}
kv_bytes = "{kv_bytes}"
queue_requests_max = 5000
[pipelines.docs]
model = "m"
retriever = "http"
url = "{url}"
passages = 1
retrieval_max = "10s"
budget = false
[journal]
dir = "{journal}"
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients send. ``rate`` is relative to the usual, ``extra`` more of it comes of one
    tenant; ``long_every_s`` brings a prompt of ``long`` tokens."""

    rate: float = 1.0
    extra: float = 0.0
    own: int = OWN
    output: int = OUTPUT
    salted: bool = False
    long: int = 0
    long_every_s: float = 0.0
    retrieving: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the model that an incident changes by a restart."""

    sequences_max: int = 32
    kv_bytes: str = "512MiB"


@dataclass(frozen=True, slots=True)
class Incident:
    """One fault. ``accepted`` causes are right; ``told`` is what the operator notes with it."""

    name: str
    accepted: frozenset[str]
    before: Traffic = Traffic()
    during: Traffic = Traffic()
    act: Callable[["Place"], AbstractAsyncContextManager[None]] | None = None
    limits: Limits | None = None
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Played:
    """When an incident was, and how many requests got no answer."""

    incident: Incident
    baseline: Window
    window: Window
    requests: int
    failed: int


class Place:
    """A server, its retriever, and the clients. ``seconds`` is the length of each window."""

    def __init__(self, folder: Path, source: str, seconds: float) -> None:
        self.folder, self.journal = folder, folder / "journal"
        self.seconds = seconds
        self.delay_s = 0.02
        self.rate_rps = 0.0
        self.limits = Limits()
        self._source = source
        self._port = 0
        self._server: asyncio.subprocess.Process | None = None
        self._draining: asyncio.Task[None] | None = None
        self._asked: set[asyncio.Task[bool]] = set()

    async def start(self, limits: Limits, url: str) -> None:
        """Start the server with these limits; waits until it serves."""
        self.limits = limits
        settings = self.folder / "sluice.toml"
        told = _SETTINGS.format(
            source=self._source, sequences_max=limits.sequences_max, kv_bytes=limits.kv_bytes,
            url=url, journal=self.journal,
        )  # fmt: skip
        settings.write_text(told, encoding="utf-8")
        command = (sys.executable, "-m", "sluice", "serve", "-c", str(settings))
        self._server = await asyncio.create_subprocess_exec(
            *command,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"SLUICE_ADMIN_KEY": ADMIN_KEY},  # noqa: TID251 - of a child
        )
        self._port = await asyncio.wait_for(port_of(self._server), _READY_S_MAX)
        stderr = self._server.stderr
        assert stderr is not None
        self._draining = asyncio.create_task(_drained(stderr))  # noqa: TID251 - ended by stop
        async with asyncio.timeout(_READY_S_MAX):
            while not await self._ask("GET", "/ready", b""):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """End the server; kills it where it does not end."""
        server, self._server = self._server, None
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        self._asked.clear()
        if server is None:
            return
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(server.wait(), 40)
        except TimeoutError:
            server.kill()
            await server.wait()
        if self._draining is not None:
            self._draining.cancel()

    def replicas(self) -> list[int]:
        """Process ids of the server's replicas."""
        assert self._server is not None
        return [
            child.pid
            for child in psutil.Process(self._server.pid).children(recursive=True)
            if "sluice.wiring.replica" in child.cmdline()
        ]

    async def calibrate(self, seconds: float) -> float:
        """Measure throughput with requests that follow each other; sets the usual rate."""
        chance, done = Random("calibration"), 0
        end_s = time.monotonic() + seconds

        async def client() -> None:
            nonlocal done
            while time.monotonic() < end_s:
                answered = await self._generate(_asked(Traffic(), chance, "t0"))
                done += answered  # not in one line: it would add to what was there before the wait

        for _ in range(3):
            await self._generate(_asked(Traffic(), chance, "t0"))
        began_s = time.monotonic()
        await asyncio.gather(*(client() for _ in range(16)))
        capacity_rps = done / (time.monotonic() - began_s)
        self.rate_rps = min(15.0, max(1.0, LOAD * capacity_rps))
        return capacity_rps

    async def window(self, traffic: Traffic, seed: str) -> tuple[Window, int, int]:
        """Send traffic for the length of a window; what is not answered goes on behind it.

        Returns the window, its requests, and how many of those that are over got no answer.
        """
        chance = Random(seed)
        arrivals = sorted(_arrivals(traffic, self.rate_rps, self.seconds, chance))
        begun_ns, began_s = time.time_ns(), time.monotonic()  # noqa: TID251 - as the journal
        tasks = []
        for at_s, tenant, tokens in arrivals:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            asked = _asked(replace(traffic, own=tokens), chance, tenant)
            task = asyncio.create_task(self._generate(asked))  # noqa: TID251 - ended here
            tasks.append(task)
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        await asyncio.sleep(max(0.0, began_s + self.seconds - time.monotonic()))
        window = Window(float(begun_ns), float(time.time_ns()))  # noqa: TID251 - as the journal
        over = [task.result() for task in tasks if task.done() and not task.cancelled()]
        return window, len(tasks), over.count(False)

    async def drained(self) -> None:
        """Wait until all requests are answered, and a moment."""
        if self._asked:
            await asyncio.wait(set(self._asked), timeout=_DRAIN_S_MAX)
        await asyncio.sleep(1.0)

    async def note(self, told: Mapping[str, str]) -> None:
        """Tell the server of a rollout."""
        body = json.dumps({"what": "rollout", "details": dict(told)}).encode()
        key = f"authorization: Bearer {ADMIN_KEY}\r\n"
        assert await self._ask("POST", "/admin/events", body, key), "the event was not taken"

    async def _generate(self, asked: tuple[str, str, bytes]) -> bool:
        path, tenant, body = asked
        try:
            async with asyncio.timeout(_REQUEST_S_MAX):
                return await self._ask("POST", path, body, f"x-sluice-tenant: {tenant}\r\n")
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            return False

    async def _ask(self, method: str, path: str, body: bytes, headers: str = "") -> bool:
        """Send a request and read its answer to the end; whether it was 200."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = (
                f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status = await reader.readline()
            while await reader.read(65536):
                pass
        finally:
            writer.close()
        return b" 200 " in status


async def _drained(stderr: asyncio.StreamReader) -> None:
    while await stderr.read(65536):
        pass


# ------------------------------------------------------------------------------------ the traffic


def _arrivals(
    traffic: Traffic, rate_rps: float, seconds: float, chance: Random
) -> Iterator[tuple[float, str, int]]:
    """Time, tenant and own tokens of each request."""
    streams = ((rate_rps * traffic.rate, TENANTS), (rate_rps * traffic.extra, TENANTS[-1:]))
    for rate, tenants in streams:
        at_s = chance.expovariate(rate) if rate else seconds
        while at_s < seconds:
            own = max(8, round(traffic.own * chance.lognormvariate(-0.06, 0.35)))
            yield at_s, chance.choice(tenants), own
            at_s += chance.expovariate(rate)
    if traffic.long_every_s:
        count = int(seconds / traffic.long_every_s)
        for number in range(count):
            at_s = (number + chance.random()) * traffic.long_every_s
            yield at_s, "t1", round(traffic.long * chance.uniform(0.8, 1.2))


def _asked(traffic: Traffic, chance: Random, tenant: str) -> tuple[str, str, bytes]:
    """Path, tenant and body of one request."""
    output = max(4, round(traffic.output * chance.lognormvariate(-0.06, 0.35)))
    common = {"stream": True, "max_tokens": output, "ignore_eos": True}
    if traffic.retrieving:
        words = " ".join(chance.choices(("river", "stone", "paper", "garden", "window"), k=20))
        asked = {"model": "docs", "messages": [{"role": "user", "content": f"{words}?"}]}
        return "/v1/chat/completions", tenant, json.dumps(asked | common).encode()
    shared = Random(chance.random() if traffic.salted else 0)
    prompt = [shared.randrange(1000, 40_000) for _ in range(SHARED)]
    prompt += [chance.randrange(1000, 40_000) for _ in range(traffic.own)]
    return "/v1/completions", tenant, json.dumps({"model": "m", "prompt": prompt} | common).encode()


# ------------------------------------------------------------------------------------- the faults


@asynccontextmanager
async def _burning(place: Place) -> AsyncIterator[None]:
    """Other programs take the processors."""
    code = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\n"
    code += "while time.monotonic() < end: sum(range(10000))"
    count = 2 * (os.cpu_count() or 1)
    command = (sys.executable, "-c", code, str(place.seconds + 10))
    burners = [await asyncio.create_subprocess_exec(*command) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            with contextlib.suppress(ProcessLookupError):
                burner.kill()
            await burner.wait()


@asynccontextmanager
async def _throttled(place: Place) -> AsyncIterator[None]:
    """The replica is stopped for half of the time, as a device is that lowers its clocks."""
    pids = place.replicas()

    def tell(which: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    async def toggle() -> None:
        while True:
            tell(signal.SIGSTOP)
            await asyncio.sleep(0.006)
            tell(signal.SIGCONT)
            await asyncio.sleep(0.006)

    toggling = asyncio.create_task(toggle())  # noqa: TID251 - ended here
    try:
        yield
    finally:
        toggling.cancel()
        await asyncio.gather(toggling, return_exceptions=True)
        tell(signal.SIGCONT)


@asynccontextmanager
async def _killed(place: Place) -> AsyncIterator[None]:
    """The replica's process is gone, and is started again."""

    async def kill() -> None:
        await asyncio.sleep(1.0)
        for pid in place.replicas():
            os.kill(pid, signal.SIGKILL)

    killing = asyncio.create_task(kill())  # noqa: TID251 - ended here
    try:
        yield
    finally:
        await killing


@asynccontextmanager
async def _slow_store(place: Place) -> AsyncIterator[None]:
    """The retriever becomes slow."""
    usual_s, place.delay_s = place.delay_s, 0.45
    try:
        yield
    finally:
        place.delay_s = usual_s


# Prompts with passages are not in the prefix cache and take several times as long.
_RETRIEVING = Traffic(rate=0.4, retrieving=True)


def _one(name: str, *also: str) -> frozenset[str]:
    return frozenset((name, *also))


INCIDENTS = (
    Incident("queue_backed_up", _one("queue_backed_up"), during=Traffic(rate=2.4)),
    Incident("noisy_tenant", _one("noisy_tenant"), during=Traffic(extra=1.5)),
    Incident(
        "long_prompts", _one("long_prompts"), during=Traffic(long=2600, long_every_s=2.5)
    ),
    Incident(
        "longer_context", _one("longer_context"), during=Traffic(own=OWN + 260),
        told={"version": "1.4.2 -> 1.5.0", "template": "91ab -> 77fe"},
    ),
    Incident(
        "output_length", _one("output_length"), during=Traffic(output=3 * OUTPUT),
        told={"version": "1.5.0 -> 1.5.1", "default max_tokens": "10 -> 30"},
    ),
    Incident("cache_hits", _one("cache_hits"), during=Traffic(salted=True)),
    Incident("host_cpu", _one("host_cpu"), act=_burning),
    Incident("engine_slowdown", _one("engine_slowdown"), act=_throttled),
    Incident("cold_start", _one("cold_start"), act=_killed),
    Incident(
        "slow_retrieval", _one("slow_retrieval"), _RETRIEVING, _RETRIEVING, act=_slow_store
    ),
    Incident("admission_limits", _one("admission_limits"), limits=Limits(sequences_max=2)),
    Incident("preemption", _one("preemption"), limits=Limits(kv_bytes="14MiB")),
)  # fmt: skip


# ------------------------------------------------------------------------------------ playing them


async def played(
    place: Place, incidents: tuple[Incident, ...], told: Callable[[str], None]
) -> tuple[list[Played], list[Window]]:
    """Play incidents one after the other; also the healthy windows that had like traffic."""
    service = Service(lambda: place.delay_s)
    listener = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/search"
    found: list[Played] = []
    healthy: list[Window] = []
    try:
        told("starting the server")
        await place.start(Limits(), url)
        capacity_rps = await place.calibrate(min(6.0, place.seconds))
        told(f"{capacity_rps:.1f} requests/s at most; {place.rate_rps:.1f} are usual")
        if place.rate_rps * place.seconds < REQUESTS_MIN:
            told("windows have too few requests to tell anything: is the machine busy?")
        await place.drained()
        for incident in incidents:
            one = await _one_played(place, incident, healthy, url, told)
            found.append(one)
    finally:
        await place.stop()
        listener.close()
    return found, healthy


async def _one_played(
    place: Place,
    incident: Incident,
    healthy: list[Window],
    url: str,
    told: Callable[[str], None],
) -> Played:
    """A healthy window, the fault with its window, and rest."""
    name = incident.name
    if place.limits != Limits():
        await place.stop()
        await place.start(Limits(), url)
    told(f"{name}: healthy")
    baseline, _, _ = await place.window(incident.before, f"{name}/before")
    await place.drained()
    if incident.before == Traffic():
        healthy.append(baseline)
    told(f"{name}: with its fault")
    if incident.limits is not None:
        await place.stop()
        await place.start(incident.limits, url)
    if incident.told:
        await place.note(incident.told)
    async with contextlib.AsyncExitStack() as stack:
        if incident.act is not None:
            await stack.enter_async_context(incident.act(place))
        window, requests, failed = await place.window(incident.during, f"{name}/during")
    if incident.limits is None:
        await place.drained()
    return Played(incident, baseline, window, requests, failed)
