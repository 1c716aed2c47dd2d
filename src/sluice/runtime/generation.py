"""What a caller asks for and gets back, in text: the values between HTTP server and gateway.

Values, but for a body that is to be freed. This module imports ``core`` alone, so that ``server``
can share it with the layers that serve the call without seeing any of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from sluice.core.errors import InternalError
from sluice.core.request import EndReason, PhaseTimes, Rung, Usage
from sluice.core.sampling import Sampling

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to be rendered by the model's chat template, in OpenAI's message shape.

    ``tool_choice`` is ``auto``, ``none``, ``required`` or the name of one tool in ``tools``.
    ``template_options`` are passed to the template as variables (``chat_template_kwargs``).
    """

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] = ()
    tool_choice: str = "auto"
    template_options: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text, tokenised with the model's special tokens recognised as text only."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids given by the caller."""

    tokens: tuple[int, ...]


class SentBody:
    """The body of a request until its answer has begun. All who serve the call hold this one.

    ``raw`` is a JSON object, ``fields`` are its members by name, each a buffer of JSON that was not
    decoded. ``understand`` makes the call of it that an embedded model takes; it raises
    ``RequestError``.
    """

    __slots__ = ("fields", "raw", "understand")

    def __init__(
        self, raw: bytes, fields: Mapping[str, Any], understand: Callable[[], "Call"]
    ) -> None:
        self.raw, self.fields, self.understand = raw, fields, understand

    def change(
        self, raw: bytes, fields: Mapping[str, Any], understand: Callable[[], "Call"]
    ) -> None:
        """Have another body in its place, for all who hold it."""
        self.raw, self.fields, self.understand = raw, fields, understand

    def drop(self) -> None:
        """Free it: nobody will send or read it again."""
        self.raw, self.fields, self.understand = b"", {}, _nothing_left


def _nothing_left() -> "Call":
    raise InternalError("the body of a request was asked for when its answer had begun")


@dataclass(frozen=True, slots=True, eq=False)
class RawPrompt:
    """A request as its client sent it, for an engine that reads it itself.

    ``path`` is where it was sent. ``streamed`` says in which form the answer is wanted, and
    ``shows_usage`` that a stream is to tell its usage. ``headers`` go along with it.
    """

    path: str
    sent: SentBody
    streamed: bool
    shows_usage: bool
    headers: tuple[tuple[str, str], ...]

    @property
    def body(self) -> bytes:
        """The body; empty once it was dropped."""
        return self.sent.raw

    @property
    def fields(self) -> Mapping[str, Any]:
        """The members of the body."""
        return self.sent.fields


@dataclass(frozen=True, slots=True)
class Relaying:
    """Models by who answers for them: ``always`` a remote engine, or ``degraded`` perhaps one."""

    always: frozenset[str] = frozenset()
    degraded: frozenset[str] = frozenset()


NOTHING_REMOTE = Relaying()


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the output must parse as. ``schema`` is set for ``json_schema`` only."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: JsonObject | None = None


class RetrievalRung(StrEnum):
    """What may become of retrieval that is late, fails or brings too much, gentlest first."""

    FEWER_PASSAGES = "fewer_passages"  # the best of those found, as many as leave time and room
    NO_RERANK = "no_rerank"  # in the retriever's own order
    NO_RETRIEVAL = "no_retrieval"  # the prompt goes on as it came


@dataclass(frozen=True, slots=True)
class Source:
    """A passage in a prompt, by the ``number`` that the template gives it; ``id`` names it in its
    collection."""

    number: int
    id: str
    document: str
    title: str
    score: float


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What was retrieved for a call before it was admitted.

    It took ``duration_ns`` and had ``budget_ns``, ``None`` where nothing is due. ``found`` counts
    the passages found, ``sources`` are those in the prompt; they add about ``tokens``. ``degraded``
    holds the rungs that were taken, and ``reason`` why.
    """

    pipeline: str
    duration_ns: int
    budget_ns: int | None
    found: int = 0
    tokens: int = 0
    sources: tuple[Source, ...] = ()
    degraded: tuple[RetrievalRung, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was refused before it became a call.

    ``model`` is empty where it names none that is served, ``client_id`` where the client gave none.
    """

    id: str
    client_id: str
    model: str
    status: int
    code: str


