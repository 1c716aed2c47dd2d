"""A gateway over scripted engines in a thread, for clients that block, OpenAI's own among them.

The engines run on a loop and a thread of their own; the gateway is made of settings as ``sluice
serve`` makes it. At the end nothing may be held.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import openai
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from sluice.cluster.gateway import LocalGateway
from sluice.cluster.remote import RemoteReplica
from sluice.config.sections import CatalogueSection, JournalSection, ModelSection, UpstreamUrl
from sluice.config.settings import Settings, conflicts
from sluice.testing.engine_answers import ENGINE_ANSWERS
from sluice.testing.served import Served, served
from sluice.testing.upstream import Received, Route, Script, ScriptedUpstream, whole
from sluice.wiring.gateway import make_gateway, prepare
from sluice.wiring.remote import RemoteIds
from tests.e2e.clients import Answer, Target, ask

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Say hello."}]
# Quick enough for tests, slow enough for a machine that is busy.
PROBE_S = 0.05


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def engine(dialect: str = "vllm", pieces: Sequence[str] = ("Hel", "lo", "!")) -> Route:
    """A healthy engine that gives this answer to everyone and serves one model."""
    answers = ENGINE_ANSWERS[dialect].route(pieces)

    def route(request: Received) -> Script:
        if request.path == "/v1/models":
            return whole(b'{"data":[{"id":"weights","max_model_len":4096}]}')
        if request.path == "/metrics":
            idle = ENGINE_ANSWERS[dialect].metrics.replace(" 3.0\n", " 0.0\n")
            return whole(idle.replace(" 3\n", " 0\n").encode(), kind="text/plain")
        return whole(b"{}", 404) if "abort" in request.path else answers(request)

    return route


def answering(script: Callable[[Received], Script], dialect: str = "vllm") -> Route:
    """A healthy engine whose answers to calls are scripted."""
    healthy = engine(dialect)

    def route(request: Received) -> Script:
        is_call = request.method == "POST" and "abort" not in request.path
        return script(request) if is_call else healthy(request)

    return route


@dataclass
class RelayRig:
    """A running gateway and its engines, in the order of their addresses."""

    served: Served
    gateway: LocalGateway
    engines: list[ScriptedUpstream]
    thread: LoopThread

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.served.url}/v1", api_key="none", max_retries=0)

    def chat(self, **more: Any) -> Any:
        """A chat completion by OpenAI's client."""
        with self.client as client:
            asked = {"model": "big", "messages": MESSAGES, **more}
            answer = client.chat.completions.create(**asked)
            return list(answer) if asked.get("stream") else answer

    def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> Answer:
        """A request as it stands."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        target = Target(self.served.host, self.served.port)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return ask(target, "POST", path, raw, {"content-type": "application/json", **named}, 20.0)

    def sent(self, number: int = 0) -> list[Received]:
        """The calls that came to an engine."""
        requests = self.engines[number].requests
        return [one for one in requests if one.method == "POST" and "abort" not in one.path]

    def sent_body(self, number: int = 0) -> dict[str, Any]:
        """The body of the one call that came to an engine."""
        (only,) = self.sent(number)
        return json.loads(only.body)  # type: ignore[no-any-return]

    def release(self, number: int = 0) -> None:
        """Let the scripts of an engine that hold go on."""
        self.thread.loop.call_soon_threadsafe(self.engines[number].release)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of a metric that have these labels."""

        async def text() -> str:
            return self.gateway.metrics()[0].decode()

        return sum(
            sample.value
            for family in text_string_to_metric_families(self.served.call(text))
            for sample in family.samples
            if sample.name == f"sluice_{name}" and labels.items() <= sample.labels.items()
        )

    def eventually(self, holds: Callable[[], object], within_s: float = 5.0) -> None:
        """Look again until something holds."""
        end_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end_s, "does not hold"
            time.sleep(0.005)

    def requests_at(self, replica: RemoteReplica) -> int:
        """Requests that are open at an engine."""
        return replica._engine.requests_open  # type: ignore[attr-defined,no-any-return]

    def open_requests(self) -> int:
        """Requests that are open at the first engine."""
        replica = self.gateway._driver._members["big-0"]
        assert isinstance(replica, RemoteReplica)
        return self.requests_at(replica)

    def check_empty(self) -> None:
        """Nothing is held for anybody: no call, place or attempt, and no request at an engine."""
        driver = self.gateway._driver

        def is_empty() -> bool:
            members = [one for one in driver._members.values() if isinstance(one, RemoteReplica)]
            return (
                not len(driver._calls)
                and not driver._fleet.requests
                and all((p.waiting, p.places) == (0, 0) for p in self.gateway.pools())
                and not any(one._attempts or self.requests_at(one) for one in members)
                and not driver._observer._timings
            )

        self.eventually(is_empty)


class Leaver:
    """A client that sends a request and may leave before its answer is whole."""

    def __init__(self, rig: RelayRig, body: Mapping[str, Any]) -> None:
        raw = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._socket = socket.create_connection((rig.served.host, rig.served.port), timeout=10)
        self._socket.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        self._read = b""

    def until(self, words: bytes) -> bytes:
        """All that came up to these words."""
        while words not in self._read:
            piece = self._socket.recv(65536)
            assert piece, self._read
            self._read += piece
        return self._read

    def head(self) -> dict[str, str]:
        """The headers of the answer."""
        lines = self.until(b"\r\n\r\n").partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
        return {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}

    def leave(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()


def remote_section(engines: Sequence[ScriptedUpstream], **settings: Any) -> ModelSection:
    """A remote model over these engines."""
    weights, path = settings.pop("weights", [1.0] * len(engines)), settings.pop("path", "")
    urls = tuple(
        UpstreamUrl(f"http://127.0.0.1:{one.port}{path}", weight)
        for one, weight in zip(engines, weights, strict=True)
    )
    given = {"source": "big", "engine": "vllm", "probe_s": PROBE_S, "urls": urls, **settings}
    return ModelSection(**given)


@contextmanager
def relay(
    *routes: Route,
    settings: Mapping[str, Any] = {},
    beside: Mapping[str, ModelSection] = {},
    **model: Any,
) -> Iterator[RelayRig]:
    """A gateway with one model, ``big``, over these engines, and others ``beside`` it."""
    thread = LoopThread()
    engines = [ScriptedUpstream(route) for route in routes]
    for one in engines:
        thread.call(one.start)
    try:
        given = {"journal": JournalSection(enabled=False), **settings}
        models = {"big": remote_section(engines, **model), **beside}
        made = Settings(models=models, **given)
        assert not list(conflicts(made))
        prepared = prepare(models, CatalogueSection(), lambda *_: None)
        gateway = make_gateway(made, prepared, RemoteIds())
        with served(gateway, given.get("server")) as running:
            running.call(gateway.start)
            try:
                rig = RelayRig(running, gateway, engines, thread)
                yield rig
                rig.check_empty()
            finally:
                running.call(gateway.close)
    finally:
        for one in engines:
            thread.call(one.stop)
        thread.stop()
