"""One replica as the fleet counts it: its life, and the accepted requests on board of it.

Changed by ``core/fleet.py`` and ``core/pools.py`` alone; the view is for everyone. The counts
(places, waiting prefill, reserved blocks) move together, in ``board`` and ``leave``, so that they
cannot drift apart. What the replica does with its requests is ``core/replica.py``'s business.
"""

from dataclasses import dataclass, field

from sluice.core.admission import NS_PER_S, never_runs
from sluice.core.events import ReplicaLimits, Report
from sluice.core.lifecycle import REPLICA_MOVES, ReplicaState, moved
from sluice.core.request import Request
from sluice.core.routing import Candidate, PrefixMemory, blocks_needed

# A report older than this is old.
REPORT_NS_MAX = 5 * NS_PER_S
# Dispatches that a replica with an old report may get while others report: enough to find out that
# it is alive, too few to pile up on one that is not.
STALE_DISPATCHES_MAX = 4


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When a lost replica is started again.

    The wait doubles from ``backoff_ns_min`` to ``backoff_ns_max`` with each loss. Losses older than
    ``window_ns`` are forgotten; from ``losses_max`` within it on, the replica counts as being in a
    crash loop and is started every ``crash_loop_ns``.
    """

    backoff_ns_min: int = NS_PER_S // 2
    backoff_ns_max: int = 30 * NS_PER_S
    losses_max: int = 5
    window_ns: int = 300 * NS_PER_S
    crash_loop_ns: int = 60 * NS_PER_S


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
    replica: "FleetReplica | None" = None
    dispatched_ns: int = 0
    attempts: int = 0
    losses: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    wait: int | None = None
    chain: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class FleetReplica:
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

    def fail(self, error: str) -> None:
        """It is gone for good: another start would end in the same way."""
        self.move(ReplicaState.FAILED)
        self.error = error
        self.report = None

    def stay_down(self) -> None:
        """It is not started again."""
        if self.state in (ReplicaState.BACKOFF, ReplicaState.CRASH_LOOP):
            self.move(ReplicaState.STOPPED)
            self.start_ns = None

    def is_due(self, now_ns: int) -> bool:
        """Whether it is to be started: never yet, or again."""
        if self.start_ns is None:
            return self.state is ReplicaState.STOPPED
        return self.start_ns <= now_ns

    def takes(self, request: Request) -> bool:
        """Whether it serves, has the places that the request takes, and can ever run it."""
        limits = self.limits
        return (
            self.state is ReplicaState.READY
            and limits is not None
            and self.places + request.choices <= limits.sequences_max
            and never_runs(request, limits) is None
        )

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

    def candidate(self, accepted: Accepted, now_ns: int) -> Candidate:
        """How it stands for a request. Own counts rule; a fresh report corrects the KV estimate."""
        assert self.limits is not None
        is_fresh = now_ns - self.reported_ns <= REPORT_NS_MAX
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
