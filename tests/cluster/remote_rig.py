"""The whole server in front of scripted upstreams, on one loop, and a client that shows bytes.

Settings are read from text as a file would be; HTTP runs over loopback in both directions. At its
end nothing may be held: no call, no place, no connection.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sluice.config.load import load_settings
from sluice.executors.http_connection import Connection, Disconnected
from sluice.executors.http_pool import Address, ConnectionLimits, ConnectionPool
from sluice.server.serve import bind, serve
from sluice.server.transport import Transport
from sluice.testing.upstream import Route, ScriptedUpstream
from sluice.wiring.gateway import make_gateway
from sluice.wiring.operations import RunningServer
from sluice.wiring.remote import RemoteIds

CHAT = "/v1/chat/completions"
FIRST_TOKEN_S = 0.25


@dataclass
class Seen:
    """An answer as a client sees it. ``cut`` says that the connection ended before the answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, decoded; ``[DONE]`` as text."""
        lines = [one[6:] for one in self.body.decode().split("\n") if one.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def error(self) -> Any:
        """The error of either kind of answer, ``None`` where it is whole."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            errors = [
                one["error"] for one in self.events if isinstance(one, dict) and "error" in one
            ]
            assert len(errors) <= 1, errors
            return errors[0] if errors else None
        return self.json.get("error")

    @property
    def text(self) -> str:
        """The text of the first choice that came."""
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            return str(self.json["choices"][0]["message"]["content"])
        deltas = (
            choice["delta"].get("content") or ""
            for one in self.events
            if isinstance(one, dict)
            for choice in one.get("choices", ())
        )
        return "".join(deltas)


class Client:
    """A client of a server at an address, which shows every byte of its answers."""

    def __init__(self, address: Address) -> None:
        self.pool = ConnectionPool("client", address, ConnectionLimits())

    async def send(
        self, path: str, body: Mapping[str, Any], *headers: tuple[str, str]
    ) -> Connection:
        """Send a request; the caller reads, or closes, the connection."""
        raw = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += [f"content-length: {len(raw)}", "", ""]
        connection = await self.pool.acquire(5.0)
        connection.send("\r\n".join(lines).encode(), raw)
        return connection

    async def ask(
        self,
        *,
        streamed: bool = True,
        model: str = "m",
        path: str = CHAT,
        headers: Sequence[tuple[str, str]] = (),
        **fields: Any,
    ) -> Seen:
        """Ask and read the answer to its end, or to that of the connection."""
        body = {"model": model, "messages": [{"role": "user", "content": "a b c"}], **fields}
        if streamed:
            body["stream"] = True
        connection = await self.send(path, body, *headers)
        try:
            return await read(connection)
        finally:
            self.pool.release(connection)

    async def get(self, path: str) -> Seen:
        """A GET."""
        connection = await self.pool.acquire(5.0)
        connection.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), b"")
        try:
            return await read(connection)
        finally:
            self.pool.release(connection)

    async def leave(self, connection: Connection) -> None:
        """The client goes away."""
        connection.break_off(ConnectionAbortedError())
        self.pool.release(connection)

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Values by name and label values, in the order of label names; buckets are left out."""
        seen = await self.get("/metrics")
        lines = seen.body.decode().splitlines(keepends=True)
        page = "".join(line for line in lines if "_bucket{" not in line)
        found = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = (value for _, value in sorted(sample.labels.items()))
                found[(sample.name.removeprefix("sluice_"), *labels)] = sample.value
        return found


class Front(Client):
    """The server and its upstreams, in this process."""

    def __init__(
        self, server: RunningServer, upstreams: Sequence[ScriptedUpstream], address: Address
    ) -> None:
        super().__init__(address)
        self.server = server
        self.gateway = server.gateway
        self.upstreams = upstreams

    @property
    def in_flight(self) -> int:
        """Requests that the fleet holds."""
        pools = self.gateway.pools()
        return sum(p.waiting + sum(r.requests for r in p.replicas) for p in pools)

    @property
    def connections_in_use(self) -> int:
        """Connections to engines that carry a request."""
        members: Any = self.gateway._driver._members
        return sum(member._engine.connections_in_use for member in members.values())

    @property
    def calls(self) -> int:
        """Calls without an ending, as the driver or its observer know them."""
        driver = self.gateway._driver
        return max(len(driver._calls), len(driver._observer._timings))

    async def quiet(self, within_s: float = 2.0) -> None:
        """Wait until nothing is held. Raises ``TimeoutError``."""

        def is_quiet() -> bool:
            return not (self.in_flight or self.connections_in_use or self.calls)

        await eventually(is_quiet, within_s)


async def eventually(holds: Callable[[], bool], within_s: float = 2.0) -> None:
    """Let the loop turn until something holds. Raises ``TimeoutError``."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  nothing tells when it does
            await asyncio.sleep(0.002)


