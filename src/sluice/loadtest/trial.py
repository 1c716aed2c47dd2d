"""The values of one trial: what is to be sent when, and what became of each request.

A ``Runner`` plays a ``TrialPlan`` against something, a live endpoint or a simulated one, and gives
a ``TrialOutcome``. Searches ask for plans of a rate (``Stimulus``), have them played and look at
outcomes only, so they run the same against either. Nothing is sent, drawn or printed here.

All times are seconds since the start of the trial. Latencies count from the planned time: a client
that is held up, by itself or by the server, measures the wait and does not leave it out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, assert_never

from sluice.workload.asks import Ask


@dataclass(frozen=True, slots=True)
class Span:
    """How long a trial is.

    Requests arrive for ``warm_s + counted_s + tail_s``; those planned within ``counted_s`` count.
    Load is kept up before and behind it, so that neither an empty start nor a quiet end is taken
    for the steady state. A client gives up ``patience_s`` after the planned time.
    """

    counted_s: float
    warm_s: float = 5.0
    tail_s: float = 0.0
    patience_s: float = 60.0

    @property
    def from_s(self) -> float:
        """Where the counted part begins."""
        return self.warm_s

    @property
    def to_s(self) -> float:
        """Where the counted part ends."""
        return self.warm_s + self.counted_s

    @property
    def arriving_s(self) -> float:
        """Time during which requests arrive."""
        return self.warm_s + self.counted_s + self.tail_s


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests go out at their times, whatever came of those before; ``rate_rps`` is the mean."""

    rate_rps: float


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each with one request at a time. Times of the asks mean nothing: a request
    is planned for the moment at which its client is free.

    With ``once`` the trial is over when every ask has been played, however long that takes.
    """

    concurrency: int
    once: bool = False


Load = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """A trial, drawn as a whole before it begins.

    ``asks`` are in order of time; in a closed loop they are taken in turn, and begin again with
    other texts where there are too few. ``salt`` begins every prompt where it is not empty, so
    that no cache knows them. ``seed`` is what everything was drawn from.
    """

    load: Load
    span: Span
    asks: Sequence[Ask]
    seed: int
    salt: str = ""


class Ending(StrEnum):
    """How a request ended. Everything but ``DONE`` is a failure."""

    DONE = "done"
    REFUSED = "refused"  # 429 or 503: the server says that it is loaded
    REJECTED = "rejected"  # another 4xx: the server says that the request is wrong
    FAILED = "failed"  # 5xx
    ERROR_IN_STREAM = "error_in_stream"
    TRUNCATED = "truncated"  # the stream ended in order without a finish
    DISCONNECTED = "disconnected"
    NOT_CONNECTED = "not_connected"  # refused, name, certificate: nothing was sent
    GARBAGE = "garbage"  # an answer that is none
    TIMEOUT = "timeout"  # the client's patience was over
    UNSENT = "unsent"  # the client could not send it: its own limit, never the server's
    LEFT = "left"  # the trial was over or broken off before it could end; it never counts


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request. ``None`` is what did not happen, or what the server did not tell.

    ``first_s`` and ``last_s`` are the receipt of the first and last chunk that holds output,
    reasoning included, ``shown_s`` of the first that is not reasoning. ``first_tokens`` are the
    tokens in the first chunk. ``gaps_s`` are the times between chunks of the same choice and
    ``gap_tokens`` the tokens in the later chunk of each, empty where the server does not tell.
    ``output_tokens`` are of all choices, by the server's usage. ``begun_s`` is when the client took
    it up: it may have to connect before it can send.
    """

    number: int
    at_s: float
    ending: Ending
    end_s: float
    begun_s: float | None = None
    sent_s: float | None = None
    head_s: float | None = None
    first_s: float | None = None
    shown_s: float | None = None
    last_s: float | None = None
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    first_tokens: int | None = None
    chunks: int = 0
    choices: int = 1
    gaps_s: Sequence[float] = ()
    gap_tokens: Sequence[float] = ()
    finish: str = ""
    reason: str = ""
    retry_after_s: float | None = None
    tenant: str = ""
    slo_class: str = ""

    @property
    def done(self) -> bool:
        """Whether a whole answer came."""
        return self.ending is Ending.DONE

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from the planned time."""
        return None if self.first_s is None else self.first_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token of a choice after those of its first chunk.

        Undefined for an answer in one chunk, and without the server's count of tokens.
        """
        if self.first_s is None or self.last_s is None or self.output_tokens is None:
            return None
        later = self.output_tokens / self.choices - (self.first_tokens or 1)
        return (self.last_s - self.first_s) / later if later > 0 and self.chunks > 1 else None

    @property
    def e2e_s(self) -> float:
        """Time to the end, from the planned time, also where the end is a failure."""
        return self.end_s - self.at_s

    @property
    def gap_s_max(self) -> float | None:
        """The longest time between two chunks."""
        return max(self.gaps_s, default=None)

    @property
    def lag_s(self) -> float | None:
        """How much later than planned the client took it up; connecting is the server's time."""
        begun_s = self.sent_s if self.begun_s is None else self.begun_s
        return None if begun_s is None else begun_s - self.at_s


