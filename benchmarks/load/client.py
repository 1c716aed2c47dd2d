"""An open-loop client over raw sockets: it sends when the plan says so, whatever the server does.

Latencies count from the planned time, so a stall shows with its full mass. There is no limit on
requests in flight and one connection for each. Answers are only stored with their times while the
run lasts and read afterwards, since client and engine share the machine. Which request goes when is
decided in ``plans.py``; what the figures mean in ``measures.py``.
"""

import asyncio
import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, process_time
from urllib.parse import urlsplit

from benchmarks.load.answers import Answer, read_answer
from benchmarks.load.outcomes import Outcome, outcome_of
from benchmarks.load.plans import SYSTEM_TEXT, Ask, Plan, again

RETRIES_MAX = 6


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how its chat completions are asked for."""

    url: str
    model: str
    path: str = "/v1/chat/completions"

    def request(self, ask: Ask) -> bytes:
        """The whole HTTP request; the connection ends with its answer."""
        body = json.dumps(
            {
                "model": self.model,
                "messages": [
                    {"role": "system", "content": SYSTEM_TEXT},
                    {"role": "user", "content": ask.text},
                ],
                "max_tokens": ask.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        headers = [
            f"POST {self.path} HTTP/1.1",
            f"host: {urlsplit(self.url).netloc}",
            "content-type: application/json",
            "connection: close",
            f"content-length: {len(body)}",
            f"x-request-id: {ask.id}",
        ]
        if ask.slo:
            headers.append(f"x-sluice-slo: {ask.slo}")
        if ask.tenant:
            headers.append(f"x-sluice-tenant: {ask.tenant}")
        return "\r\n".join(headers).encode() + b"\r\n\r\n" + body


@dataclass(slots=True, eq=False)
class Call(asyncio.Protocol):
    """One request under way. Times are seconds of the client's clock."""

    ask: Ask
    raw: bytes
    planned_s: float
    done: "asyncio.Future[None]"
    sent_s: float | None = None
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    closed: bool = False
    _transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_s = monotonic()
        transport.write(self.raw)

    def data_received(self, data: bytes) -> None:
        """Store; reading waits until the run is over."""
        self.pieces.append((monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The answer is complete, or will never be."""
        self.closed = True
        if not self.done.done():
            self.done.set_result(None)

    def leave(self) -> None:
        """Give up, as a client that goes away."""
        if self._transport is not None:
            self._transport.abort()

    def answer(self) -> Answer:
        """What came, read."""
        return read_answer(self.pieces, closed=self.closed)


class Client:
    """Plays plans against one target.

    Of the last run, ``began_s`` is when it began, on the client's clock, and ``cpu_share`` how much
    of one core the client took.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._host = urlsplit(target.url).hostname or ""
        self._port = urlsplit(target.url).port or 80
        self._calls: list[Call] = []
        self.began_s = 0.0
        self.cpu_share = 0.0

    async def play(self, plan: Plan, *, retry: bool = False) -> list[Outcome]:
        """Send every request at its time; leave those that are not answered at the plan's end.

        With ``retry``, clients that are refused come back when they were told to.
        """
        ready = [(ask, self._target.request(ask)) for ask in plan.asks]
        began_s = self.began_s = monotonic() + 0.1
        end_s, used_s = began_s + plan.end_s, process_time()
        with _undisturbed():
            async with asyncio.TaskGroup() as group:
                for ask, raw in ready:
                    await _sleep_until(began_s + ask.at_s)
                    group.create_task(self._follow(ask, raw, (began_s, end_s), retry=retry))
        self.cpu_share = (process_time() - used_s) / (monotonic() - began_s)
        return self._outcomes(began_s)

    async def saturate(
        self, asks: Iterator[Ask], concurrency: int, duration_s: float
    ) -> list[Outcome]:
        """Keep so many requests under way for so long, then leave: the most an engine can do."""
        began_s = self.began_s = monotonic()
        end_s = began_s + duration_s

        async def worker() -> None:
            for ask in asks:
                call = self._call(ask, self._target.request(ask), monotonic())
                await self._finish(call, end_s)
                if monotonic() >= end_s:
                    return

        with _undisturbed():
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(worker())
        return self._outcomes(began_s)

    # --------------------------------------------------------------------------------- internals

    async def _follow(
        self, ask: Ask, raw: bytes, run_s: tuple[float, float], *, retry: bool
    ) -> None:
        """One client's request, and its retries where it makes them."""
        began_s, end_s = run_s
        for attempt in range(1, RETRIES_MAX + 1):
            call = self._call(ask, raw, began_s + ask.at_s)
            await self._finish(call, end_s)
            if not retry or not call.closed:
                return
            answer = call.answer()
            if answer.retry_after_s is None or answer.should_retry is False:
                return
            at_s = call.pieces[-1][0] + answer.retry_after_s
            if at_s >= end_s:
                return
            await _sleep_until(at_s)
            ask = again(ask, at_s - began_s, attempt)
            raw = self._target.request(ask)

    def _call(self, ask: Ask, raw: bytes, planned_s: float) -> Call:
        call = Call(ask, raw, planned_s, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        return call

    async def _finish(self, call: Call, end_s: float) -> None:
        """Send a call and wait for its answer, or for the end of the run."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: call, self._host, self._port)
        except OSError:
            call.closed = True
            return
        await asyncio.wait([call.done], timeout=max(0.0, end_s - monotonic()))
        if not call.closed:
            call.leave()

    def _outcomes(self, began_s: float) -> list[Outcome]:
        calls, self._calls = self._calls, []
        return [
            outcome_of(call.ask, call.answer(), call.planned_s, call.sent_s, began_s)
            for call in calls
        ]


async def _sleep_until(at_s: float) -> None:
    delay_s = at_s - monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection while times are taken, and a core for the client when it wants one.

    It wants little of it, and a client that waits behind the engine for the processor would measure
    itself.
    """
    gc.collect()
    gc.disable()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, before - 10)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
        gc.enable()