_SAMPLING, _FORMAT = Sampling(), OutputFormat()


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client, checked for shape, not yet tokenised.

    ``arrived_ns`` is monotonic time at the first byte. ``output_tokens_max`` is ``None`` where the
    client set none: the rest of the context applies. ``stop`` are strings that end the output and
    are not part of it. ``client_id`` is the id that the client gave the request, empty if none.
    ``body_bytes`` is the size of the request that the call was made of, a bound on the work that
    its text can be, and ``likeness`` a number that is equal for calls that ask for the same.

    ``slo_class`` and ``service_tier`` are what the client named, empty for nothing; the gateway
    finds the class of a call from them. ``priority`` replaces the tier of the class.
    ``may_degrade`` is false where the client wants its answer as asked or none.

    ``raw`` is the request that the call was made of, where a remote engine may get it, and
    ``retrieval`` what was put into its prompt, where its model is a pipeline's. ``operation`` is
    what it asks for in OpenTelemetry's words, ``traceparent`` and ``tracestate`` are the headers of
    those names, empty for none.
    """

    id: str
    model: str
    arrived_ns: int
    prompt: ChatPrompt | TextPrompt | TokenPrompt | RawPrompt
    sampling: Sampling = _SAMPLING
    choices: int = 1
    output_tokens_max: int | None = None
    output_tokens_min: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_end_token: bool = False
    output_format: OutputFormat = _FORMAT
    tenant: str = ""
    slo_class: str = ""
    service_tier: str = ""
    priority: int | None = None
    may_degrade: bool = True
    deadline_ns: int | None = None
    client_id: str = ""
    body_bytes: int = 0
    likeness: int = 0
    raw: RawPrompt | None = None
    operation: str = ""
    traceparent: str = ""
    tracestate: str = ""
    retrieval: Retrieval | None = None


@dataclass(frozen=True, slots=True)
class ToldOutcome:
    """What a client says became of a prompt: 0 is wrong, 1 is right.

    ``id`` names the request that had it, and ``ok`` is then about the model that answered; else
    there is a ``prompt``. ``weak`` and ``strong`` are about the simple and the complex model, each
    ``None`` where it is not known.
    """

    id: str = ""
    prompt: str = ""
    ok: float | None = None
    weak: float | None = None
    strong: float | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a call is answered; final once a replica has it.

    ``slo_class`` is the class that it is served in, empty for none. ``degraded`` holds the rungs
    that were taken, in order; ``output_tokens_max`` is the limit that a shortened answer got, and
    ``model_asked`` the model that was asked for, where another one answers. ``retrieval`` is what
    was put into the prompt.
    """

    slo_class: str = ""
    degraded: tuple[Rung, ...] = ()
    output_tokens_max: int | None = None
    model_asked: str = ""
    retrieval: Retrieval | None = None

    @property
    def disclosed(self) -> tuple[str, ...]:
        """All that was done to the answer, retrieval first."""
        retrieval = self.retrieval
        return (*(() if retrieval is None else retrieval.degraded), *self.degraded)


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token as text and bytes with its natural-log probability before temperature."""

    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenText:
    """One generated token with its log-probability and the best alternatives."""

    sampled: TextLogprob
    top: tuple[TextLogprob, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. ``id`` and ``name`` are set in the first piece of each index only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that became certain for one choice: valid UTF-8, nothing that could be a stop string.

    ``tokens`` counts the generated tokens behind it, 0 where text was held back earlier.
    ``logprobs`` has one entry per token where they were asked for.
    """

    choice: int
    text: str
    tokens: int
    logprobs: tuple[TokenText, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


Finish = Literal["stop", "length", "tool_calls", "content_filter"]


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One choice is complete. ``finish`` is OpenAI's finish_reason."""

    choice: int
    finish: Finish


class Fault(StrEnum):
    """What a ``FAILED`` ending is put down to."""

    REQUEST = "request"  # it cannot be followed as asked, such as a grammar that leads nowhere
    ENGINE = "engine"  # a step that held it, or the text side of it, failed
    REPLICA = "replica"  # its replica was lost


@dataclass(frozen=True, slots=True)
class Finished:
    """The call is over; always the last piece, and exactly one.

    ``reason`` is ``STOP`` or ``LENGTH`` where every choice completed. Any other reason means that
    the answer is not whole; ``error`` then says why, in words for the client. ``fault`` is set for
    ``FAILED`` alone.
    """

    reason: EndReason
    usage: Usage
    phases: PhaseTimes
    error: str = ""
    fault: Fault | None = None


Piece = Delta | ChoiceEnded | Finished


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as ``/v1/models`` lists it. ``created_s`` is Unix time.

    ``context_known`` is false where an engine does not tell how much it holds.
    ``fingerprint`` changes with what the same seed may answer differently for: weights, numerics.
    """

    id: str
    created_s: int
    context_tokens_max: int
    owned_by: str = "sluice"
    fingerprint: str = ""
    context_known: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State of one replica as operators see it.

    ``losses`` are those of late. ``starts_in_s`` is set where it waits for its next start.
    """

    id: str
    model: str
    state: str
    error: str = ""
    losses: int = 0
    starts_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """A model of which no replica serves.

    One is predicted to in ``ready_in_s``, ``None`` where none will. ``held`` says that requests
    wait for it, and are not refused.
    """

    model: str
    ready_in_s: float | None
    held: bool


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served; ``reason`` says what is missing.

    ``absent`` are models without a replica that serves; one may be so that starts for a request.
    """

    ready: bool
    reason: str
    replicas: tuple[ReplicaStatus, ...] = ()
    absent: tuple[Absent, ...] = ()
