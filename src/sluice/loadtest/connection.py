"""One connection of the load client: writes a request, stamps what comes back, keeps nothing else.

``player.py`` decides what is sent when and owns the connections. ``executors/http_connection.py``
is the gateway's; this one has no reader that could hold an answer back: every piece is stamped and
read in the call in which it comes.
"""

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import cast

import httptools

from sluice.executors.faults import retry_after_s
from sluice.executors.stream import Reply
from sluice.loadtest.reading import Reading, reason_in
from sluice.loadtest.trial import Ending, RequestOutcome
from sluice.workload.asks import Ask

_S = 1e-9
_OVERLOADED = frozenset({429, 503, 529})
_BODY_BYTES_MAX = 64 * 1024**2


class Call:
    """One request under way. Times are monotonic nanoseconds."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_fields",
        "ask",
        "at_ns",
        "begun_ns",
        "end_ns",
        "ending",
        "head_ns",
        "raw",
        "reading",
        "reason",
        "sent_ns",
        "status",
        "streamed",
    )

    def __init__(self, ask: Ask, at_ns: int, raw: bytes, begun_ns: int) -> None:
        self.ask, self.at_ns, self.raw, self.begun_ns = ask, at_ns, raw, begun_ns
        self.sent_ns: int | None = None
        self.head_ns: int | None = None
        self.end_ns: int | None = None
        self.ending: Ending | None = None
        self.reason = ""
        self.status: int | None = None
        self.streamed = False
        self.reading = Reading()
        self._fields: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_bytes = 0

    def head(self, t_ns: int, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """The head of the answer is there."""
        self.head_ns, self.status, self._fields = t_ns, status, fields
        if status == 200:
            self.streamed = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in fields
            )

    def body(self, t_ns: int, piece: bytes) -> None:
        """A piece of the body."""
        if not self.streamed:
            self._body_bytes += len(piece)
            if self._body_bytes > _BODY_BYTES_MAX:
                self.end(t_ns, Ending.GARBAGE, f"the answer is over {_BODY_BYTES_MAX} bytes")
            else:
                self._body.append(piece)
            return
        self.reading.feed(t_ns, piece)
        self._take_ending()

    def complete(self, t_ns: int) -> None:
        """The answer ended in order."""
        if self.ending is not None:
            return
        body = b"".join(self._body)
        match self.status:
            case 200 if self.streamed:
                self.reading.close(t_ns)
                self._take_ending()
            case 200:
                self.reading.read_whole(t_ns, body)
                self._take_ending()
            case int(status):
                self.end(t_ns, _ending_of(status), reason_in(body))
            case None:
                self.end(t_ns, Ending.GARBAGE, "an answer without a status")

    def end(self, t_ns: int, ending: Ending, reason: str = "") -> None:
        """It is over; only the first ending counts."""
        if self.ending is None:
            self.ending, self.end_ns, self.reason = ending, t_ns, reason

    def again(self) -> None:
        """Send it once more: it has not been seen by the server."""
        self.ending = self.end_ns = None
        self.reason = ""

    def _take_ending(self) -> None:
        reading = self.reading
        if reading.ending is not None and reading.ended_ns is not None:
            self.end(reading.ended_ns, reading.ending, reading.reason)

    def outcome(self, began_ns: int) -> RequestOutcome:
        """What became of it, in seconds since the trial began. Call it once it is over."""
        assert self.ending is not None, "it is under way"
        assert self.end_ns is not None, "set with the ending"
        reading = self.reading

        def since(t_ns: int | None) -> float | None:
            return None if t_ns is None else (t_ns - began_ns) * _S

        return RequestOutcome(
            number=self.ask.number,
            at_s=(self.at_ns - began_ns) * _S,
            ending=self.ending,
            end_s=(self.end_ns - began_ns) * _S,
            begun_s=since(self.begun_ns),
            sent_s=since(self.sent_ns),
            head_s=since(self.head_ns),
            first_s=since(reading.first_ns),
            shown_s=since(reading.shown_ns),
            last_s=since(reading.last_ns),
            status=self.status,
            prompt_tokens=reading.prompt_tokens,
            cached_tokens=reading.cached_tokens,
            output_tokens=reading.output_tokens,
            reasoning_tokens=reading.reasoning_tokens,
            first_tokens=reading.first_tokens,
            chunks=reading.chunks,
            choices=reading.choices,
            gaps_s=reading.gaps_s,
            gap_tokens=_gap_tokens(reading),
            finish=reading.finish,
            reason=self.reason,
            retry_after_s=self.retry_after_s,
            tenant=self.ask.tenant,
            slo_class=self.ask.slo_class,
        )

    @property
    def retry_after_s(self) -> float | None:
        """When a refusal told to come back."""
        if self.status is None or self.status == 200:
            return None
        headers = tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in self._fields
        )
        return retry_after_s(Reply(self.status, headers, b""))


def _ending_of(status: int) -> Ending:
    if status in _OVERLOADED:
        return Ending.REFUSED
    if 400 <= status < 500:
        return Ending.REJECTED
    return Ending.FAILED if status >= 500 else Ending.GARBAGE


def _gap_tokens(reading: Reading) -> list[float]:
    """Tokens in the later chunk of each gap: as the server counted them, else what its count of the
    whole leaves for each chunk after the first, which is taken to hold one."""
    gaps = len(reading.gaps_s)
    if len(reading.gap_tokens) == gaps:
        return list(reading.gap_tokens)
    if not gaps or reading.output_tokens is None:
        return []
    later = reading.output_tokens - (reading.first_tokens or 1) - (reading.choices - 1)
    return [later / gaps] * gaps if later > 0 else []


Ended = Callable[["Connection", Call], None]


class Connection(asyncio.Protocol):
    """One connection; a request at a time. ``on_call_end`` hears of each call that is over, once,
    ``on_idle`` when another one can be sent, and ``on_time`` the time of each piece that came."""

    def __init__(
        self,
        on_call_end: Ended,
        on_idle: Callable[["Connection"], None],
        on_time: Callable[[int], None],
    ) -> None:
        self._on_call_end, self._on_idle, self._on_time = on_call_end, on_idle, on_time
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._call: Call | None = None
        self._t_ns = 0
        self._fields: list[tuple[bytes, bytes]] = []
        self._told = True
        self._complete = True
        self._kept = False
        self._sized = False
        self.exchanges = 0
        self.received_bytes = 0

    @property
    def usable(self) -> bool:
        """Whether a request can be sent."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and self._complete

    def send(self, call: Call) -> None:
        """Write a request."""
        assert self._transport is not None, "not connected"
        self._call, self._told, self._complete = call, False, False
        self.exchanges += 1
        call.sent_ns = monotonic_ns()
        self._transport.write(call.raw)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # What the event loop and the parser do.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, piece: bytes) -> None:
        self._t_ns = monotonic_ns()
        self.received_bytes += len(piece)
        self._on_time(self._t_ns)
        try:
            self._parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._call is not None:
                self._call.end(self._t_ns, Ending.GARBAGE, f"not an HTTP answer: {error}")
            self.abort()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        call = self._call
        if call is not None and call.ending is None:
            now_ns = monotonic_ns()
            if call.status is not None and not self._sized and exc is None:
                call.complete(now_ns)  # the end of the connection is the end of the body
            else:
                words = "the connection ended before the answer was whole"
                call.end(now_ns, Ending.DISCONNECTED, str(exc) if exc else words)
        self._tell()

    def on_message_begin(self) -> None:
        self._fields, self._sized = [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))
        if not self._sized and name.lower() in {b"content-length", b"transfer-encoding"}:
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._call is not None and status >= 200:
            self._call.head(self._t_ns, status, self._fields)

    def on_body(self, body: bytes) -> None:
        if self._call is not None:
            self._call.body(self._t_ns, body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._kept = self._parser.should_keep_alive()
        self._complete = True
        if self._call is not None:
            self._call.complete(self._t_ns)

    def _tell(self) -> None:
        """Say that the call is over, and that the connection is free."""
        call = self._call
        if call is None or call.ending is None:
            return
        if not self._told:
            self._told = True
            self._on_call_end(self, call)
        if not self._complete or self._call is not call:
            return
        self._call = None
        if self._kept:
            self._on_idle(self)
        elif self._transport is not None:
            self._transport.close()
