"""One HTTP request and its answer: reading the body, writing, and noticing that the client left.

Routes get an ``Exchange`` and never see ASGI. It decides how long each wait may last (``Limits``)
and what a gone client means: the route's task is cancelled, whatever it was waiting for, and what
the route holds is released by its own ``finally``. What is answered is not decided here.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from enum import Enum
from typing import Any, TypeVar

from sluice.core.errors import BodyTooLarge, BodyTooSlow, InvalidRequest
from sluice.server.bodies import SMALL_BYTES_MAX, Account, Bodies
from sluice.server.problems import Headers, Problem
from sluice.server.rounds import Rounds
from sluice.server.sending import Sender

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
Understood = TypeVar("Understood")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
# How nearly all clients say it.
_PLAIN_JSON = (b"application/json", b"application/json; charset=utf-8")
# What is compared at either end of a body; hashing all of a long one takes as long as reading it.
_LIKENESS_BYTES = 16 * 1024
_PING = b": ping\n\n"
# After its deadline a request has this long to be ended by the gateway, which knows why it is late.
_OVERDUE_S = 5.0


class Ending(Enum):
    """Why an exchange was cut short."""

    LEFT = "left"  # the client closed the connection
    STALLED = "stalled"  # the client did not read for too long
    OVERDUE = "overdue"  # the request outlived its longest life


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class Exchange:
    """A request being answered. Used by one task; not shared.

    ``fields`` are the headers by name, of one that was sent more than once the last.
    ``model`` is the model asked for, once known, ``body_bytes`` the size of the whole body and
    ``likeness`` its hash, by a key of this process.
    ``bodies`` are the bounds on the bodies of all exchanges. ``handed_over`` says that the gateway
    has the call and counts what becomes of it. ``standing`` gives headers that every answer has,
    as they are at that moment.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        bodies: Bodies,
        call_id: str,
        now_ns: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive, self._send = receive, send
        self.writing_since: float | None = None
        self.wrote = False
        self.replied = False
        self.scope = scope
        self.limits = bodies.limits
        self._bodies = bodies
        self.body_bytes = 0
        self.likeness = 0
        self.method: str = scope["method"]
        self.path: bytes = scope.get("raw_path") or scope["path"].encode()
        self.headers: Headers = scope["headers"]
        self.fields: dict[bytes, bytes] = dict(self.headers)
        self._is_plain = (
            len(self.fields) == len(self.headers) and b"content-encoding" not in self.fields
        )
        # What ``serve`` notes, and other ASGI hosts do not: when the first byte came, for one.
        self.state: MutableMapping[str, Any] = scope.get("state", {})
        self.arrived_ns: int = self.state.get("arrived_ns", now_ns)
        self.call_id = call_id
        self.client_id = self._own_request_id() or ""
        self.request_id = self.client_id or call_id
        self.tenant = ""
        self.model = ""
        self.handed_over = False
        self.standing: Callable[[], Headers] = list
        self.started = False
        self.streaming = False
        self.cut: Ending | None = None

    # ------------------------------------------------------------------------------- reading

    def header(self, name: bytes) -> str | None:
        """Value of a header, ``None`` where it is absent. Raises ``InvalidRequest`` for two."""
        value = self.fields.get(name)
        if value is None:
            return None
        if len(self.fields) != len(self.headers) and len(self.header_values(name)) > 1:
            told = name.decode()
            raise InvalidRequest(f"The header {told} was sent more than once.", param=told)
        return value.decode("latin-1").strip()

    def header_values(self, name: bytes) -> list[bytes]:
        """All values of a header; names are lower case."""
        if name not in self.fields:
            return []
        if len(self.fields) == len(self.headers):
            return [self.fields[name]]
        return [value for key, value in self.headers if key == name]

    def _require_json(self) -> None:
        """Refuse a body that does not say that it is plain JSON in UTF-8.

        Web pages can make a browser send other types to this address without asking first.
        """
        if self.fields.get(b"content-type") in _PLAIN_JSON and self._is_plain:
            return
        value = self.header(b"content-type") or ""
        kind, _, options = value.partition(";")
        if kind.strip().lower() != "application/json":
            told = value or "none"
            message = f"The content type must be application/json; it was {told[:80]}."
            raise InvalidRequest(message, param="content-type")
        charset = options.replace(" ", "").replace('"', "").lower()
        if charset not in {"", "charset=utf-8", "charset=utf8"}:
            message = "The body must be UTF-8; leave the charset out of the content type."
            raise InvalidRequest(message, param="content-type")
        if (self.header(b"content-encoding") or "identity").lower() != "identity":
            raise InvalidRequest("Send the body uncompressed.", param="content-encoding")

    async def understood(
        self,
        understand: Callable[[bytes], Understood],
        glance: Callable[[bytes], Understood | None] | None = None,
    ) -> Understood:
        """What a function makes of the whole body, which must say that it is JSON.

        The function may run in a thread. A ``glance``, which is quick, is tried before it; what it
        makes of the body counts unless it is ``None``. Raises what it raises, ``InvalidRequest``
        for another type, ``BodyTooLarge`` as soon as the size is known to be over the limit,
        announced or counted, ``BodyTooSlow`` when the body is not complete in time, and
        ``Overloaded`` when all bodies together are too much.
        """
        self._require_json()
        account = Account(self._bodies)
        try:
            body = await self._body(account)
            self.body_bytes = size = len(body)
            # Of a long body its beginning and its end: all of it would hold up the others.
            self.likeness = hash((size, body[:_LIKENESS_BYTES], body[-_LIKENESS_BYTES:]))
            seen = None if glance is None else glance(body)
            return await self._bodies.understand(body, understand) if seen is None else seen
        finally:
            account.close()

    async def read_again(
        self, body: bytes, understand: Callable[[bytes], Understood]
    ) -> Understood:
        """What another function makes of a body that was understood before."""
        return await self._bodies.understand(body, understand)

    async def _body(self, account: Account) -> bytes:
        if self.state.get("whole"):
            return await self._read_body(account)  # nothing is waited for
        announced = self.header(b"content-length")
        if announced is not None and announced.isdecimal():
            self._check_size(int(announced[:18]))
        try:
            async with asyncio.timeout(self.limits.body_s_max):
                return await self._read_body(account)
        except TimeoutError:
            message = f"The body was not complete within {self.limits.body_s_max:g} s."
            raise BodyTooSlow(message, param="body") from None

    async def _read_body(self, account: Account) -> bytes:
        parts: list[bytes] = []
        size, limit = 0, self.limits.body_bytes_max
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                self._check_size(size)
            if size > SMALL_BYTES_MAX:
                account.grow(size)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_size(self, size: int) -> None:
        limit = self.limits.body_bytes_max
        if size > limit:
            message = f"The body has {size} bytes or more; the limit is {limit} bytes."
            raise BodyTooLarge(message, param="body")

    def _own_request_id(self) -> str | None:
        """The client's ``x-request-id``, where it is short and harmless enough to repeat."""
        if b"x-request-id" not in self.fields:
            return None
        values = self.header_values(b"x-request-id")
        text = values[0].decode("latin-1") if len(values) == 1 else ""
        return text if _REQUEST_ID.fullmatch(text) else None

    # ------------------------------------------------------------------------------- writing

    def send_through(self, way: Callable[[Send], Send]) -> None:
        """Let what is sent from here on pass something that may add to it."""
        self._send = way(self._send)

    async def reply(
        self,
        status: int,
        body: bytes,
        headers: Headers | tuple[tuple[bytes, bytes], ...] = (),
        content_type: bytes = b"application/json",
    ) -> None:
        """Answer with a whole body."""
        length = b"%d" % len(body)
        own = [(b"content-type", content_type), (b"content-length", length), *headers]
        sender: Sender | None = self.state.get("sender")
        if sender is not None and sender is self._send and sender.is_free:
            self.started = self.replied = True
            sender.answer(status, self._all_headers(own), body)
        else:
            await self._start(status, own)
            await self._write_last(b"" if self.method == "HEAD" else body)

    async def refuse(self, problem: Problem) -> None:
        """Answer with an error: as JSON, or inside the event stream where that has begun."""
        if not self.started:
            await self.reply(problem.status, problem.body(), problem.headers, problem.content_type)
        elif self.streaming and not self.replied:
            await self._write_last(b"data: " + problem.body() + b"\n\n")

    async def open_stream(self, headers: Headers) -> None:
        """Begin an event stream; from here on errors can only be events."""
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *headers,
            ],
        )
        self.streaming = True

    async def write(self, events: bytes) -> None:
        """Send events, waiting while the client does not read (``Limits.send_s_max`` at most)."""
        self.writing_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self.writing_since = None
        self.wrote = True

    async def close_stream(self, events: bytes) -> None:
        """Send the last events of a stream."""
        await self._write_last(events)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        headers = self._all_headers(headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _all_headers(self, own: Headers) -> Headers:
        return [*own, (b"x-request-id", self.request_id.encode()), *self.standing()]

    async def _write_last(self, body: bytes) -> None:
        self.replied = True
        self.writing_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.writing_since = None

    @property
    def is_silent(self) -> bool:
        """Whether it is a stream that goes on, and got nothing since the last look."""
        return self.streaming and not self.replied and not self.wrote

    # ---------------------------------------------------------------------------- attendance

    def attended(self) -> "Attendance":
        """See ``Attendance``; to be entered once the body is read."""
        return Attendance(self, self._receive, self._send, self._bodies.rounds)


class Attendance:
    """Cancels the current task as soon as the client leaves, stops reading, or time is up.

    ``Exchange.cut`` then says why. While a stream is silent it gets comments, which clients skip
    and proxies count as life. ``serve`` says itself when the connection is lost; of another ASGI
    host it is asked.
    """

    def __init__(self, exchange: Exchange, receive: Receive, send: Send, rounds: Rounds) -> None:
        self._exchange, self._receive, self._send = exchange, receive, send
        self._rounds = rounds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        limits = exchange.limits
        self._tick_s = min(limits.ping_s, limits.send_s_max)
        self._overdue_at = self._loop.time() + limits.request_s_max + _OVERDUE_S
        self._companions: list[asyncio.Task[None]] = []

    def __enter__(self) -> None:
        watch = self._exchange.state.get("watch")
        if watch is not None:
            watch(self._left)
        else:
            self._companions.append(self._loop.create_task(self._listen()))
        self._rounds.join(self._tick, self._tick_s)

    def __exit__(self, *exception: object) -> None:
        self._task = None
        self._rounds.leave(self._tick)
        for companion in self._companions:
            companion.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        self._cut(Ending.LEFT)

    def _tick(self) -> None:
        exchange, now = self._exchange, self._loop.time()
        since = exchange.writing_since
        if since is not None:
            if now - since >= exchange.limits.send_s_max:
                self._stall()
        elif now > self._overdue_at:
            self._cut(Ending.OVERDUE)
        elif exchange.is_silent:
            self._companions = [self._loop.create_task(self._ping())]
        exchange.wrote = False
        if exchange.cut is None:
            self._rounds.join(self._tick, self._tick_s)

    async def _ping(self) -> None:
        try:
            async with asyncio.timeout(self._exchange.limits.send_s_max):
                await self._send({"type": "http.response.body", "body": _PING, "more_body": True})
        except TimeoutError:
            self._stall()

    def _stall(self) -> None:
        """Give up a client that does not read: what is buffered for it will never leave."""
        abort: Callable[[], None] | None = self._exchange.state.get("abort")
        self._cut(Ending.STALLED)
        if abort is not None:
            abort()

    def _cut(self, ending: Ending) -> None:
        exchange = self._exchange
        if exchange.cut is not None or self._task is None:
            return
        exchange.cut = ending
        if not exchange.replied or ending is Ending.STALLED:
            self._task.cancel()
