"""The protocol by which an engine that batches itself enters the product, and its values.

A ``StreamExecutor`` stands for one such engine at one address. It sends a request that is already
decided, hands its answer on byte for byte and says of it only what phases, usage and endings need.
It admits nothing, queues nothing, picks no replica and never sends a request a second time after a
byte of the answer has come: the gateway does all that. Names of metrics, routes and quirks of the
engines are in ``dialects.py``.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self

import msgspec

from sluice.core.errors import ExecutorError

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an upstream may take; ``None`` waits for ever and is for the caller to bound.

    ``connect_s`` covers a free connection, DNS, TCP and TLS. ``first_token_s`` runs from sending
    to the first event with output, whatever opens the stream before it. ``silence_s`` runs between
    two events of a stream that has begun, ``whole_s`` from sending to the end of an answer that is
    not streamed.
    """

    connect_s: float = 5.0
    first_token_s: float | None = None
    silence_s: float | None = 60.0
    whole_s: float | None = None


class UsageEvents(StrEnum):
    """What the client gets to see of usage in a stream."""

    AS_SENT = "as_sent"  # not a byte is changed
    NONE = "none"


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What goes upstream: the caller's bytes and the headers to send with them.

    ``id`` is the name under which the engine can be told to abort it. ``headers`` must not hold
    those of the connection (host, content-length, connection), which are the client's own, nor
    the key of the upstream. With ``any_body`` a 2xx may come with whatever it likes: what that is
    follows from the request, and is passed on.
    """

    id: str
    path: str
    body: bytes = field(repr=False)
    headers: Headers = ()
    streamed: bool = True
    any_body: bool = False
    usage_events: UsageEvents = UsageEvents.AS_SENT
    deadlines: Deadlines = Deadlines()


@dataclass(frozen=True, slots=True)
class UpstreamUsage:
    """Token counts of one answer as the upstream gives them.

    ``estimated`` says that it gave none: ``completion_tokens`` is then counted from the events and
    the text that came, and ``prompt_tokens`` is ``None``.
    """

    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None = None
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Where the engine says it spent the request's time; ``None`` where it does not say."""

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    first_token_s: float | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Bytes to pass on and what they mean.

    A msgspec struct because one is made per event: a frozen dataclass takes ten times as long.

    ``raw`` holds whole events, all that came together, or the whole body of an answer that is not
    streamed. ``tokens`` counts the output in it: 0 for what only opens a stream, so that it can be
    held back. ``finishes`` are the choices that end in it, with the upstream's finish reasons.
    ``usage`` is cumulative and never to be added up. ``last`` marks the end of the answer. The end
    of a stream comes in a chunk of its own, so that events can be put before it, and is empty where
    the upstream left ``[DONE]`` out.
    """

    raw: bytes
    tokens: int = 0
    finishes: tuple[tuple[int, str], ...] = ()
    usage: UpstreamUsage | None = None
    last: bool = False


class Answer(Protocol):
    """A 2xx answer that has begun. Iterate to its end, or leave it by ``close``.

    Iterating raises ``UpstreamError``; everything before the fault has been given out by then.
    """

    status: int
    headers: Headers

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def usage(self) -> UpstreamUsage:
        """Counts of what has come so far."""
        ...

    def engine_times(self) -> EngineTimes:
        """The engine's own times, as far as they have come."""
        ...

    def close(self) -> None:
        """Give the connection back, or cancel what still runs: socket closed, abort route called.

        Returns at once and may be called again.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...


class Health(StrEnum):
    """What a probe found."""

    READY = "ready"
    LOADING = "loading"  # it answers, and says that it cannot serve yet
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engine's view of its load. ``None``: it has no such metric. ``kv_use`` is 0 to 1.

    ``counters`` are the dialect's further names, as far as they were found: ``preemptions``,
    ``prompt_tokens``, ``completion_tokens``, ``prefix_queries``, ``prefix_hits``, and of the stages
    ``queue``, ``prefill``, ``decode`` and ``first_token`` the seconds (``queue_s``) and how many
    requests spent them (``queue_count``).
    """

    waiting: float | None
    running: float | None
    kv_use: float | None
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """One look at an upstream. ``at_ns`` is monotonic time at its end.

    ``gauges`` is ``None`` when they could not be read; ``fault`` then says why, as it does for
    health other than ready.
    """

    at_ns: int
    health: Health
    gauges: Gauges | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine tells of itself: the models it serves, and what it holds; ``None`` for what it
    does not tell."""

    models: tuple[str, ...] = ()
    context_tokens_max: int | None = None
    sequences_max: int | None = None


class StreamExecutor(Protocol):
    """One engine that batches itself."""

    async def open(self, request: UpstreamRequest) -> Answer:
        """Send a request and wait for the head of its answer. Raises ``UpstreamError``.

        Cancelling the call cancels the request upstream, as ``Answer.close`` does.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Tell the engine to stop a request. Does nothing where it has no route for that.

        Failures are not raised: the closed socket has said the same.
        """
        ...

    async def probe(self) -> Probe:
        """Look at health and load. Never raises ``UpstreamError``: what is wrong is the result."""
        ...

    async def facts(self) -> EngineFacts:
        """Ask what it serves. Never raises ``UpstreamError``: what it does not tell is unknown."""
        ...

    async def close(self) -> None:
        """Cancel what runs and close all connections."""
        ...


class Sleeper(Protocol):
    """An engine that can free the memory of its GPU while nobody needs it."""

    async def sleep(self) -> str:
        """Let it sleep. Returns why it does not, empty where it does; never raises."""
        ...

    async def wake(self) -> str:
        """Wake it up. Returns why it does not, empty where it is awake; never raises."""
        ...


class EngineClient(StreamExecutor, Sleeper, Protocol):
    """What speaks to one engine that runs elsewhere."""


class UpstreamError(ExecutorError):
    """An upstream gave no whole answer.

    ``reply`` is the answer itself, where there was one that is no success.
    """

    reply: "Reply | None" = None

    def __init__(self, upstream: str, message: str) -> None:
        super().__init__(f"{upstream}: {message}")
        self.upstream = upstream
        self.message = message

    @property
    def summary(self) -> str:
        """What happened, for logs and journals: none of the engine's words, which may quote."""
        return str(self)


