"""One request's life, put together from the journal.

``find_life`` reads what concerns one id and returns a value; printing it is ``cli/trace``'s job.
All times in a ``Life`` are nanoseconds since the request's arrival unless they say otherwise.
"""

import difflib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.core.admission import REASONS
from sluice.core.request import Phase
from sluice.telemetry.journal import Entry, JournalReader
from sluice.telemetry.records import (
    AttemptFailed,
    FirstToken,
    RequestArrived,
    RequestDegraded,
    RequestDispatched,
    RequestEnded,
    RequestRefused,
    RequestRejected,
    RequestRouted,
    Retrieved,
    Score,
    Step,
)

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
# The wall clock of a record depends a little on which segments are read with it.
SEARCH_BACK_NS = 60_000_000_000
RECENT_IDS = 1000
NEAREST_IDS = 5


@dataclass(frozen=True, slots=True)
class Decision:
    """What the fleet decided about the request, and the numbers behind it.

    A dispatch has ``replica``, ``attempt`` and ``scores``, and where the request had to wait what
    was predicted for that and how long it was; an attempt that failed ``replica``, ``attempt`` and
    ``error``; a refusal ``status``, ``reason``, ``measured``, ``threshold``, their ``unit`` and
    ``retry_after_s``; a choice between the models of a route its ``route``, ``model``, ``reason``,
    ``threshold`` and ``score``; a degradation its ``rung`` with ``output_tokens_max``, or with the
    ``model`` it is given to and the two numbers compared.
    """

    at_ns: int
    replica: str = ""
    attempt: int = 0
    scores: tuple[Score, ...] = ()
    status: int = 0
    reason: str = ""
    measured: float = 0.0
    threshold: float = 0.0
    retry_after_s: float | None = None
    predicted_wait_ns: int | None = None
    waited_ns: int | None = None
    rung: str = ""
    output_tokens_max: int | None = None
    model: str = ""
    unit: str = ""
    error: str = ""
    route: str = ""
    score: float | None = None
    remote: bool = False


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase. Phases are laid end to end; those that came in parts are drawn as one."""

    phase: Phase
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class StepShare:
    """A step in which the request was computed: its own tokens, and what was computed beside.

    ``at_ns`` is the step's end. ``prefill_tokens`` of the request's prompt were computed, after
    ``past_tokens``; ``decode_rows`` are its own rows of one token each.
    """

    replica: str
    step: int
    at_ns: int
    measured_ns: int
    predicted_ns: int
    prefill_tokens: int
    past_tokens: int
    decode_rows: int
    beside_decode_rows: int
    beside_prefill_tokens: int
    blocks_free: int
    error: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How the request ended."""

    at_ns: int
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attempts: int
    preemptions: int
    tpot_ns: int | None
    error: str
    outcome: str = ""


@dataclass(slots=True)
class Life:
    """One request from arrival to ending, as far as the journal knows.

    ``arrived_wall_ns`` is Unix time. ``ending`` is ``None`` for a request that was refused, still
    runs, or whose server crashed. ``earlier`` counts older requests with the same id. One that is
    ``early`` was refused before it was read to its end or tokenised: it has one decision, no
    counts, and the time of its refusal for its arrival. ``retrieval`` is what a pipeline did for it
    first.
    """

    id: str
    client_id: str
    model: str
    arrived_wall_ns: int
    prompt_tokens: int
    output_tokens_max: int
    choices: int
    tier: int
    tenant: str
    slo_class: str
    read_ns: int
    decisions: list[Decision] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)
    steps: list[StepShare] = field(default_factory=list)
    ttft_ns: int | None = None
    ending: Ending | None = None
    earlier: int = 0
    early: bool = False
    retrieval: Retrieved | None = None
    overload: tuple[str, ...] = ()
    operation: str = ""
    traceparent: str = ""
    tracestate: str = ""


def find_life(reader: JournalReader, name: str) -> Life | None:
    """The latest request that is known by this name, ``None`` where the journal has none.

    A request is known by its id, by the id of its answer's body, which is the same behind a prefix,
    and by the id that its client gave it.
    """
    prefix = next((prefix for prefix in ANSWER_PREFIXES if name.startswith(prefix)), "")
    names = {name, name.removeprefix(prefix)} - {""}  # what clients gave no id to has none
    found = [
        entry
        for entry in reader.entries(containing=name.removeprefix(prefix))
        if isinstance(entry.record, RequestArrived | RequestRefused)
        and names & {entry.record.id, entry.record.client_id}
    ]
    if not found:
        return None
    latest = found[-1]
    assert isinstance(latest.record, RequestArrived | RequestRefused)
    request_id = latest.record.id
    since_ns = latest.wall_ns - SEARCH_BACK_NS
    life = life_of(reader.entries(since_ns, containing=request_id), request_id)
    if life is not None:
        life.earlier = len(found) - 1
    return life


def life_of(entries: Iterable[Entry], request_id: str) -> Life | None:
    """The latest request with this id among entries that are in order of time."""
    life: Life | None = None
    routed: RequestRouted | None = None
    arrived_ns = 0
    for entry in entries:
        record = entry.record
        if isinstance(record, RequestArrived):
            if record.id == request_id:
                arrived_ns = record.arrived_ns
                life = _begin(entry, record, 0 if life is None else life.earlier + 1)
                if routed is not None:
                    life.decisions.append(_routing(routed, arrived_ns))
        elif isinstance(record, RequestRouted):
            if record.id == request_id:
                routed = record
        elif isinstance(record, RequestRefused):
            if record.id == request_id:
                life = _refused(entry, record, 0 if life is None else life.earlier + 1)
        elif life is not None:
            _add(life, entry, arrived_ns)
    return life