async def read(connection: Connection) -> Seen:
    """Read an answer to its end."""
    head = await connection.read_head()
    pieces, was_cut = list[bytes](), False
    try:
        while piece := await connection.read():
            pieces.append(piece)
    except Disconnected:
        was_cut = True
    return Seen(head.status, dict(head.headers), b"".join(pieces), was_cut)


@dataclass(frozen=True)
class Settings:
    """Settings of one model ``m``; ``text`` is added to its table, ``tables`` behind it.

    ``deadline_s`` bounds the time to a first token, between two events and to a whole answer;
    ``whole_s`` replaces it for that.
    """

    engine: str = "vllm"
    deadline_s: float = FIRST_TOKEN_S
    whole_s: float | None = None
    text: str = ""
    tables: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def toml(self, upstreams: Sequence[ScriptedUpstream]) -> str:
        """The file of a server in front of these upstreams."""
        urls = ", ".join(f'"http://127.0.0.1:{upstream.port}"' for upstream in upstreams)
        return f"""
[server]
listen = "127.0.0.1:0"

[models.m]
engine = "{self.engine}"
urls = [{urls}]
upstream_model = "m"
probe = "100ms"
connect_max = "2s"
first_token_max = "{self.deadline_s}s"
silence_max = "{self.deadline_s}s"
whole_max = "{self.whole_s or self.deadline_s}s"
{self.text}
{self.tables}
"""


@asynccontextmanager
async def front(
    folder: Path, *routes: Route, settings: Settings | None = None, text: str = ""
) -> AsyncIterator[Front]:
    """Start upstreams and the server. At the end nothing may be held."""
    settings = settings or Settings(text=text)
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(ScriptedUpstream(one)) for one in routes]
        file = folder / "sluice.toml"
        file.write_text(settings.toml(upstreams))
        async with running(file, upstreams, settings.environment) as started:
            yield started
            await started.quiet()


@asynccontextmanager
async def running(
    file: Path, upstreams: Sequence[ScriptedUpstream], environment: Mapping[str, str] = {}
) -> AsyncIterator[Front]:
    """The server under the settings of a file."""
    journal = file.parent / "journal"
    variables = {"SLUICE_JOURNAL__DIR": str(journal), **environment}
    read_again = partial(load_settings, file, environment=variables)
    loaded = read_again()
    ids = RemoteIds()
    gateway = make_gateway(loaded.settings, (), ids)
    section = loaded.settings.server
    server = RunningServer(gateway, loaded, read_again, Transport.of(section), ids)
    listener = bind(section)
    address = Address("127.0.0.1", listener.getsockname()[1])
    stop = asyncio.Event()
    serving = asyncio.ensure_future(serve(server.app, server.transport, listener, stop))
    front = Front(server, upstreams, address)
    try:
        await gateway.start()
        yield front
    finally:
        await front.pool.close()
        await gateway.close()
        stop.set()
        await serving
