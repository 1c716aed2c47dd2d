"""The listening socket and the HTTP protocol: uvicorn with the limits that it leaves out.

``wiring`` binds first, so that a port in use is a settings problem told before any model is loaded,
then runs ``serve`` until its stop event is set. When to stop, and how long running requests may
take to end, is decided by the caller: ``serve`` closes what is still open within seconds.
"""

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httptools
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sluice.config.sections import ServerSection
from sluice.config.units import listen_address
from sluice.core.errors import ConfigError, InvalidRequest, Overloaded
from sluice.server.exchange import AsgiApp
from sluice.server.plain_listener import PlainListener
from sluice.server.problems import Problem, problem_of
from sluice.server.sending import Sender
from sluice.server.tls_listener import TlsListener
from sluice.server.transport import Transport

_BACKLOG = 2048
# Longer than the 5 s after which the usual clients drop idle connections themselves, so that they
# do not write into one that is being closed here.
_IDLE_S_MAX = 75
_HEAD_S_MAX = 15.0
_CLOSE_S_MAX = 5
# How often a connection looks at least whether it waits for too long.
_LOOK_S = 5.0
# A refused body is read to its end, so that the client gets to see the refusal, up to this size.
_DISCARDED_BYTES_MAX = 64 * 1024**2
# Each header costs work of its own, however short it is.
_HEADERS_MAX = 256
# Requests that a client may send on one connection before the first of them is answered.
_PIPELINED_MAX = 32
_FILES_RESERVED = 256
_FILES_WANTED = 65536


def bind(section: ServerSection) -> socket.socket:
    """Bind the address of the settings and listen. Raises ``ConfigError``."""
    try:
        return _listener(*listen_address(section.listen))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = (
            f"server.listen: cannot listen on {section.listen}: {reason}. "
            "Stop what uses it, or choose another address or port 0."
        )
        raise ConfigError((message,)) from error


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.settimeout(0)
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """The base address of a bound socket, ``http://HOST:PORT``."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop to serve on."""
    return uvloop.new_event_loop()


async def serve(
    app: AsgiApp, transport: Transport, listener: socket.socket, stop: asyncio.Event
) -> None:
    """Serve on a bound socket until ``stop`` is set, then close it and what is still open.

    Requests that run when ``stop`` is set get a few seconds to end; callers that want to let them
    finish drain the gateway first. Signals are the caller's business.
    """
    _raise_file_limit()
    server = _Server(_uvicorn_config(app, transport), transport)
    loop = asyncio.get_running_loop()
    transport.on_drain = server.end_unfinished
    running = loop.create_task(server.serve(sockets=[listener]))
    stopped = loop.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        server.should_exit = True
        await running


def _uvicorn_config(app: AsgiApp, transport: Transport) -> uvicorn.Config:
    def protocol(**arguments: Any) -> Protocol:
        return Protocol(transport.header_bytes_max, transport.connections_max, **arguments)

    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",  # what clients send amiss is answered, and would flood the log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_CLOSE_S_MAX,
    )