class ConnectFault(StrEnum):
    """Why there is no connection."""

    NAME = "name"  # DNS knows no such host
    REFUSED = "refused"  # nothing listens, or no way leads there
    CERTIFICATE = "certificate"  # TLS failed
    LATE = "late"  # over its deadline
    CROWDED = "crowded"  # all connections of the pool were busy until the deadline


class ConnectFailed(UpstreamError):
    """No connection; the upstream has not seen the request."""

    def __init__(self, upstream: str, fault: ConnectFault, message: str) -> None:
        super().__init__(upstream, message)
        self.fault = fault


class FirstTokenLate(UpstreamError):
    """No output by ``Deadlines.first_token_s``, or no whole answer by ``whole_s``."""

    def __init__(self, upstream: str, waited_s: float) -> None:
        super().__init__(upstream, f"no output within {waited_s:g} s")
        self.waited_s = waited_s


class Lost(UpstreamError):
    """The answer broke off: the connection ended, or nothing came for ``silence_s``.

    ``tokens`` counts the output that had come.
    """

    def __init__(self, upstream: str, message: str, tokens: int = 0) -> None:
        super().__init__(upstream, message)
        self.tokens = tokens


class Garbage(UpstreamError):
    """What came is not an answer: not HTTP, not JSON, not events, too large, or a redirect."""

    def __init__(self, upstream: str, message: str, tokens: int = 0) -> None:
        super().__init__(upstream, message)
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer that is not a success. ``headers`` are the upstream's, in lower case."""

    status: int
    headers: Headers
    body: bytes = field(repr=False)

    def header(self, name: str) -> str | None:
        """The value of a header given in lower case."""
        return next((value for key, value in self.headers if key == name), None)


class OverloadKind(StrEnum):
    """What an upstream that takes nothing lacks."""

    BUSY = "busy"  # places, memory or the client's share of requests
    LOADING = "loading"  # its model
    QUOTA = "quota"  # paid credit; waiting does not bring it back


class UpstreamOverloaded(UpstreamError):
    """The upstream takes no further request at this time.

    ``retry_after_s`` is its own word, ``None`` where it gave none.
    """

    def __init__(
        self, upstream: str, kind: OverloadKind, reply: Reply, retry_after_s: float | None
    ) -> None:
        super().__init__(upstream, f"{kind}, status {reply.status}")
        self.kind = kind
        self.reply: Reply = reply
        self.retry_after_s = retry_after_s


class UpstreamFailed(UpstreamError):
    """The engine says that it failed: a 5xx, or an error event in its stream.

    ``tokens`` counts the output that had come.
    """

    def __init__(self, upstream: str, reply: Reply, message: str, tokens: int = 0) -> None:
        super().__init__(upstream, message)
        self.reply: Reply = reply
        self.tokens = tokens

    @property
    def summary(self) -> str:
        """See ``UpstreamError``."""
        return f"{self.upstream}: the engine failed, status {self.reply.status}"


class ClientError(UpstreamError):
    """The upstream finds the request wrong (4xx); the reply is to be passed on as it is.

    ``about_key``: it is the key that was refused. Where the key is ours and not the client's, that
    is a matter between us and the upstream.
    """

    def __init__(self, upstream: str, reply: Reply) -> None:
        super().__init__(upstream, f"status {reply.status}")
        self.reply: Reply = reply
        self.about_key = reply.status in {401, 403}
