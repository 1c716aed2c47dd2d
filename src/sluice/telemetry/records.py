"""What the journal holds: one struct for each kind of record.

Written by the gateway and by replica processes through ``journal.JournalWriter``; read by traces,
replay, doctor and exports. ``t_ns`` is monotonic time, the same clock in all processes of a
machine; the reader adds wall-clock time. ``id`` is the request's id throughout.

Fields may be added with a default and none may change its meaning: older readers skip what they do
not know. Prompt and output text occurs in ``RequestText`` alone, which a writer drops unless it was
told to record text. Token ids occur only inside ``PolicyRecord`` payloads, as keyed pseudonyms.
"""

from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, tag=True, tag_field="kind", omit_defaults=True, gc=False):
    """Something that happened at ``t_ns``."""

    t_ns: int


# -------------------------------------------------------------------------------------- requests


class RequestArrived(Record, frozen=True):
    """A request was read, checked and tokenised. ``arrived_ns`` is when its first byte came.

    ``client_id`` is the id that the client gave it, where it did and it is not ``id``. ``overload``
    is the ladder of its class, as far as the client allows it. One that was refused before the work
    of tokenising has 0 ``prompt_tokens``. ``operation`` is what was asked for in OpenTelemetry's
    words; ``traceparent`` and ``tracestate`` are the client's.
    """

    id: str
    model: str
    arrived_ns: int
    prompt_tokens: int
    output_tokens_max: int
    choices: int = 1
    tier: int = 0
    tenant: str = ""
    slo_class: str = ""
    deadline_ns: int | None = None
    client_id: str = ""
    overload: tuple[str, ...] = ()
    operation: str = ""
    traceparent: str = ""
    tracestate: str = ""


class Retrieved(Record, frozen=True):
    """A pipeline looked for passages for the request before it was admitted.

    It took ``duration_ns`` until about ``t_ns`` and had ``budget_ns``, if anything was due. Of the
    passages ``found`` those in ``sources`` went into the prompt, which adds about ``tokens``.
    ``rungs`` were taken for the ``reason``.
    """

    id: str
    pipeline: str
    duration_ns: int
    budget_ns: int | None = None
    found: int = 0
    tokens: int = 0
    sources: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    reason: str = ""


