"""The closed sets of events and effects of the two policy objects.

``Replica.handle`` and ``Fleet.handle`` take one event and the time and return effects; a driver
performs effects and turns their results into events. All are frozen values, matched exhaustively.
Adding one means every ``match`` over the union stops type-checking until it is handled.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sluice.core.limits import PoolLimits, RouteLimits, TenantLimits
from sluice.core.quota import QuotaLeft
from sluice.core.request import EndReason, PhaseTimes, Request, Rung, SequenceId, Usage
from sluice.core.step import Plan, Sampled

# ------------------------------------------------------------------------------- replica: events


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request was dispatched to this replica."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left, or the request's work is not wanted any more. Unknown ids are ignored.

    ``withdrawn`` says that it is refused after all, with others that it belongs to, so that it uses
    up nothing of what its tenant may use.
    """

    request_id: str
    withdrawn: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class StepDone:
    """The running plan was computed. ``sampled`` holds one entry per sampling row of the plan."""

    step: int
    sampled: tuple[Sampled, ...]
    duration_ns: int


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The running plan could not be computed; the KV cells it wrote are void.

    ``blamed`` names the sequences at fault when the executor knows them; the others are computed
    again. An empty tuple blames every sequence of the plan.
    """

    step: int
    blamed: tuple[SequenceId, ...]
    error: str


@dataclass(frozen=True, slots=True)
class Draining:
    """No further request will be submitted; what is here ends by ``deadline_ns`` or is ended."""

    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Woken:
    """A time asked for with ``WakeAt`` has come."""


ReplicaEvent = Submitted | Cancelled | StepDone | StepFailed | Draining | Woken

# ------------------------------------------------------------------------------ replica: effects


@dataclass(frozen=True, slots=True)
class RunStep:
    """Compute this plan. At most one is outstanding; ``StepDone`` or ``StepFailed`` answers it."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Emit:
    """Pass these tokens on to their clients: the sampled tokens of sequences still wanted."""

    sampled: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """One choice is complete. The request's own ending follows when its last choice is."""

    sequence: SequenceId
    reason: EndReason


@dataclass(frozen=True, slots=True)
class End:
    """The request is over and holds no block. Emitted exactly once for each submitted request."""

    request_id: str
    reason: EndReason
    usage: Usage
    phases: PhaseTimes
    preemptions: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Load of this replica, sent after steps and on change; counters are since its start.

    ``blocked`` of the ``waiting`` sequences were tried and do not fit beside the residents.
    ``step_ns`` is the running mean of its steps' durations, in which one stalled step counts
    little.
    ``seats`` is how many sequences like the present ones it can run at a time within their targets,
    ``None`` where it does not know. ``decode_tokens_per_s`` is what it would give with all of them
    taken, 0 where that is unknown. Without ``gauged`` the counts of a remote replica are the
    gateway's own, which say nothing of what waits inside.
    """

    waiting: int
    running: int
    blocks_free: int
    blocks_total: int
    blocks_cached: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefill_tokens_per_s: float
    step_ns: int
    blocked: int = 0
    seats: int | None = None
    gauged: bool = True
    decode_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send ``Woken`` (replica) or ``Tick`` (fleet) at this time; replaces an earlier wish."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left on this replica after ``Draining``."""


ReplicaEffect = RunStep | Emit | SequenceEnded | End | Report | WakeAt | Drained

# --------------------------------------------------------------------------------- fleet: events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A checked request for ``model`` arrived at the door."""

    model: str
    request: Request


@dataclass(frozen=True, slots=True)
class Progress:
    """The first or further tokens of a request reached its client's stream."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A replica ended a request.

    ``silent`` says that nothing came of the stream that a remote one was asked for.
    """

    request_id: str
    reason: EndReason
    usage: Usage
    phases: PhaseTimes
    silent: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What one replica can hold; a fact reported when it becomes ready.

    ``block_bytes`` is the memory of one block, 0 where blocks are only counted.
    """

    context_tokens_max: int
    block_size: int
    blocks_total: int
    sequences_max: int
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """A replica has loaded its model and serves."""

    replica_id: str
    limits: ReplicaLimits


@dataclass(frozen=True, slots=True)
class ReplicaReported:
    """A replica's own view of its load."""

    replica_id: str
    report: Report


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica's process ended or stopped answering.

    ``permanent`` says that another start would end in the same way, ``silent`` that it held work
    and stopped answering. ``keeps_board`` is set for a remote replica, of which only the health is
    known to be bad: it gets nothing more, and each of its requests tells its own end.
    """

    replica_id: str
    error: str
    permanent: bool = field(default=False, kw_only=True)
    silent: bool = field(default=False, kw_only=True)
    keeps_board: bool = field(default=False, kw_only=True)


class Outcome(StrEnum):
    """How an attempt on a remote replica went."""

    GOOD = "good"  # it answered
    FAULT = "fault"  # it did not answer as it should
    FULL = "full"  # it takes no more for the time being
    VOID = "void"  # nothing was learnt: the client left, or its request was wrong


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """A remote replica gave no whole answer to a request; it holds nothing of it any more.

    ``outcome`` is ``FAULT`` or ``FULL``. ``rest_ns`` is how long the replica asks to be left alone.
    """

    request_id: str
    outcome: Outcome
    error: str
    rest_ns: int | None = None


@dataclass(frozen=True, slots=True)
class QuotaTold:
    """The answer of a remote replica to a request tells of its vendor's limits."""

    replica_id: str
    request_id: str
    left: QuotaLeft


