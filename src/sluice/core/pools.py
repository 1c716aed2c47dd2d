"""What the fleet keeps about its models: accepted requests, replicas, and the pool of each model.

Owned and changed by ``core/fleet.py`` alone; the views are for everyone. The counts of a replica
(places, waiting prefill, reserved blocks) move together, in ``board`` and ``leave``, so that they
cannot drift apart.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from sluice.core.admission import NS_PER_S, ServiceTimes, Work, drain_ns, tokens_max
from sluice.core.events import ReplicaLimits, ReplicaScore, Report
from sluice.core.lifecycle import REPLICA_MOVES, ReplicaState, moved
from sluice.core.request import Request
from sluice.core.routing import Candidate, PrefixMemory, block_chain, blocks_needed, rank

# Dispatches that a replica with an old report may get while others report: enough to find out that
# it is alive, too few to pile up on one that is not.
STALE_DISPATCHES_MAX = 4
# A predicted drain time serves for so long while nothing changes: in a flood of refusals it would
# otherwise be computed from the whole queue for each of them.
DRAIN_KNOWN_NS = NS_PER_S // 20
# Time from start to ready that is told to clients before one was seen.
LOAD_NS_UNKNOWN = 10 * NS_PER_S


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """One model and its replicas, as configured.

    ``queue_places_max`` places may wait per ready replica beyond what it runs; none waits longer
    than ``queue_wait_ns_max``.
    """

    model: str
    replica_ids: tuple[str, ...]
    queue_places_max: int = 64
    queue_wait_ns_max: int = 60 * NS_PER_S


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When a lost replica is started again.

    The wait doubles from ``backoff_ns_min`` to ``backoff_ns_max`` with each loss. Losses older than
    ``window_ns`` are forgotten; from ``losses_max`` within it on, the replica counts as being in a
    crash loop and is started every ``crash_loop_ns``. A report older than ``report_ns_max`` is old.
    """

    backoff_ns_min: int = NS_PER_S // 2
    backoff_ns_max: int = 30 * NS_PER_S
    losses_max: int = 5
    window_ns: int = 300 * NS_PER_S
    crash_loop_ns: int = 60 * NS_PER_S
    report_ns_max: int = 5 * NS_PER_S


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as metrics and operators see it. ``start_ns`` is its next planned start."""

    id: str
    model: str
    state: ReplicaState
    error: str
    requests: int
    places: int
    losses: int
    start_ns: int | None
    report: Report | None
    report_age_ns: int | None


@dataclass(frozen=True, slots=True)
class PoolView:
    """One model as metrics and operators see it. ``limits`` is ``None`` before one was ready."""

    model: str
    waiting: int
    waiting_places: int
    places: int
    places_max: int
    limits: ReplicaLimits | None
    replicas: tuple[ReplicaView, ...]


@dataclass(slots=True, eq=False)
class Accepted:
    """A request that was not refused and has not ended.

    It waits in its pool's queue or is on board of ``replica``. ``due_ns`` ends its wait.
    ``attempts`` counts dispatches and ``losses`` the replicas lost under it. ``wait`` is the number
    of its present wait, ``None`` while it is on board. ``chain`` stands for its prompt's blocks,
    ``None`` where there is no choice of replica.
    """

    request: Request
    model: str
    order: tuple[int, int]
    due_ns: int = 0
    replica: "Replica | None" = None
    dispatched_ns: int = 0
    attempts: int = 0
    losses: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    wait: int | None = None
    chain: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: its state, and what was dispatched to it."""

    id: str
    model: str
    state: ReplicaState = ReplicaState.STOPPED
    limits: ReplicaLimits | None = None
    error: str = ""
    losses_ns: list[int] = field(default_factory=list)
    start_ns: int | None = None
    started_ns: int = 0
    on_board: dict[str, Accepted] = field(default_factory=dict)
    places: int = 0
    prefill_tokens: int = 0
    blocks_reserved: int = 0
    blocks_reserved_then: int = 0
    report: Report | None = None
    reported_ns: int = 0
    dispatched_since_report: int = 0
    prefixes: PrefixMemory | None = None

    def move(self, target: ReplicaState) -> None:
        """Change its state. Raises ``InternalError`` where the table does not allow it."""
        self.state = moved(REPLICA_MOVES, self.state, target)

    def start(self, now_ns: int) -> None:
        """Its process is started."""
        self.move(ReplicaState.STARTING)
        self.start_ns = None
        self.started_ns = now_ns

    def serve(self, limits: ReplicaLimits, now_ns: int) -> None:
        """It is ready, and knows nothing of earlier incarnations."""
        self.move(ReplicaState.READY)
        self.limits = limits
        self.error = ""
        self.report = None
        self.reported_ns = now_ns
        self.dispatched_since_report = 0
        self.prefixes = PrefixMemory(limits.blocks_total)

    def lose(self, error: str, restarts: RestartLimits | None, now_ns: int) -> None:
        """It is gone; its next start is planned, or none where ``restarts`` is ``None``."""
        recent = [at for at in self.losses_ns if restarts and now_ns - at <= restarts.window_ns]
        losses = len(recent) + 1
        if restarts is None:
            self.move(ReplicaState.STOPPED)
        elif losses >= restarts.losses_max:
            self.move(ReplicaState.CRASH_LOOP)
            self.start_ns = now_ns + restarts.crash_loop_ns
        else:
            self.move(ReplicaState.BACKOFF)
            doubled_ns = restarts.backoff_ns_min << (losses - 1)
            self.start_ns = now_ns + min(doubled_ns, restarts.backoff_ns_max)
        self.losses_ns = [*recent, now_ns]
        self.error = error
        self.report = None

    def is_due(self, now_ns: int) -> bool:
        """Whether it is to be started: never yet, or again."""
        if self.start_ns is None:
            return self.state is ReplicaState.STOPPED
        return self.start_ns <= now_ns

    def board(self, accepted: Accepted, output_tokens: int, now_ns: int) -> None:
        """Count a request that is dispatched here."""
        assert self.limits is not None
        request = accepted.request
        cached = self._cached_tokens(accepted)
        accepted.replica = self
        accepted.dispatched_ns = now_ns
        accepted.attempts += 1
        accepted.prefill_tokens = len(request.prompt) - cached
        accepted.blocks = blocks_needed(request, output_tokens, self.limits.block_size)
        self.on_board[request.id] = accepted
        self.places += request.choices
        self.prefill_tokens += accepted.prefill_tokens
        self.blocks_reserved += accepted.blocks
        self.dispatched_since_report += 1
        if accepted.chain is not None and self.prefixes is not None:
            self.prefixes.add(accepted.chain)

    def prefilled(self, accepted: Accepted) -> None:
        """Its prompt is computed: the first token came."""
        self.prefill_tokens -= accepted.prefill_tokens
        accepted.prefill_tokens = 0

    def leave(self, accepted: Accepted) -> None:
        """Return all that the request holds here."""
        del self.on_board[accepted.request.id]
        self.prefilled(accepted)
        self.places -= accepted.request.choices
        self.blocks_reserved -= accepted.blocks
        accepted.blocks = 0
        accepted.replica = None

    def reported(self, report: Report, now_ns: int) -> None:
        """Take its own view of its load."""
        self.report = report
        self.reported_ns = now_ns
        self.blocks_reserved_then = self.blocks_reserved
        self.dispatched_since_report = 0

    def _cached_tokens(self, accepted: Accepted) -> int:
        if accepted.chain is None or self.prefixes is None or self.limits is None:
            return 0
        return self.prefixes.cached_blocks(accepted.chain) * self.limits.block_size

    def view(self, now_ns: int) -> ReplicaView:
        """What others may know of it."""
        return ReplicaView(
            id=self.id,
            model=self.model,
            state=self.state,
            error=self.error,
            requests=len(self.on_board),
            places=self.places,
            losses=len(self.losses_ns),
            start_ns=self.start_ns,
            report=self.report,
            report_age_ns=None if self.report is None else now_ns - self.reported_ns,
        )

    def candidate(self, accepted: Accepted, report_ns_max: int, now_ns: int) -> Candidate:
        """How it stands for a request. Own counts rule; a fresh report corrects the KV estimate."""
        assert self.limits is not None
        age_ns = now_ns - self.reported_ns
        is_fresh = age_ns <= report_ns_max
        blocks_used = self.blocks_reserved
        if is_fresh and self.report is not None:
            seen = self.report.blocks_total - self.report.blocks_free
            blocks_used = max(0, blocks_used + seen - self.blocks_reserved_then)
        return Candidate(
            replica_id=self.id,
            limits=self.limits,
            places=self.places,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self._cached_tokens(accepted),
            blocks_used=blocks_used,
            held_back=not is_fresh and self.dispatched_since_report >= STALE_DISPATCHES_MAX,
        )