class Score(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How one replica was judged; see ``core.events.ReplicaScore``."""

    replica: str
    score: float
    uncached_tokens: int
    places: int
    kv_fits: bool = True


class RequestDispatched(Record, frozen=True):
    """The fleet gave the request to a replica. ``scores`` are those compared, best first.

    ``predicted_wait_ns`` was promised when it began to wait in the fleet and ``waited_ns`` is how
    long it did; both are absent where it started at once. ``remote`` replicas run elsewhere.
    """

    id: str
    replica: str
    attempt: int
    scores: tuple[Score, ...] = ()
    predicted_wait_ns: int | None = None
    waited_ns: int | None = None
    remote: bool = False


class AttemptFailed(Record, frozen=True):
    """A remote replica gave no whole answer to the request; ``outcome`` says of what kind that is.

    What became of the request then is told by the records that follow.
    """

    id: str
    replica: str
    attempt: int
    outcome: str
    error: str


class RequestDegraded(Record, frozen=True):
    """A rung of the request's ladder was taken.

    ``shorten`` has ``output_tokens_max``. ``smaller`` has the ``model`` that answers, and the
    numbers for which its own model did not take it.
    """

    id: str
    rung: str
    output_tokens_max: int | None = None
    model: str = ""
    measured: float | None = None
    threshold: float | None = None


class RequestRouted(Record, frozen=True):
    """A request for a route goes to ``model``; ``why`` is one of ``core.model_routes.Why``.

    It comes before the request's arrival at that model. ``score`` is absent where there was none.
    ``would`` is the way that was found where the route only records.
    """

    id: str
    route: str
    model: str
    way: str
    why: str
    score: float | None = None
    threshold: float | None = None
    would: str = ""


class RequestRejected(Record, frozen=True):
    """The request was refused: ``measured`` was compared with ``threshold``."""

    id: str
    model: str
    status: int
    reason: str
    measured: float
    threshold: float
    retry_after_s: float | None = None


class RequestRefused(Record, frozen=True):
    """The request was refused before it was tokenised: a wrong parameter, no key, no such path.

    Of many in one second only the first are recorded. ``model`` is empty where none was known.
    """

    id: str
    status: int
    reason: str
    model: str = ""
    client_id: str = ""


class FirstToken(Record, frozen=True):
    """The first text of the request reached its stream, ``ttft_ns`` after its arrival."""

    id: str
    ttft_ns: int


class RequestEnded(Record, frozen=True):
    """The one ending of an accepted request. The phases sum to its life since ``arrived_ns``.

    ``outcome`` says whether it met the targets of its class; empty where no target could be met.
    """

    id: str
    model: str
    reason: str
    arrived_ns: int
    replica: str = ""
    attempts: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    retrieval_ns: int = 0
    admission_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    preempted_ns: int = 0
    preemptions: int = 0
    ttft_ns: int | None = None
    tpot_ns: int | None = None
    error: str = ""
    outcome: str = ""


class RequestText(Record, frozen=True):
    """What was asked and answered. Written only where the operator turned it on.

    Both are as the model saw and gave them, and cut at a length. With several choices each output
    begins on a line ``[choice N]``.
    """

    id: str
    prompt: str = ""
    output: str = ""


# ------------------------------------------------------------------------------ replicas and steps


class ReplicaChanged(Record, frozen=True):
    """A replica entered a state of its life. Limits are known from ready on."""

    replica: str
    model: str
    state: str
    error: str = ""
    incarnation: int = 0
    context_tokens_max: int = 0
    block_size: int = 0
    blocks_total: int = 0
    sequences_max: int = 0


class StartStage(Record, frozen=True):
    """A stage of a replica's start is over, which took ``duration_ns``.

    ``stage`` is one of ``metric_table.Stage``; ``wake`` is all of the start of a warm one.
    """

    replica: str
    model: str
    stage: str
    duration_ns: int


class FleetScaled(Record, frozen=True):
    """So many replicas are to serve as ``number`` says, for ``reason``: the term that decided.

    ``terms`` are the replicas that each of them asks for. ``short_of`` are needed where the model
    may not have so many.
    """

    model: str
    before: int
    number: int
    reason: str
    terms: dict[str, float] = {}
    short_of: int | None = None


class EngineSampled(Record, frozen=True):
    """What an engine that runs elsewhere told of its load; ``None`` for what it has no word for.

    ``kv_use`` is 0 to 1. ``counters`` are its own, which begin at 0 when it starts again; their
    names are those of ``executors.stream.Gauges``.
    """

    replica: str
    model: str
    waiting: float | None = None
    running: float | None = None
    kv_use: float | None = None
    counters: dict[str, float] = {}


class HostSampled(Record, frozen=True):
    """What a replica's process had of the processors since its start: time that its threads
    computed, and time that they were ready to and had none."""

    replica: str
    used_ns: int
    waited_ns: int


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of one sequence's prompt in a step: ``tokens`` after ``past_tokens``."""

    id: str
    choice: int
    tokens: int
    past_tokens: int


class Step(Record, frozen=True):
    """One forward pass. ``decode`` lists the request and choice of each one-token row.

    ``t_ns`` is its end, ``measured_ns`` its wall time with ``sampling_ns`` in it.
    """

    replica: str
    step: int
    predicted_ns: int
    measured_ns: int
    decode: tuple[tuple[str, int], ...] = ()
    prefill: tuple[Chunk, ...] = ()
    sampling_ns: int = 0
    blocks_free: int = 0
    running: int = 0
    waiting: int = 0
    error: str = ""


class PolicyRecord(Record, frozen=True):
    """An event that a policy object took, or an effect that it returned, for replay.

    ``owner`` is a replica id or ``fleet``. ``payload`` is msgpack made by ``runtime.recording``.
    """

    owner: str
    role: Literal["event", "effect"]
    name: str
    payload: bytes


# ------------------------------------------------------------------------------------ the server


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A setting before and after, each empty where it does not exist."""

    before: str
    after: str


class Deployment(Record, frozen=True):
    """Something changed that may explain a change in behaviour: a start, a stop, a setting.

    ``settings`` are all that matter to how requests are served, as text, facts of model files among
    them; ``digest`` is theirs. ``changed`` tells what is different from the deployment before, also
    from the last run of the server. All three are empty for an event that changes no setting.
    ``source`` is ``operator`` for what was told through ``POST /admin/events``.
    """

    what: str
    details: dict[str, str] = {}
    version: str = ""
    digest: str = ""
    settings: dict[str, str] = {}
    changed: dict[str, Change] = {}
    source: Literal["sluice", "operator"] = "sluice"


class Gap(Record, frozen=True):
    """``dropped`` records before this one could not be written, because of ``reason``."""

    dropped: int
    reason: str


AnyRecord = (
    RequestArrived
    | Retrieved
    | RequestDispatched
    | AttemptFailed
    | RequestDegraded
    | RequestRouted
    | RequestRejected
    | RequestRefused
    | FirstToken
    | RequestEnded
    | RequestText
    | ReplicaChanged
    | StartStage
    | FleetScaled
    | EngineSampled
    | HostSampled
    | Step
    | PolicyRecord
    | Deployment
    | Gap
)
