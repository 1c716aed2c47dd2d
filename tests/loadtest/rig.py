"""Plays plans against scripted upstreams, on one event loop or through the command."""

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import uvloop

from sluice.loadtest.crew import Texts, joined
from sluice.loadtest.player import NS, Player, Share
from sluice.loadtest.trial import ClosedLoop, OpenLoop, Span, TrialOutcome, TrialPlan
from sluice.loadtest.wire import Requests, Target
from sluice.testing.engine_answers import DONE, delta, event
from sluice.testing.upstream import (
    Act,
    Received,
    Route,
    Script,
    ScriptedUpstream,
    Send,
    Wait,
    http_chunk,
    stream,
    whole,
)
from sluice.workload.asks import Ask, Part, own_text

MODELS = b'{"data":[{"id":"m"}]}'


def asks_at(times_s: Sequence[float], prompt: int = 20, output: int = 4) -> tuple[Ask, ...]:
    return tuple(
        Ask(number, round(at_s * NS), (Part(own_text(number), prompt),), output)
        for number, at_s in enumerate(times_s)
    )


def plan_of(asks: Sequence[Ask], patience_s: float = 5.0, end_s: float | None = None) -> TrialPlan:
    last_s = asks[-1].at_ns / NS
    span = Span(end_s or last_s + 0.01, warm_s=0.0, patience_s=patience_s)
    return TrialPlan(OpenLoop(len(asks) / max(last_s, 0.01)), span, tuple(asks), seed=1)


def closed_plan(clients: int, counted_s: float, asks: int = 200) -> TrialPlan:
    span = Span(counted_s, warm_s=0.0, patience_s=5.0)
    return TrialPlan(ClosedLoop(clients), span, asks_at([0.0] * asks), seed=1)


def play(route: Route, plan: TrialPlan, **target: Any) -> Any:
    """Play a plan against a scripted upstream on this thread."""

    async def bounded() -> TrialOutcome:
        async with asyncio.timeout(30), ScriptedUpstream(route) as upstream:
            return await played(upstream.port, plan, **target)

    return uvloop.run(bounded())


async def played(
    port: int, plan: TrialPlan, stopped: Callable[[], bool] = lambda: False, **target: Any
) -> TrialOutcome:
    where = Target("127.0.0.1", port, "m", **target)
    clients = plan.load.concurrency if isinstance(plan.load, ClosedLoop) else 0
    share = Share(
        replace(plan, asks=()), plan.asks, clients, time.monotonic_ns() + round(0.05 * NS)
    )
    requests = Requests(where, Texts().prompts(plan.salt))
    player = Player(where, requests, share)
    return joined(plan, [await player.play(lambda _: None, stopped)], 0.0)


def usage_of(request: Received, tokens: int) -> dict[str, int]:
    """Usage as a server whose vocabulary has a token for each word and whose template takes 7."""
    body = msgspec.json.decode(request.body)
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    prompt = 7 + len(text.split())
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def answer(request: Received, tokens: int | None = None, **more: Any) -> Script:
    """A healthy engine: as many tokens as asked for, one to a chunk."""
    if request.path == "/v1/models":
        return whole(MODELS)
    if request.path == "/metrics":
        return whole(b"", 404)
    body = msgspec.json.decode(request.body)
    count = body["max_tokens"] if tokens is None else tokens
    usage = usage_of(request, count)
    if not body.get("stream"):
        message = {"role": "assistant", "content": "word " * count}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return whole(msgspec.json.encode({"choices": [choice], "usage": usage}))
    return stream(events_of(count, usage), **more)


def events_of(count: int, usage: Mapping[str, object] | None = None) -> list[bytes]:
    events = [delta({"role": "assistant", "content": ""})]
    events += [delta({"content": " word"}) for _ in range(count)]
    events.append(delta({}, "length"))
    if usage is not None:
        events.append(event({"choices": [], "usage": usage}))
    return [*events, DONE]


def later(script: Script, wait_s: float) -> tuple[Act, ...]:
    return (Wait(wait_s), *script)


def unended(events: Sequence[bytes]) -> tuple[Act, ...]:
    """A stream in order, as far as HTTP is concerned."""
    acts = list(stream([]))
    return (acts[0], *(Send(http_chunk(each)) for each in events), *acts[1:])


@contextmanager
def upstream_in_thread(
    route: Route, tls: ssl.SSLContext | None = None
) -> Iterator[ScriptedUpstream]:
    """A scripted upstream for clients in other processes."""
    upstream = ScriptedUpstream(route, tls)
    loop = uvloop.new_event_loop()
    ready = threading.Event()

    async def live() -> None:
        await upstream.start()
        ready.set()
        await over.wait()
        await upstream.stop()

    over = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(live()), daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield upstream
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