class Queue:
    """Requests that wait for a replica: strictest tier first, then in order of arrival."""

    def __init__(self) -> None:
        self.places = 0
        self._waiting: list[Accepted] = []
        self._due: list[tuple[int, int, Accepted]] = []
        self._waits = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Accepted]:
        return iter(self._waiting)

    @property
    def head(self) -> Accepted:
        """The request that goes next. Raises ``IndexError`` where none waits."""
        return self._waiting[0]

    def add(self, accepted: Accepted) -> None:
        """Let a request wait until its ``due_ns``."""
        self._waits += 1
        accepted.wait = self._waits
        insort(self._waiting, accepted, key=lambda waiting: waiting.order)
        self.places += accepted.request.choices
        heappush(self._due, (accepted.due_ns, self._waits, accepted))

    def remove(self, accepted: Accepted) -> None:
        """Take a request out of the wait."""
        accepted.wait = None
        self._waiting.remove(accepted)
        self.places -= accepted.request.choices
        # Times of waits that are over stay in the heap; they go when they are most of it.
        if len(self._due) > 2 * len(self._waiting) + 16:
            self._due = [due for due in self._due if due[2].wait == due[1]]
            heapify(self._due)

    def next_due_ns(self) -> int | None:
        """When the next wait runs out."""
        while self._due and self._due[0][2].wait != self._due[0][1]:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def overdue(self, now_ns: int) -> list[Accepted]:
        """The requests whose wait has run out, in queue order."""
        return [accepted for accepted in self._waiting if accepted.due_ns <= now_ns]


