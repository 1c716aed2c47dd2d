"""One replica as the fleet counts it: its life, and the accepted requests on board of it.

Changed by ``core/fleet.py`` and ``core/pools.py`` alone; the view is for everyone. The counts
(places, waiting prefill, reserved blocks) move together, in ``board`` and ``leave``, so that they
cannot drift apart. What the replica does with its requests is ``core/replica.py``'s business; what
is predicted of it here is arithmetic over its reports.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.core.accepted import Accepted, Rank
from sluice.core.admission import NS_PER_S, tokens_max
from sluice.core.breaker import BreakerState
from sluice.core.events import Outcome, ReplicaLimits, Report
from sluice.core.feasibility import Pace, Release, Track
from sluice.core.gate import Opening, OpenNow, OpensAt, RemoteGate
from sluice.core.lifecycle import REPLICA_MOVES, ReplicaState, moved
from sluice.core.limits import RemoteLimits
from sluice.core.quota import QuotaLeft
from sluice.core.request import Request
from sluice.core.routing import NO_DOUBT, Doubt, PrefixMemory
from sluice.core.service import ServiceTimes

RankOf = Callable[[Accepted], Rank]

# A report older than this is old.
REPORT_NS_MAX = 5 * NS_PER_S
# Dispatches that a replica with an old report may get while others report: enough to find out that
# it is alive, too few to pile up on one that is not.
STALE_DISPATCHES_MAX = 4
# A replica that ran all it was given for so long is given one more than it is known to run.
PROBE_NS = NS_PER_S
# A stream whose first token takes so many times what is usual hangs.
HUNG = 10
# Predicted endings hold for so long while nobody boards or leaves.
RELEASES_KNOWN_NS = NS_PER_S // 10
# Blocks of prompts that are remembered of a remote replica, of whose pool the size is not known:
# four million tokens of text.
REMOTE_PREFIXES_MAX = 16_384
# Spreads the numbers of requests evenly over the quantiles of their lengths (golden ratio).
SPREAD = 2_654_435_769


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When a lost replica is started again.

    At once after the first loss of one that was loaded: most of those lost their machine. Else the
    wait doubles from ``backoff_ns_min`` to ``backoff_ns_max`` with each loss. Losses older than
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
    """One replica as metrics and operators see it. ``start_ns`` is its next planned start.

    ``draining`` says that it gets no more requests. ``seats`` is what it is given at a time,
    ``breaker`` is set for a remote one that served.
    """

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
    draining: bool = False
    seats: int = 0
    breaker: BreakerState | None = None

    @property
    def is_serving(self) -> bool:
        """Whether it is ready and may be given requests."""
        return self.state is ReplicaState.READY and not self.draining


@dataclass(slots=True)
class _Alike:
    """The requests of one tier and tenant that wait for their first token on a replica.

    Their rank is that of ``like``.
    """

    like: Accepted
    tokens: int = 0
    count: int = 0


@dataclass(slots=True)
class Tally:
    """What the replicas of a pool hold together, and how often one of them changed what it does."""

    places: int = 0
    blocks: int = 0
    moves: int = 0


@dataclass(slots=True, eq=False)
class FleetReplica:
    """One replica: its state, and what was dispatched to it.

    Only scaling starts one that is ``scaled``: as it was asked for at ``asked_ns``, ``warming``
    where it is to be warm when it is ready, ``woken`` where it was. One that drains leaves by
    ``leave_by_ns``. A ``remote`` one has a ``gate`` once it served. ``opens_ns`` is when that lets
    the request pass that was refused last, ``None`` where it passed or waits for another to end.
    ``tally`` is that of its pool.
    """

    id: str
    model: str
    weight: float = 1.0
    state: ReplicaState = ReplicaState.STOPPED
    limits: ReplicaLimits | None = None
    error: str = ""
    losses_ns: list[int] = field(default_factory=list)
    start_ns: int | None = None
    started_ns: int = 0
    on_board: dict[str, Accepted] = field(default_factory=dict)
    tokens_max: int = 0
    places: int = 0
    seats: int = 0
    seats_ns: int = 0
    prefill_tokens: int = 0
    prefilling: dict[str, Accepted] = field(default_factory=dict)
    unbegun: dict[tuple[int, str], _Alike] = field(default_factory=dict)
    prefill_since_ns: int = 0
    blocks_reserved: int = 0
    blocks_unreserved: int = 0
    report: Report | None = None
    reported_ns: int = 0
    dispatched_since_report: int = 0
    prefixes: PrefixMemory = field(default_factory=lambda: PrefixMemory(0))
    releases: list[Release] | None = None
    releases_ns: int = 0
    draining: bool = False
    leaving: bool = False
    scaled: bool = False
    warming: bool = False
    woken: bool = False
    asked_ns: int = 0
    leave_by_ns: int | None = None
    remote: RemoteLimits | None = None
    gate: RemoteGate | None = None
    opens_ns: int | None = None
    tally: Tally = field(default_factory=Tally)

    def move(self, target: ReplicaState) -> None:
        """Change its state. Raises ``InternalError`` where the table does not allow it."""
        self.state = moved(REPLICA_MOVES, self.state, target)
        self.tally.moves += 1

    def let_drain(self, *, on: bool) -> None:
        """Whether it is to get no more requests, whatever its state is."""
        self.draining = on
        self.tally.moves += 1

    def warm_up(self, now_ns: int) -> None:
        """Its process is started, to be warm when it is ready."""
        self.warming, self.asked_ns = True, now_ns
        self.start(now_ns)

    def serve_when_ready(self) -> None:
        """One that loads to be warm is to serve instead."""
        self.warming = False
        self.tally.moves += 1

    def start(self, now_ns: int) -> None:
        """Its process is started."""
        self.move(ReplicaState.STARTING)
        self.start_ns = None
        self.started_ns = now_ns

    def keep_warm(self, limits: ReplicaLimits) -> None:
        """It is loaded, and gets nothing until it is started again."""
        self.move(ReplicaState.WARM)
        self.limits, self.tokens_max = limits, tokens_max(limits)
        self.warming, self.error, self.leave_by_ns = False, "", None

    def rest(self) -> None:
        """Its process is not wanted any more."""
        self.move(ReplicaState.STOPPED)
        self.warming, self.start_ns, self.report, self.leave_by_ns = False, None, None, None

    def serve(self, limits: ReplicaLimits, now_ns: int) -> None:
        """It is ready, and knows nothing of earlier incarnations."""
        self.move(ReplicaState.READY)
        self.limits = limits
        self.tokens_max = tokens_max(limits)
        self.seats = limits.sequences_max
        if self.remote is not None:
            if self.gate is None:
                self.gate = RemoteGate(limits.sequences_max, self.remote.breaker)
            self.gate.serve(limits.sequences_max)
            self.seats = self.gate.seats(self.places, now_ns)
        self.error = ""
        self.report = None
        self.reported_ns = now_ns
        self.dispatched_since_report = 0
        known_max = limits.blocks_total if self.remote is None else REMOTE_PREFIXES_MAX
        self.prefixes = PrefixMemory(min(limits.blocks_total, known_max))

    def lose(self, error: str, restarts: RestartLimits | None, now_ns: int) -> None:
        """It is gone; its next start is planned, or none where ``restarts`` is ``None``.

        Scaling decides at once what takes the place of one that may start without a wait.
        """
        loaded = self.state is not ReplicaState.STARTING
        if loaded:
            self.asked_ns = now_ns
        self.warming, self.woken, self.leave_by_ns = False, False, None
        recent = [at for at in self.losses_ns if restarts and now_ns - at <= restarts.window_ns]
        losses, at_once = len(recent) + 1, loaded and not recent
        if restarts is None or (self.scaled and at_once):
            self.move(ReplicaState.STOPPED)
        elif losses >= restarts.losses_max:
            self.move(ReplicaState.CRASH_LOOP)
            self.start_ns = now_ns + restarts.crash_loop_ns
        else:
            self.move(ReplicaState.BACKOFF)
            doubled_ns = 0 if at_once else restarts.backoff_ns_min << (losses - 1)
            self.start_ns = now_ns + min(doubled_ns, restarts.backoff_ns_max)
        self.losses_ns = [*recent, now_ns]
        self.error, self.report = error, None

    def part(self, error: str, now_ns: int) -> None:
        """It does not answer any more: it is asked again at once, and keeps what is on board."""
        self.move(ReplicaState.BACKOFF)
        self.start_ns = now_ns
        self.losses_ns = [*self.losses_ns[-1:], now_ns]
        self.error, self.report = error, None

    def fail(self, error: str) -> None:
        """It is gone for good: another start would end in the same way."""
        self.move(ReplicaState.FAILED)
        self.error, self.report = error, None

    def stay_down(self) -> None:
        """It is not started again."""
        self.scaled = False
        if self.state in (ReplicaState.BACKOFF, ReplicaState.CRASH_LOOP):
            self.move(ReplicaState.STOPPED)
            self.start_ns = None

    def is_due(self, now_ns: int) -> bool:
        """Whether it is to be started: never yet, or again."""
        if self.start_ns is None:
            return self.state is ReplicaState.STOPPED and not self.scaled
        return self.start_ns <= now_ns

    @property
    def is_serving(self) -> bool:
        """Whether it is ready and may be given requests."""
        return self.state is ReplicaState.READY and not self.draining

    @property
    def can_start(self) -> bool:
        """Whether scaling may start it, which does not run."""
        return self.scaled and self.state is ReplicaState.STOPPED

    def board(self, accepted: Accepted, now_ns: int) -> None:
        """Count a request that is dispatched here."""
        request = accepted.request
        cached = self.cached_tokens(accepted.chain)
        accepted.replica_id = self.id
        accepted.dispatched_ns = now_ns
        accepted.attempts += 1
        accepted.prefill_tokens = request.prompt_tokens - cached
        accepted.blocks = accepted.work.blocks
        if not self.prefill_tokens:
            self.prefill_since_ns = now_ns
        self.on_board[request.id] = accepted
        self.places += request.choices
        self.prefill_tokens += accepted.prefill_tokens
        self.prefilling[request.id] = accepted
        kind = (accepted.order.tier, request.tenant)
        alike = self.unbegun.get(kind)
        if alike is None:
            alike = self.unbegun[kind] = _Alike(accepted)
        alike.tokens += accepted.prefill_tokens
        alike.count += 1
        self.blocks_reserved += accepted.blocks
        self.tally.places += request.choices
        self.tally.blocks += accepted.blocks
        self.dispatched_since_report += 1
        self.releases = None
        self.prefixes.add(accepted.chain)
        if self.gate is not None:
            self.gate.began(request.id, request.tokens_asked, now_ns)

    def opening(self, now_ns: int) -> Opening:
        """Whether it takes anything, whatever its load is."""
        if self.gate is None:
            return OpenNow(self.seats)
        return self.gate.opening(1, self.places + 1, now_ns)

    def told(self, left: QuotaLeft, request_id: str, now_ns: int) -> None:
        """An answer said what its vendor still allows."""
        if self.gate is not None:
            self.gate.quota.told(left, request_id, now_ns)

    def first_token(self, accepted: Accepted, predicted_ns: int, now_ns: int) -> None:
        """The first token of a request came: the replica works."""
        if self.gate is not None:
            taken_ns = now_ns - accepted.dispatched_ns
            self.gate.window.first_token(predicted_ns, taken_ns, self.places, now_ns)
            self.settle(accepted, Outcome.GOOD, now_ns)

    def whole(self, accepted: Accepted, now_ns: int) -> None:
        """The answer of a request came, all at once."""
        if self.gate is not None:
            self.gate.window.whole(self.places, now_ns)
            self.settle(accepted, Outcome.GOOD, now_ns)

    def hung(self, accepted: Accepted, predicted_ns: int, now_ns: int) -> bool:
        """Whether a request on board hangs that has got nothing; that is a fault."""
        taken_ns = now_ns - accepted.dispatched_ns
        if self.gate is None or taken_ns < HUNG * self.gate.window.usual_ns(predicted_ns):
            return False
        self.settle(accepted, Outcome.FAULT, now_ns)
        return True

    def settle(
        self, accepted: Accepted, outcome: Outcome, now_ns: int, rest_ns: int | None = None
    ) -> None:
        """Note how an attempt of a request on board went."""
        if self.gate is not None:
            others = self.places - accepted.request.choices
            self.gate.ended(accepted.request.id, outcome, now_ns, places=others, rest_ns=rest_ns)

    def prefilled(self, accepted: Accepted, now_ns: int | None = None) -> None:
        """Its prompt is computed, as the first token came at ``now_ns``, or is not wanted."""
        if self.prefilling.pop(accepted.request.id, None) is None:
            return
        kind = (accepted.order.tier, accepted.request.tenant)
        alike = self.unbegun[kind]
        alike.tokens -= accepted.prefill_tokens
        alike.count -= 1
        if not alike.count:
            del self.unbegun[kind]
        self.prefill_tokens -= accepted.prefill_tokens
        accepted.prefill_tokens = 0
        if now_ns is not None:
            self.prefill_since_ns = now_ns

    def leave(self, accepted: Accepted) -> None:
        """Return all that the request holds here."""
        del self.on_board[accepted.request.id]
        self.prefilled(accepted)
        if self.gate is not None:
            self.gate.left(accepted.request.id)
        self.places -= accepted.request.choices
        self.blocks_reserved -= accepted.blocks
        self.tally.places -= accepted.request.choices
        self.tally.blocks -= accepted.blocks
        self.releases = None
        accepted.blocks = 0
        accepted.replica_id = None

    def reported(self, report: Report, now_ns: int) -> None:
        """Take its own view of its load, which says how many it can run."""
        self.report = report
        self.reported_ns = now_ns
        self.blocks_unreserved = report.blocks_total - report.blocks_free - self.blocks_reserved
        self.dispatched_since_report = 0
        if self.gate is not None:
            if report.gauged:
                self.gate.window.gauged(report.waiting, self.places, now_ns)
        elif report.seats is not None:
            self.seats = min(report.seats, report.running) if report.blocked else report.seats
        elif report.blocked > 0:
            self.seats, self.seats_ns = max(1, report.running), now_ns
        elif self.places >= self.seats and now_ns - self.seats_ns >= PROBE_NS:
            most = self.seats if self.limits is None else self.limits.sequences_max
            self.seats, self.seats_ns = min(most, self.seats + 1), now_ns

    def cached_tokens(self, chain: tuple[int, ...]) -> int:
        """Tokens of a prompt that are probably in its prefix cache."""
        if self.limits is None:
            return 0
        return self.prefixes.cached_blocks(chain) * self.limits.block_size

    def doubt(self, accepted: Accepted, now_ns: int) -> Doubt | None:
        """What speaks against it for a request; ``None`` where that would not start on it.

        It does not serve, can never run it, has no places for it, or it would wait inside.
        """
        limits, request, held = self.limits, accepted.request, self.places
        if limits is None or self.state is not ReplicaState.READY or self.draining:
            return None
        if self.gate is not None and not self._lets_pass(self.gate, request, now_ns):
            return None
        places = held + request.choices
        if places > limits.sequences_max or (held and places > self.seats):
            return None
        if request.prompt_tokens + request.output_tokens_max > self.tokens_max:
            return None
        report, since = self.report, self.dispatched_since_report
        is_stale = now_ns - self.reported_ns > REPORT_NS_MAX
        used = self.blocks_reserved  # see ``blocks_free``
        if report is not None and not is_stale:
            used = max(0, used + self.blocks_unreserved)
        kv_fits = accepted.work.blocks <= limits.blocks_total - used
        if held and report is not None and (report.blocked or (since and not kv_fits)):
            return None  # one waits inside, ready to start there when another one ends
        held_back = 2 if self.id in accepted.tried else is_stale and since >= STALE_DISPATCHES_MAX
        return Doubt(held_back, not kv_fits) if held_back or not kv_fits else NO_DOUBT

    def _lets_pass(self, gate: RemoteGate, request: Request, now_ns: int) -> bool:
        """Whether its gate is open for the request, and for how many."""
        opening = gate.opening(request.tokens_asked, self.places + request.choices, now_ns)
        self.opens_ns = opening.at_ns if isinstance(opening, OpensAt) else None
        if isinstance(opening, OpenNow):
            self.seats = opening.places
            return True
        self.seats = gate.seats(self.places, now_ns)
        return False

    def blocks_free(self, now_ns: int) -> int:
        """KV blocks that are not in use or promised. Own counts; a fresh report corrects them."""
        assert self.limits is not None
        used = self.blocks_reserved
        if self.report is not None and now_ns - self.reported_ns <= REPORT_NS_MAX:
            used = max(0, used + self.blocks_unreserved)
        return self.limits.blocks_total - used

    # -------------------------------------------------------------------------------- prediction

    def backlog_ns(self, rank: Rank, rank_of: RankOf, service: ServiceTimes, now_ns: int) -> int:
        """Time for which prompts of this and smaller ranks will be computed here."""
        if not self.prefilling:
            return 0
        tokens = sum([one.tokens for one in self.unbegun.values() if rank_of(one.like) <= rank])
        if not tokens:
            return 0
        passed_ns = max(0, now_ns - self.prefill_since_ns)
        return max(0, service.prefill_ns(tokens, self.report) - passed_ns)

    def track(self, rank_of: RankOf, service: ServiceTimes, now_ns: int) -> Track:
        """Its future as things stand."""
        behind, backlog = 0, []
        for rank in sorted({rank_of(one.like) for one in self.unbegun.values()}):
            until_ns = self.backlog_ns(rank, rank_of, service, now_ns)
            backlog.append((rank, until_ns - behind))
            behind = until_ns
        return Track(
            max(now_ns, self.opens_ns or now_ns),
            places=self.seats - self.places,
            blocks=self.blocks_free(now_ns),
            releases=self.predicted_releases(service, now_ns),
            backlog=backlog,
            pace=Pace(
                service.prefill_ns(1_000_000, self.report) / 1e6, service.token_ns(self.report)
            ),
        )

    def predicted_releases(self, service: ServiceTimes, now_ns: int) -> list[Release]:
        """When the requests on board are predicted to end, the next first.

        Each has a quantile of its own for the length of its answer, so that some are predicted to
        end soon and some late, as they do, though nothing tells them apart.
        """
        known, age_ns = self.releases, now_ns - self.releases_ns
        if known is not None and 0 <= age_ns <= RELEASES_KNOWN_NS:
            overdue = [release for release in known[:1] if release.at_ns <= now_ns]
            if not overdue:
                return known
        token_ns, prefill_ns = service.token_ns(self.report), 0
        releases = []
        for accepted in self.on_board.values():
            request = accepted.request
            produced = accepted.tokens // request.choices
            quantile = (accepted.number * SPREAD % 2**32) / 2**32
            left = service.output_tokens(request, produced, quantile)
            at_ns = now_ns + left * token_ns
            if accepted.prefill_tokens:
                prefill_ns += service.prefill_ns(accepted.prefill_tokens, self.report)
                at_ns += prefill_ns
            releases.append(Release(at_ns, request.choices, accepted.blocks))
        releases.sort()
        self.releases, self.releases_ns = releases, now_ns
        return releases

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
            draining=self.draining,
            seats=self.seats if self.gate is None else self.gate.seats(self.places, now_ns),
            breaker=None if self.gate is None else self.gate.breaker.state(now_ns),
        )