class _Server(uvicorn.Server):
    """uvicorn's server without its signals, which accepts connections in its own way."""

    def __init__(self, config: uvicorn.Config, transport: Transport) -> None:
        super().__init__(config)
        self._transport = transport
        self._accepting: PlainListener | TlsListener = PlainListener(self._new_protocol)
        if transport.identity is not None:
            self._accepting = TlsListener(
                transport.identity,
                self._new_protocol,
                self._has_room,
                handshake_s_max=_HEAD_S_MAX,
                shutdown_s_max=_CLOSE_S_MAX / 2,
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            self._accepting.start(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and close what is open."""
        await self._accepting.stop()
        await super().shutdown(sockets=sockets)

    def _has_room(self, handshakes: int) -> bool:
        opened = len(self.server_state.connections) + handshakes
        return opened < min(self._transport.connections_max, _connections_possible())

    def _new_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def end_unfinished(self) -> None:
        """Refuse all requests whose bodies are still coming."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Protocol):
                connection.end_unfinished()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command that runs the server."""
        yield


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with bounds on what surrounds a body and on slow senders.

    uvicorn bounds neither the size of a head or of trailers nor the time that a client takes to
    send a head, tells only the last of several pipelined requests that the connection is gone,
    waits for ever for a client to read the end of its answer, answers what it cannot parse as plain
    text, and loses the body of a request that offers to upgrade. One timer bounds every wait that
    is not the app's: for a head, for the rest of a refused body, between requests.
    """

    def __init__(self, header_bytes_max: int, connections_max: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._header_bytes_max = header_bytes_max
        self._connections_max = min(connections_max, _connections_possible())
        self._head_bytes: int | None = 0  # None while a body is being received
        self._framing_bytes = 0  # since the last part of the body: trailers, chunk sizes
        self._trailer_bytes = 0
        self._discarded_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due_at: float | None = None
        self._unanswered: list[Any] = []
        self._watchers: dict[Any, Callable[[], None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request head; refuse beyond the limit of connections."""
        super().connection_made(transport)
        opened = transport.get_extra_info("socket")
        if opened is not None and opened.family != socket.AF_UNIX:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self._connections_max:
            self._answer_and_close(
                _too_many_connections(len(self.connections), self._connections_max)
            )
        else:
            self._wait(_HEAD_S_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection."""
        self._stop_waiting()
        if self._timer is not None:
            self._timer.cancel()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                if gone := self._watchers.get(cycle):
                    gone()
        self._unanswered.clear()
        self._watchers.clear()
        super().connection_lost(exc)

    def data_received(self, received: bytes) -> None:
        """Count what is no body; over its limit it is refused and the connection closed."""
        if self.transport.is_closing():
            return
        if self._head_bytes is not None:
            self._head_bytes += len(received)
        self._framing_bytes += len(received)
        self._parse(received)
        if self._head_bytes is not None:
            if self._head_bytes > self._header_bytes_max:
                self._refuse_head()
        elif max(self._framing_bytes, self._trailer_bytes) > self._header_bytes_max:
            self._refuse_trailers()

    def _parse(self, received: bytes) -> None:
        try:
            self.parser.feed_data(received)
        except httptools.HttpParserUpgrade as upgrade:
            if self.transport.is_closing():
                return
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("This is no proxy: CONNECT is not served.")
                return
            rest = memoryview(received)[upgrade.args[0] :]
            self._parse_without_upgrade()
            self._parse(rest)  # type: ignore[arg-type]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _parse_without_upgrade(self) -> None:
        """Begin the request anew as if its client had not offered to upgrade.

        An offer may be ignored (RFC 9110, section 7.8); the parser takes all that follows one for
        another protocol.
        """
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [
            name + b": " + value
            for name, value in self.headers
            if name not in {b"upgrade", b"http2-settings"}
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")

    def on_message_begin(self) -> None:
        """Note when the first byte of the request was here."""
        super().on_message_begin()
        self._wait(_HEAD_S_MAX)
        state = self.scope["state"]
        state["abort"] = self.transport.abort
        state["arrived_ns"] = time.monotonic_ns()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header; trailers, which come after the body, are dropped."""
        if self._head_bytes is not None:
            super().on_header(name, value)
        else:
            self._trailer_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """From here on the app's own limits hold."""
        if self.parser.should_upgrade():
            return  # the request begins anew without its offer
        self._stop_waiting()
        if self._head_bytes is not None and self._head_bytes > self._header_bytes_max:
            self._check_head()
        if len(self.headers) > _HEADERS_MAX:
            self._refuse_head()
            raise ValueError("too many headers")  # stops the parser
        self._head_bytes = None
        self._framing_bytes = self._trailer_bytes = 0
        super().on_headers_complete()
        cycle = self.cycle
        cycle.send = sender = Sender(cycle)  # type: ignore[assignment, method-assign]
        state = self.scope["state"]
        state["sender"], state["watch"] = sender, partial(self._watch, cycle)
        self._unanswered.append(cycle)
        if len(self.pipeline) > _PIPELINED_MAX:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Read what follows a refusal and drop it, within bounds."""
        super().on_body(body)
        self._framing_bytes = 0
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > _DISCARDED_BYTES_MAX:
                self.transport.abort()

    def on_message_complete(self) -> None:
        """The next bytes begin another head."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.scope["state"]["whole"] = True
        self._head_bytes = 0
        self._discarded_bytes = 0

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that was refused before its end."""
        for cycle in tuple(self._unanswered):
            if not cycle.response_complete:
                continue
            self._unanswered.remove(cycle)
            self._watchers.pop(cycle, None)
            # What knows the cycle, so that it goes at once and need not wait for the collector.
            del cycle.send
            cycle.scope["state"].clear()
        # What uvicorn does here, but for its timer: one for each request costs more than a look at
        # the clock.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._wait(_IDLE_S_MAX if self._head_bytes is not None else _HEAD_S_MAX)

    def _watch(self, cycle: Any, gone: Callable[[], None]) -> None:
        """Call ``gone`` when the connection of a request is lost; reading goes on for that."""
        cycle.flow.resume_reading()
        if cycle.disconnected:
            self.loop.call_soon(gone)
        else:
            self._watchers[cycle] = gone

    def end_unfinished(self) -> bool:
        """Refuse a request whose body is still coming; says whether there was one."""
        found = any(one.more_body and not one.response_started for one in self._unanswered)
        if found:
            self._answer_and_close(_stopping())
        return found

    def shutdown(self) -> None:
        """Close at once where nothing is being answered, a body that is still coming included."""
        if not self.end_unfinished():
            super().shutdown()
            # Where the client does not read, sending would be waited for until it is cancelled.
            self._wait(_CLOSE_S_MAX / 2)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the usual error shape."""
        self._answer_and_close(problem_of(InvalidRequest(msg, param="request")))

    def _check_head(self) -> None:
        """Measure a head that came together with much of its body."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._header_bytes_max:
            self._refuse_head()
            raise ValueError("request head over its limit")  # stops the parser

    def _refuse_head(self) -> None:
        bounds = f"{self._header_bytes_max} bytes and {_HEADERS_MAX} headers"
        told = f"The request head is over the limit of {bounds}."
        error = InvalidRequest(told, param="headers", code="headers_too_large")
        self._answer_and_close(problem_of(error), 431)

    def _refuse_trailers(self) -> None:
        if self.cycle.response_started:
            self.transport.abort()
            return
        told = f"What follows the body is over the limit of {self._header_bytes_max} bytes."
        error = InvalidRequest(told, param="headers", code="headers_too_large")
        self._answer_and_close(problem_of(error), 431)

    def _wait(self, seconds: float) -> None:
        """Give up after so long, unless something else is waited for, or nothing, by then.

        The timer is kept over many short waits: to set one costs more than to look at a clock.
        """
        self._due_at = due_at = self.loop.time() + seconds
        if self._timer is None or self._timer.when() > due_at:
            self._set_timer(min(seconds, _LOOK_S))

    def _stop_waiting(self) -> None:
        self._due_at = None

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due_at is not None:
            left_s = self._due_at - self.loop.time()
            if left_s <= 0:
                self._give_up()
            else:
                self._set_timer(min(left_s, _LOOK_S))

    def _give_up(self) -> None:
        """Close; where the client has not read what was sent, closing would wait for it."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            self.transport.close()

    def _answer_and_close(self, problem: Problem, status: int | None = None) -> None:
        """Answer for the app and close; an answer that has begun is only cut off."""
        if any(one.response_started and not one.response_complete for one in self._unanswered):
            self.transport.abort()
        if self.transport.is_closing():
            return
        body = problem.body()
        lines = [
            b"HTTP/1.1 %d Refused" % (status or problem.status),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            *(name + b": " + value for name, value in problem.headers),
        ]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()
        self._wait(_CLOSE_S_MAX)


def _connections_possible() -> int:
    """Connections that leave file descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, soft - _FILES_RESERVED)


def _too_many_connections(count: int, connections_max: int) -> Problem:
    message = "Too many connections are open; close idle ones."
    return problem_of(
        Overloaded(
            message,
            status=503,
            reason="connections",
            measured=count,
            threshold=connections_max,
            retry_after_s=1.0,
        )
    )


def _stopping() -> Problem:
    message = "The server is shutting down; this request was not complete and was not begun."
    return problem_of(
        Overloaded(
            message,
            status=503,
            reason="draining",
            measured=None,
            threshold=None,
            retry_after_s=1.0,
        )
    )


def _raise_file_limit() -> None:
    """Each connection is an open file, and the usual limit of 1,024 is meant for old programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