@dataclass(slots=True, eq=False)
class Pool:
    """All replicas of one model, and the requests that wait for one."""

    limits: PoolLimits
    replicas: tuple[Replica, ...]
    queue: Queue = field(default_factory=Queue)
    service: ServiceTimes = field(default_factory=ServiceTimes)
    load_ns: int = LOAD_NS_UNKNOWN
    _drain: tuple[int, int] | None = None  # when it was predicted, and what

    def ready(self) -> list[Replica]:
        """The replicas that serve."""
        return [replica for replica in self.replicas if replica.state is ReplicaState.READY]

    def may_serve_soon(self) -> bool:
        """Whether a replica serves or is about to."""
        hopeless = (ReplicaState.CRASH_LOOP, ReplicaState.STOPPED)
        return any(replica.state not in hopeless for replica in self.replicas)

    def places(self) -> int:
        """Places in use: running and waiting."""
        return self.queue.places + sum(replica.places for replica in self.replicas)

    def places_max(self) -> int:
        """The bound on places: what the ready replicas run, and what may wait for them."""
        waiting_max = self.limits.queue_places_max
        return sum(r.limits.sequences_max + waiting_max for r in self.ready() if r.limits)

    def widest(self) -> ReplicaLimits | None:
        """Limits of the replica that takes the longest request; ``None`` before one was ready."""
        known = [replica.limits for replica in self.replicas if replica.limits is not None]
        return max(known, key=tokens_max, default=None)

    def ready_in_ns(self, now_ns: int) -> int:
        """Predicted time until a replica is ready."""
        waits = [self.load_ns]
        for replica in self.replicas:
            if replica.start_ns is not None:
                waits.append(replica.start_ns + self.load_ns - now_ns)
            elif replica.state is ReplicaState.STARTING:
                waits.append(replica.started_ns + self.load_ns - now_ns)
        return max(NS_PER_S, min(waits[1:] or waits))

    def enqueue(self, accepted: Accepted, now_ns: int) -> None:
        """Let a request wait, until the bound on waits or its own deadline."""
        accepted.due_ns = now_ns + self.limits.queue_wait_ns_max
        if accepted.request.deadline_ns is not None:
            accepted.due_ns = min(accepted.due_ns, accepted.request.deadline_ns)
        self.queue.add(accepted)
        self.changed()

    def scores(
        self, accepted: Accepted, report_ns_max: int, now_ns: int
    ) -> tuple[ReplicaScore, ...]:
        """The replicas that can take the request at once, best first."""
        request, limits = accepted.request, self.widest()
        if accepted.chain is None and limits is not None and len(self.replicas) > 1:
            accepted.chain = block_chain(request.prompt, limits.block_size)
        candidates = [r.candidate(accepted, report_ns_max, now_ns) for r in self.ready()]
        return rank(request, self.output_tokens(request), candidates)

    def output_tokens(self, request: Request) -> int:
        """Predicted output of one choice."""
        return self.service.predict_output_tokens(request.output_tokens_max)

    def view(self, now_ns: int) -> PoolView:
        """What others may know of it."""
        return PoolView(
            model=self.limits.model,
            waiting=len(self.queue),
            waiting_places=self.queue.places,
            places=self.places(),
            places_max=self.places_max(),
            limits=self.widest(),
            replicas=tuple(replica.view(now_ns) for replica in self.replicas),
        )

    def changed(self) -> None:
        """The accepted requests or what is learned of them changed."""
        self._drain = None

    def drain_ns(self, now_ns: int) -> int:
        """Predicted time until all accepted requests are done."""
        if self._drain is None or now_ns - self._drain[0] > DRAIN_KNOWN_NS:
            self._drain = (now_ns, drain_ns(self._works(now_ns), self._slots()))
        return self._drain[1]

    def _works(self, now_ns: int) -> Iterator[Work]:
        for waiting in self.queue:
            yield self._work(waiting, 0)
        for replica in self.replicas:
            for running in replica.on_board.values():
                yield self._work(running, now_ns - running.dispatched_ns)

    def _work(self, accepted: Accepted, run_ns: int) -> Work:
        request = accepted.request
        predicted_ns = self.service.predict_ns(len(request.prompt), request.output_tokens_max)
        return Work(request.choices, predicted_ns, run_ns)

    def _slots(self) -> int:
        """Sequences that run at a time: a replica in which some wait is full at what it runs."""
        total = 0
        for replica in self.ready():
            report = replica.report
            if report is not None and report.waiting > 0 and report.running > 0:
                total += report.running
            elif replica.limits is not None:
                total += replica.limits.sequences_max
        return total