@dataclass(frozen=True, slots=True)
class ReplicaDraining:
    """The operator lets a replica finish what it has and gives it nothing more, or takes that back.

    It stays loaded, and a loss or a new start does not change the wish.
    """

    replica_id: str
    on: bool


@dataclass(frozen=True, slots=True)
class ReplicasPinned:
    """Somebody else says how many replicas of a model serve, within its bounds.

    ``None`` leaves it to the fleet again.
    """

    model: str
    number: int | None


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The operator changed what is allowed. Nothing that was accepted is ended by it.

    ``pools`` are all models that there are. Replicas that are new among theirs are started, those
    that are missing leave, see ``core/membership.py``. ``tenants`` replaces the earlier ones, and
    what their running requests hold counts on. ``routes`` are all names that stand for two models.
    """

    pools: tuple[PoolLimits, ...]
    tenants: tuple[TenantLimits, ...]
    routes: tuple[RouteLimits, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetDraining:
    """Admit nothing more; end what runs."""

    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A time asked for with ``WakeAt`` has come."""


FleetEvent = (
    Arrived | Cancelled | Progress | Ended | ReplicaReady | ReplicaReported | ReplicaLost
    | AttemptFailed | QuotaTold | ReplicaDraining | ReplicasPinned | Reconfigured | FleetDraining
    | Tick
)  # fmt: skip

# -------------------------------------------------------------------------------- fleet: effects


class ReplicaScore(NamedTuple):
    """How one replica was judged for one request; the lowest ``score`` among those that fit wins.

    ``uncached_tokens`` is the prefill that stands before the request's first token there, its own
    included. ``kv_fits`` is false where the KV pool is predicted to be short.
    """

    replica_id: str
    score: float
    uncached_tokens: int
    places: int
    kv_fits: bool


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Submit the request to this replica. ``attempt`` counts from 1.

    ``scores`` are the replicas that were compared, best first. ``predicted_wait_ns`` is what was
    predicted for its wait in the fleet when it began to wait, ``None`` where it started at once.
    """

    request_id: str
    replica_id: str
    attempt: int
    scores: tuple[ReplicaScore, ...] = ()
    predicted_wait_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the request, in the words a client can act on.

    ``reason`` is a short code, one of ``admission.REASONS``; ``measured`` and ``threshold`` are the
    numbers compared, in the unit that the table there names. ``status`` is 400, 429 or 503.
    ``retry_after_s`` is ``None`` where retrying cannot help. ``should_retry`` is false where it is
    too far away for a client to wait for it, though a later try may succeed.
    """

    request_id: str
    status: int
    reason: str
    measured: float
    threshold: float
    retry_after_s: float | None
    should_retry: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the replica to drop the request."""

    request_id: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request towards its client: its replica was lost and it is not dispatched again."""

    request_id: str
    reason: EndReason
    error: str


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Let this replica serve: start its process (again), or wake it where it is loaded and warm.

    ``ReplicaReady`` answers when it can be given requests. ``reason`` is why, for those who look
    back; so it is in the effects that follow.
    """

    replica_id: str
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class WarmReplica:
    """Keep this replica loaded and without requests: start its process where there is none.

    One that has a process may free what it can load again within seconds. ``ReplicaReady`` answers
    where it was started; it is woken by ``StartReplica``.
    """

    replica_id: str
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class DrainReplica:
    """A replica gets nothing more, what it has goes on; for those who must know beforehand.

    ``StopReplica`` or ``WarmReplica`` follows when it is empty, ``StartReplica`` where it is needed
    again after all, which ``ReplicaReady`` need not answer.
    """

    replica_id: str
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Scaled:
    """How many replicas of ``model`` are to serve changed from ``before`` to ``number``.

    ``reason`` is the term that decided, ``terms`` are what was compared, by name. ``short_of`` was
    needed of late and is more than the model may have; it is told when that begins and, as
    ``None``, when it is over, though the number may be what it was. Nothing is to be done: the
    effects on single replicas are told beside it.
    """

    model: str
    before: int
    number: int
    reason: str
    terms: tuple[tuple[str, float], ...] = ()
    short_of: int | None = None


@dataclass(frozen=True, slots=True)
class Shorten:
    """The request's output is limited to ``output_tokens_max``; comes before its ``Dispatch``."""

    request_id: str
    output_tokens_max: int


@dataclass(frozen=True, slots=True)
class Retarget:
    """Its own model does not answer the request: let it arrive again for another ``model``.

    The driver tokenises it for that model and adds ``rung`` to its ``degraded``. Its
    arrival time stays. ``measured`` and ``threshold`` are those that a ``Reject`` would have had.
    """

    request_id: str
    model: str
    measured: float
    threshold: float
    rung: Rung = Rung.SMALLER


@dataclass(frozen=True, slots=True)
class StopReplica:
    """End the process of this replica, which holds no request. Nothing more is heard of it, until
    ``StartReplica`` or ``WarmReplica`` begins anew, which may come while it still ends."""

    replica_id: str
    reason: str = field(default="", compare=False)


FleetEffect = (
    Dispatch | Reject | Abort | Fail | StartReplica | WarmReplica | DrainReplica | StopReplica
    | Scaled | Shorten | Retarget | WakeAt
)  # fmt: skip
