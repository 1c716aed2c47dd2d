"""The ``StreamExecutor`` for engines behind OpenAI's HTTP API, of any dialect.

The gateway opens requests here and iterates their answers (``remote_answer.py``). Here is decided
what goes over the wire, and that a request which nobody wants any more is stopped. A request is
sent once; the only exception is a kept connection that turns out to have been closed before a byte
of the answer came, and then a fresh connection is used.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import msgspec

from sluice.executors.dialects import Dialect, SleepRoutes
from sluice.executors.facts import read_facts
from sluice.executors.faults import Source, fault_of_reply
from sluice.executors.http_connection import Connection
from sluice.executors.http_pool import Address, ConnectionLimits, ConnectionPool
from sluice.executors.lookout import Lookout
from sluice.executors.remote_answer import AnswerLimits, Leaving, RemoteAnswer, read_reply
from sluice.executors.scrape import read_gauges
from sluice.executors.stream import (
    ConnectFailed,
    EngineFacts,
    FirstTokenLate,
    Garbage,
    Gauges,
    Health,
    Lost,
    OverloadKind,
    Probe,
    Reply,
    UpstreamError,
    UpstreamOverloaded,
    UpstreamRequest,
)

# Abort calls and probes use connections of their own: they must get through when all others are
# taken.
_SIDE_CONNECTIONS_MAX = 8
_SIDE_DEADLINE_S = 2.0
# Weights go to the memory of the host and back at several GB a second.
_SLEEP_S_MAX = 60.0
_METRICS_BYTES_MAX = 8 * 1024**2
# That a kept connection was closed shows within a round trip; one that breaks later broke
# while the request was worked on.
_STALE_S_MAX = 1.0
# How long the end of an answer's framing may take behind its last event.
_FRAMING_END_S = 1.0
_OWN_HEADERS = frozenset(
    {"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "expect"}
)


@dataclass(frozen=True, slots=True)
class Upstream:
    """One engine's address and how to speak to it.

    ``name`` is what errors call it, ``path`` what stands before ``/v1`` in its URL. ``key`` is sent
    as bearer token and appears nowhere else.
    """

    name: str
    address: Address
    dialect: Dialect
    path: str = ""
    key: str = field(default="", repr=False)
    pool: ConnectionLimits = field(default_factory=ConnectionLimits)
    answers: AnswerLimits = field(default_factory=AnswerLimits)


class RemoteEngine:
    """One engine; see ``StreamExecutor``. Belongs to the event loop in which it is used."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._source = Source(upstream.name, upstream.dialect)
        self._host = f"host: {upstream.address}"
        self._pool = ConnectionPool(upstream.name, upstream.address, upstream.pool)
        # None is kept: a probe must not fail because a kept connection was closed in between.
        side_limits = ConnectionLimits(_SIDE_CONNECTIONS_MAX, idle_max=0)
        self._side_pool = ConnectionPool(upstream.name, upstream.address, side_limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers = set[RemoteAnswer]()
        self._lookout = Lookout(self._look)
        route = upstream.dialect.abort
        self._abort_paths = list(route.paths) if route else []

    @property
    def connections_in_use(self) -> int:
        """Connections that carry a request or wait for the last bytes behind an answer."""
        return self._pool.in_use

    @property
    def requests_open(self) -> int:
        """Requests that were sent and whose answers have not been read to the end or closed."""
        return len(self._answers)

    async def open(self, request: UpstreamRequest) -> RemoteAnswer:
        """Send a request and wait for the head of its answer. Raises ``UpstreamError``."""
        head = self._request_head("POST", request.path, request)
        connection = await self._pool.acquire(request.deadlines.connect_s)
        kept = connection.exchanges > 0
        answer = self._send(connection, request, head)
        try:
            await answer.begin()
        except Lost as lost:
            if not kept or connection.answered or answer.age_s > _STALE_S_MAX:
                raise
            try:
                fresh = await self._pool.acquire_fresh(request.deadlines.connect_s)
            except ConnectFailed:
                # It did take the request, and then went away.
                raise lost from None
            answer = self._send(fresh, request, head)
            await answer.begin()
        return answer

    async def abort(self, request_id: str) -> None:
        """Tell the engine to stop a request, if it has a route for that."""
        route = self._upstream.dialect.abort
        if route is None:
            return
        body = msgspec.json.encode(route.body(request_id))
        for path in tuple(self._abort_paths):
            try:
                reply = await self._exchange("POST", path, body)
            except UpstreamError:
                return  # the socket that was closed says the same
            if reply.status not in {404, 405}:
                return
            if path in self._abort_paths:
                self._abort_paths.remove(path)

    async def probe(self) -> Probe:
        """Look at health and load."""
        dialect = self._upstream.dialect
        health, fault = await self._health()
        gauges: Gauges | None = None
        if health is not Health.DOWN and dialect.metrics_path is not None:
            try:
                gauges = await self._gauges(dialect.metrics_path)
            except UpstreamError as error:
                fault = fault or f"metrics: {error.message}"
        return Probe(time.monotonic_ns(), health, gauges, fault)

    async def facts(self) -> EngineFacts:
        """Ask what it serves and how much it holds."""
        bodies = list[bytes]()
        for path in ("/v1/models", self._upstream.dialect.limits_path):
            if path is not None:
                with contextlib.suppress(UpstreamError):
                    reply = await self._exchange("GET", path)
                    bodies.append(reply.body if reply.status == 200 else b"")
        return read_facts(bodies)

    async def sleep(self) -> str:
        """See ``Sleeper``."""
        routes = self._upstream.dialect.sleep
        return "it has no such route" if routes is None else await self._rest(routes, routes.sleep)

    async def wake(self) -> str:
        """See ``Sleeper``."""
        routes = self._upstream.dialect.sleep
        return "" if routes is None else await self._rest(routes, routes.wake)

    async def _rest(self, routes: SleepRoutes, path: str) -> str:
        """Tell it to sleep or to wake, and hear from it that it does."""
        wanted = path == routes.sleep
        try:
            reply = await self._exchange("POST", path, wait_s=_SLEEP_S_MAX)
            if reply.status == 404 and not wanted:
                return ""  # what cannot sleep is awake
            if reply.status >= 300:
                return f"POST {path} is answered with {reply.status}"
            state = (await self._exchange("GET", routes.state)).body
            told = msgspec.json.decode(state, type=dict[str, bool]).get(routes.field)
        except (UpstreamError, msgspec.MsgspecError, RecursionError) as error:
            return str(error)
        return "" if told is wanted else f"{routes.state} says {told}"

    async def close(self) -> None:
        """Cancel what runs and close all connections."""
        for answer in tuple(self._answers):
            answer.close()
        self._lookout.stop()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._pool.close()
        await self._side_pool.close()

    async def _health(self) -> tuple[Health, str]:
        try:
            reply = await self._exchange("GET", self._upstream.dialect.health_path)
        except UpstreamError as error:
            return Health.DOWN, error.message
        if reply.status < 300:
            return Health.READY, ""
        fault = fault_of_reply(self._source, reply)
        if isinstance(fault, UpstreamOverloaded):
            if fault.kind is OverloadKind.LOADING:
                return Health.LOADING, "the model is being loaded"
            if reply.status == 429:  # a vendor that limits rates serves
                return Health.READY, ""
        return Health.DOWN, fault.message

    async def _gauges(self, path: str) -> Gauges:
        reply = await self._exchange("GET", path)
        if reply.status != 200:
            raise fault_of_reply(self._source, reply)
        gauges = read_gauges(self._upstream.dialect, reply.body.decode("utf-8", "replace"))
        if gauges.waiting is None and gauges.running is None:
            raise Garbage(self._source.name, f"no {self._source.dialect.name} metrics at {path}")
        return gauges

    async def _exchange(
        self, method: str, path: str, body: bytes = b"", wait_s: float | None = None
    ) -> Reply:
        """A short request beside the answers. Raises ``UpstreamError``."""
        wait_s = _SIDE_DEADLINE_S if wait_s is None else wait_s
        request = UpstreamRequest("", path, body, streamed=False)
        connection = await self._side_pool.acquire(_SIDE_DEADLINE_S)
        try:
            async with asyncio.timeout(wait_s):
                connection.send(self._request_head(method, path, request), body)
                return await read_reply(self._source, connection, _METRICS_BYTES_MAX)
        except TimeoutError as error:
            raise FirstTokenLate(self._source.name, wait_s) from error
        finally:
            self._side_pool.release(connection)

    def _send(self, connection: Connection, request: UpstreamRequest, head: bytes) -> RemoteAnswer:
        limits = self._upstream.answers
        answer = RemoteAnswer(self._source, connection, request, limits, self._lookout, self._ended)
        self._answers.add(answer)
        connection.send(head, request.body)
        return answer

    def _look(self, now_s: float) -> float | None:
        """Break off answers that are late. Returns when to look again."""
        times_s = [answer.look(now_s) for answer in tuple(self._answers)]
        return min((at_s for at_s in times_s if at_s is not None), default=None)

    def _ended(self, answer: RemoteAnswer, connection: Connection, leaving: Leaving) -> None:
        """What becomes of the connection of an answer that is over."""
        self._answers.discard(answer)
        if leaving.whole and not connection.complete and connection.fault is None:
            self._release_when_complete(connection)
        else:
            self._pool.release(connection)
        if leaving.abort_id and self._abort_paths:
            task = asyncio.get_running_loop().create_task(self.abort(leaving.abort_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _release_when_complete(self, connection: Connection) -> None:
        """Wait a little for the end of the framing, so that the connection can be kept."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_FRAMING_END_S, self._pool.release, connection)

        def complete(connection: Connection) -> None:
            timer.cancel()
            self._pool.release(connection)

        connection.when_complete(complete)

    def _request_head(self, method: str, path: str, request: UpstreamRequest) -> bytes:
        """The head of a request. Raises ``ValueError`` for a header that would break out of it."""
        upstream = self._upstream
        lines = [f"{method} {upstream.path}{path} HTTP/1.1", self._host]
        if upstream.key:
            lines.append(f"authorization: Bearer {upstream.key}")
        names = set[str]()
        for name, value in request.headers:
            key = name.lower()
            if key in _OWN_HEADERS or (upstream.key and key == "authorization"):
                continue
            names.add(key)
            lines.append(f"{key}: {value}")
        id_header = upstream.dialect.id_header
        if request.id and id_header and id_header not in names:
            lines.append(f"{id_header}: {request.id}")
        if request.body and "content-type" not in names:
            lines.append("content-type: application/json")
        # What comes compressed cannot be passed on event by event.
        lines += ("accept-encoding: identity", f"content-length: {len(request.body)}", "", "")
        head = "\r\n".join(lines)
        if not head.count("\n") == head.count("\r") == len(lines) - 1 or "\0" in head:
            raise ValueError("a header holds a line break")
        return head.encode("latin-1")
