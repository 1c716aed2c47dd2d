"""A remote engine in front of a scripted upstream, and what tests want to know of an answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from sluice.executors.dialects import DIALECTS
from sluice.executors.remote import RemoteEngine, Upstream
from sluice.executors.stream import (
    Chunk,
    Deadlines,
    StreamExecutor,
    UpstreamError,
    UpstreamRequest,
    UsageEvents,
)
from sluice.testing.upstream import Route, ScriptedUpstream

CHAT = "/v1/chat/completions"
FAST = Deadlines(connect_s=2.0, first_token_s=2.0, silence_s=2.0, whole_s=2.0)


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    """Run on the event loop that the gateway uses, with a bound on the whole."""

    async def bounded():
        async with asyncio.timeout(30):
            return await test()

    return uvloop.run(bounded())


@asynccontextmanager
async def engine_for(
    upstream: ScriptedUpstream, dialect: str = "vllm", **options: Any
) -> AsyncIterator[RemoteEngine]:
    """An engine at the upstream's address; at its end, no request may be open."""
    options.setdefault("address", upstream.address())
    engine = RemoteEngine(Upstream("up", dialect=DIALECTS[dialect], **options))
    try:
        yield engine
        assert engine.requests_open == 0
    finally:
        await engine.close()


@asynccontextmanager
async def rig(
    route: Route, dialect: str = "vllm", **options: Any
) -> AsyncIterator[tuple[ScriptedUpstream, RemoteEngine]]:
    """Both, started and stopped."""
    async with (
        ScriptedUpstream(route) as upstream,
        engine_for(upstream, dialect, **options) as engine,
    ):
        yield upstream, engine


def request(
    *,
    streamed: bool = True,
    deadlines: Deadlines = FAST,
    usage_events: UsageEvents = UsageEvents.AS_SENT,
    **more: Any,
) -> UpstreamRequest:
    """A chat completion."""
    body = b'{"model":"m","stream":true}' if streamed else b'{"model":"m"}'
    given = {"id": "r-1", "path": CHAT, "body": body, **more}
    return UpstreamRequest(
        streamed=streamed, deadlines=deadlines, usage_events=usage_events, **given
    )


@dataclass
class Taken:
    """All that came of one answer, and the fault that ended it."""

    chunks: list[Chunk]
    fault: Any  # UpstreamError or None; what it holds differs
    usage: Any = None
    times: Any = None
    status: int = 0

    @property
    def raw(self) -> bytes:
        return b"".join(chunk.raw for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def finishes(self) -> list[tuple[int, str]]:
        return [finish for chunk in self.chunks for finish in chunk.finishes]

    @property
    def ended(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].last


async def take(engine: StreamExecutor, asked: UpstreamRequest) -> Taken:
    """Open a request and read its answer to the end."""
    taken = Taken([], None)
    try:
        answer = await engine.open(asked)
        async with answer:
            taken.status = answer.status
            async for chunk in answer:
                taken.chunks.append(chunk)
            taken.usage, taken.times = answer.usage(), answer.engine_times()
    except UpstreamError as error:
        taken.fault = error
    return taken