def nearest_ids(reader: JournalReader, request_id: str) -> tuple[list[str], list[str]]:
    """Ids in the journal that look like this one, and the latest ones, newest first."""
    latest: deque[str] = deque(maxlen=RECENT_IDS)
    for entry in reader.entries(containing=RequestArrived.__name__):
        if isinstance(entry.record, RequestArrived):
            latest.append(entry.record.client_id or entry.record.id)
    near = [name for name in latest if request_id and name.startswith(request_id)]
    near += difflib.get_close_matches(request_id, latest, n=NEAREST_IDS, cutoff=0.7)
    return list(dict.fromkeys(near))[:NEAREST_IDS], list(latest)[-NEAREST_IDS:][::-1]


def _begin(entry: Entry, arrived: RequestArrived, earlier: int) -> Life:
    read_ns = arrived.t_ns - arrived.arrived_ns
    return Life(
        id=arrived.id,
        client_id=arrived.client_id,
        model=arrived.model,
        arrived_wall_ns=entry.wall_ns - read_ns,
        prompt_tokens=arrived.prompt_tokens,
        output_tokens_max=arrived.output_tokens_max,
        choices=arrived.choices,
        tier=arrived.tier,
        tenant=arrived.tenant,
        slo_class=arrived.slo_class,
        read_ns=read_ns,
        earlier=earlier,
        overload=arrived.overload,
        operation=arrived.operation,
        traceparent=arrived.traceparent,
        tracestate=arrived.tracestate,
    )


def _refused(entry: Entry, refused: RequestRefused, earlier: int) -> Life:
    return Life(
        id=refused.id,
        client_id=refused.client_id,
        model=refused.model,
        arrived_wall_ns=entry.wall_ns,
        prompt_tokens=0,
        output_tokens_max=0,
        choices=1,
        tier=0,
        tenant="",
        slo_class="",
        read_ns=0,
        decisions=[Decision(0, status=refused.status, reason=refused.reason)],
        earlier=earlier,
        early=True,
    )


def _add(life: Life, entry: Entry, arrived_ns: int) -> None:
    """Add what one record tells about the request."""
    record = entry.record
    at_ns = record.t_ns - arrived_ns
    match record:
        case RequestDispatched(id=life.id):
            made = Decision(
                at_ns,
                record.replica,
                record.attempt,
                record.scores,
                predicted_wait_ns=record.predicted_wait_ns,
                waited_ns=record.waited_ns,
                remote=record.remote,
            )
            life.decisions.append(made)
        case AttemptFailed(id=life.id):
            made = Decision(at_ns, record.replica, record.attempt, error=record.error)
            life.decisions.append(made)
        case RequestDegraded(id=life.id):
            made = Decision(
                at_ns,
                rung=record.rung,
                output_tokens_max=record.output_tokens_max,
                model=record.model,
                measured=record.measured or 0.0,
                threshold=record.threshold or 0.0,
            )
            life.decisions.append(made)
        case RequestRejected(id=life.id):
            made = Decision(
                at_ns,
                status=record.status,
                reason=record.reason,
                measured=record.measured,
                threshold=record.threshold,
                retry_after_s=record.retry_after_s,
                unit=REASONS.get(record.reason, ""),
            )
            life.decisions.append(made)
        case Retrieved(id=life.id):
            life.retrieval = record
        case FirstToken(id=life.id):
            life.ttft_ns = record.ttft_ns
        case RequestEnded(id=life.id):
            life.phases = _phases(record)
            life.ending = _ending(record, at_ns)
        case Step():
            share = _share(record, life.id, at_ns)
            if share is not None:
                life.steps.append(share)
        case _:
            pass


def _routing(routed: RequestRouted, arrived_ns: int) -> Decision:
    return Decision(
        routed.t_ns - arrived_ns,
        reason=routed.why,
        threshold=routed.threshold or 0.0,
        model=routed.model,
        route=routed.route,
        score=routed.score,
    )


def _share(step: Step, request_id: str, at_ns: int) -> StepShare | None:
    own_rows = sum(name == request_id for name, _ in step.decode)
    own_chunks = [chunk for chunk in step.prefill if chunk.id == request_id]
    if not own_rows and not own_chunks:
        return None
    own_tokens = sum(chunk.tokens for chunk in own_chunks)
    return StepShare(
        replica=step.replica,
        step=step.step,
        at_ns=at_ns,
        measured_ns=step.measured_ns,
        predicted_ns=step.predicted_ns,
        prefill_tokens=own_tokens,
        past_tokens=min((chunk.past_tokens for chunk in own_chunks), default=0),
        decode_rows=own_rows,
        beside_decode_rows=len(step.decode) - own_rows,
        beside_prefill_tokens=sum(chunk.tokens for chunk in step.prefill) - own_tokens,
        blocks_free=step.blocks_free,
        error=step.error,
    )


def _phases(ended: RequestEnded) -> list[PhaseSpan]:
    spans, start_ns = [], 0
    for phase in Phase:
        duration_ns = getattr(ended, f"{phase}_ns")
        if duration_ns:
            spans.append(PhaseSpan(phase, start_ns, duration_ns))
            start_ns += duration_ns
    return spans


def _ending(ended: RequestEnded, at_ns: int) -> Ending:
    return Ending(
        at_ns=at_ns,
        reason=ended.reason,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        completion_tokens=ended.completion_tokens,
        attempts=ended.attempts,
        preemptions=ended.preemptions,
        tpot_ns=ended.tpot_ns,
        error=ended.error,
        outcome=ended.outcome,
    )