class Metric(StrEnum):
    """What an objective bounds, of each request."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    GAP = "gap"  # the longest gap: a request with one above the limit has stalled


@dataclass(frozen=True, slots=True)
class Objective:
    """At least ``percentile`` percent of requests have ``metric`` within ``limit_s``.

    It is tested as a share: P(above the limit, or failed) ≤ ``share_max``.
    """

    metric: Metric
    limit_s: float
    percentile: float = 95.0

    @property
    def share_max(self) -> float:
        """The share of requests that may miss it."""
        return 1.0 - self.percentile / 100.0

    def missed(self, one: RequestOutcome) -> bool | None:
        """Whether a request misses it; ``None`` where the metric is not defined for it.

        A failure misses every objective.
        """
        if not one.done:
            return True
        value_s = _value_s(self.metric, one)
        return None if value_s is None else value_s > self.limit_s


def _value_s(metric: Metric, one: RequestOutcome) -> float | None:
    match metric:
        case Metric.TTFT:
            return one.ttft_s
        case Metric.TPOT:
            return one.tpot_s
        case Metric.E2E:
            return one.e2e_s
        case Metric.GAP:
            return one.gap_s_max
        case _:
            assert_never(metric)


def good(one: RequestOutcome, objectives: Sequence[Objective]) -> bool:
    """Whether a whole answer came within all limits."""
    return one.done and not any(objective.missed(one) for objective in objectives)


class VoidCause(StrEnum):
    """Why a trial says nothing about the server."""

    CLIENT_LIMITED = "client_limited"  # the client did not keep its schedule
    CLIENT_RESOURCES = "client_resources"  # files or ports ran out
    INTERRUPTED = "interrupted"
    CACHE_MOVED = "cache_moved"  # the cached share is not what the cache policy asks for
    NOTHING_ANSWERED = "nothing_answered"  # endpoint down, key or model refused


@dataclass(frozen=True, slots=True)
class Void:
    """A cause with the figures behind it, in words."""

    cause: VoidCause
    detail: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How a trial stands: requests due by now, sent, ended in any way and ended whole."""

    at_s: float
    due: int
    sent: int
    ended: int
    done: int

    @property
    def in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return self.sent - self.ended


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What became of a trial.

    ``requests`` are all requests of the plan that were due, in order of planned time. ``stopped_s``
    is where a watch broke it off. ``took_s`` is the time that it took in all, with the drain.
    ``client`` holds figures of the client's own condition and ``server`` those that the server
    tells, by name.
    """

    plan: TrialPlan
    requests: Sequence[RequestOutcome]
    took_s: float
    void: Void | None = None
    stopped_s: float | None = None
    began_unix_s: float | None = None
    client: Mapping[str, float] = field(default_factory=dict)
    server: Mapping[str, float] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether it says something about the server."""
        return self.void is None

    @property
    def counted(self) -> Sequence[RequestOutcome]:
        """Requests that were planned within the counted part, except those that were left."""
        from_s, to_s = self.plan.span.from_s, self.plan.span.to_s
        return [
            one
            for one in self.requests
            if from_s <= one.at_s < to_s and one.ending is not Ending.LEFT
        ]

    @property
    def counted_s(self) -> float:
        """Length of the counted part, as far as it was reached."""
        span = self.plan.span
        end_s = span.to_s if self.stopped_s is None else min(span.to_s, self.stopped_s)
        return max(0.0, end_s - span.from_s)


# Looks at a trial while it runs, a few times a second; true breaks it off.
Watch = Callable[[Progress], bool]


class Runner(Protocol):
    """Plays plans against one endpoint, one at a time."""

    def run(self, plan: TrialPlan, watch: Watch | None = None) -> TrialOutcome:
        """Play a plan to its end, or until ``watch`` says to stop.

        A trial of a server that fails is an outcome; whatever keeps the client from running raises
        ``CannotMeasure``. ``KeyboardInterrupt`` ends it with what there is: an outcome void as
        interrupted.
        """
        ...


class Stimulus(Protocol):
    """Draws plans of one kind of traffic. The same seed gives the same requests at every rate, in
    the same pattern faster or slower, so that trials can be compared."""

    def open_loop(self, rate_rps: float, span: Span, seed: int) -> TrialPlan:
        """A plan with arrivals at this mean rate."""
        ...

    def closed_loop(self, concurrency: int, span: Span, seed: int) -> TrialPlan:
        """A plan of so many clients."""
        ...


class CannotMeasure(Exception):
    """The load test cannot run; the message says what to change."""
