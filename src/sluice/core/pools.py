"""The pool of a model: its replicas, the requests that wait for one, and what it can promise.

Owned and changed by ``core/fleet.py`` and, in its service, ``core/door.py``, which judges whether a
promise holds. The order of the waiting is ``core/queue.py``'s.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import fsum
from random import Random

from sluice.core.accepted import Accepted, Order, Rank, Work
from sluice.core.admission import NS_PER_S, Refusal
from sluice.core.events import Dispatch, Ended, Reject, ReplicaLimits, ReplicaScore
from sluice.core.fairness import FairShares
from sluice.core.feasibility import Outlook, Sweep
from sluice.core.fleet_replica import FleetReplica
from sluice.core.lifecycle import ReplicaState
from sluice.core.limits import PoolLimits
from sluice.core.lineup import Lineup, Lineups
from sluice.core.margins import Margin
from sluice.core.queue import Queue
from sluice.core.request import TIER_DEFAULT, TIER_MAX, TTFT_NS_DEFAULT, Request, Rung
from sluice.core.retries import RetryBudget
from sluice.core.returns import Returns
from sluice.core.routing import block_chain, blocks_needed, rank
from sluice.core.scaling import Scaler
from sluice.core.service import ServiceTimes

# Time from start to ready that is told to clients before one was seen.
LOAD_NS_UNKNOWN = 10 * NS_PER_S
# The waiting are looked at again after so long, unless something else happens before.
SWEEP_NS = NS_PER_S // 20
# Departures that are predicted one by one; those after them follow at their mean distance.
RELEASES_NEAR = 8
# No more clients are expected back than the pool serves until then, and these.
RETURNS_AT_ONCE = 2
# Departures against which the return of refused clients is held.
DEPARTURES_AHEAD = 16
# A tenant counts as active, and tier 0 as in use, for so long after their last request.
LATELY_NS = 10 * NS_PER_S
# One that asked within this time is expected to ask again: a place is left for it.
EXPECTED_NS = 600 * NS_PER_S


@dataclass(slots=True, eq=False)
class Pool:
    """All replicas of one model, and the requests that wait for one.

    ``wait_margin`` is about predictions made when a wait began, ``start_margin`` about those made
    at dispatch. ``smaller`` is the pool of the smaller model, ``fallback`` are those of the
    models that stand in. ``retries`` is the budget for further
    attempts on remote replicas, ``resting`` are the requests that wait for one, by the time of it,
    and are not in the queue. The pool is ``stuck`` while nothing has
    happened since the next of the waiting fitted nowhere.
    """

    limits: PoolLimits
    replicas: tuple[FleetReplica, ...]
    smaller: "Pool | None" = None
    fallback: "tuple[Pool, ...]" = ()
    queue: Queue = field(default_factory=Queue)
    service: ServiceTimes = field(default_factory=ServiceTimes)
    returns: Returns = field(default_factory=Returns)
    wait_margin: Margin = field(default_factory=Margin)
    start_margin: Margin = field(default_factory=Margin)
    load_ns: int = LOAD_NS_UNKNOWN
    stuck: bool = False
    scaler: Scaler | None = field(init=False)
    retries: RetryBudget | None = field(init=False)
    resting: list[tuple[int, int, Accepted]] = field(default_factory=list)
    _by_id: dict[str, FleetReplica] = field(init=False)
    _lineups: Lineups = field(init=False)
    _shares: FairShares = field(default_factory=FairShares)
    _leaving: deque[tuple[int, str]] = field(default_factory=deque)
    _latest: tuple[tuple[str, int], ...] = ()  # the two tenants that asked last, and when
    _strict_until_ns: int = 0
    _swept_ns: int = 0

    def __post_init__(self) -> None:
        self.set_replicas(self.replicas)
        remote, scale = self.limits.remote, self.limits.scale
        self.scaler = None if scale is None else Scaler(scale)
        self.load_ns = self.load_ns if scale is None else scale.start_ns
        self.retries = None if remote is None else RetryBudget(remote.retries)

    def set_replicas(self, replicas: tuple[FleetReplica, ...]) -> None:
        """Have these replicas; only ``core/membership.py`` changes which there are."""
        self.replicas, self._lineups = replicas, Lineups(replicas)
        self._by_id = {replica.id: replica for replica in replicas}

    # ------------------------------------------------------------------------------------- facts

    def replica(self, replica_id: str) -> FleetReplica:
        """The replica of this name."""
        return self._by_id[replica_id]

    def lineup(self) -> Lineup:
        """The replicas by what they do at present."""
        return self._lineups.now()

    def ready(self) -> list[FleetReplica]:
        """The replicas that serve."""
        return self._lineups.now().serving

    def may_serve_soon(self) -> bool:
        """Whether a replica serves or is about to; when one elsewhere comes back nobody knows."""
        if self.limits.remote is not None:
            return any(one.state is ReplicaState.READY or one.can_start for one in self.replicas)
        hopeless = (ReplicaState.CRASH_LOOP, ReplicaState.FAILED, ReplicaState.STOPPED)
        return any(one.state not in hopeless or one.can_start for one in self.replicas)

    def places(self) -> int:
        """Places in use: waiting, and running where more may run."""
        return self.queue.places + sum(r.places for r in self.replicas if not r.draining)

    def places_max(self) -> int:
        """The bound on places: what the ready replicas run, and what may wait for them."""
        waiting_max = self.limits.queue_places_max
        return sum(r.limits.sequences_max + waiting_max for r in self.ready() if r.limits)

    def seats(self) -> int:
        """Sequences that the ready replicas are known to run at a time."""
        return sum(replica.seats for replica in self.ready())

    def tokens_max(self) -> int | None:
        """The bound on prompt tokens that wait."""
        per_replica = self.limits.queue_tokens_max
        return None if per_replica is None else per_replica * len(self.ready())

    def widest(self) -> ReplicaLimits | None:
        """Limits of the replica that takes the longest request; ``None`` before one was ready."""
        return self._lineups.now().widest

    def cached(self, chain: tuple[int, ...]) -> dict[str, int]:
        """Tokens of a prompt that replicas probably have in their prefix caches, where any."""
        if not chain:
            return {}
        first = chain[0]
        known = [replica for replica in self.ready() if first in replica.prefixes.known]
        return {replica.id: replica.cached_tokens(chain) for replica in known} if known else {}

    def work(self, request: Request, cached: Mapping[str, int]) -> Work:
        """What the request is predicted to take."""
        limits = self.widest()
        block_size = 1 if limits is None else limits.block_size
        output_tokens = min(request.output_tokens_max, self.service.mean_output_tokens)
        return Work(
            places=request.choices,
            prefill_tokens=max(1, request.prompt_tokens - max(cached.values(), default=0)),
            output_tokens=output_tokens,
            blocks=blocks_needed(request, output_tokens, block_size),
        )

    def usual_work(self, like: Accepted) -> Work:
        """What a request of the usual size takes, in the tier of another one."""
        prefill_tokens, work = self.service.mean_prefill_tokens, like.work
        return work._replace(places=1, prefill_tokens=prefill_tokens or work.prefill_tokens)

    # ---------------------------------------------------------------------------------- arrivals

    def came(self, request: Request, now_ns: int) -> None:
        """A request asks for this model: its tier is in use, its tenant active."""
        if request.tier == 0:
            self._strict_until_ns = now_ns + LATELY_NS
        others = (latest for latest in self._latest if latest[0] != request.tenant)
        self._latest = ((request.tenant, now_ns), *others)[:2]
        self._let_leave(now_ns)
        if request.tenant not in self._shares:  # who has more than it is ahead when it is judged
            self._shares.enter(request.tenant, request.weight)
            self._leaving.append((now_ns + LATELY_NS, request.tenant))

    def accept(self, request: Request, number: int, now_ns: int) -> Accepted:
        """The request as it would be counted."""
        limits = self.widest()
        chain = request.prefixes
        if limits is not None and not chain:
            chain = block_chain(request.prompt, limits.block_size)
        cached = self.cached(chain)
        work = self.work(request, cached)
        due_ns = request.ttft_due_ns
        if due_ns is None:
            order_ns = request.arrived_ns + TTFT_NS_DEFAULT
        else:
            order_ns = due_ns + self.service.prefill_ns(work.prefill_tokens, None)
        return Accepted(
            request=request,
            model=self.limits.model,
            number=number,
            order=Order(request.tier, newcomer=True, due_ns=order_ns, number=number),
            work=work,
            chain=chain,
            cached=cached,
            accepted_ns=now_ns,
            ttft_due_ns=due_ns,
        )

    def enter(self, accepted: Accepted) -> None:
        """Count an accepted request as one of its tenant's."""
        self.service.asked(accepted.request)
        if self.retries is not None:
            self.retries.asked()
        self._shares.enter(accepted.request.tenant, accepted.request.weight)
        accepted.claim = accepted.work.prefill_tokens
        accepted.claim += accepted.work.places * accepted.work.output_tokens
        self._shares.claim(accepted.request.tenant, accepted.claim)

    def leave(self, accepted: Accepted, now_ns: int) -> None:
        """An accepted request is over: all it holds is free; its tenant counts as active yet."""
        accepted.over = True
        if accepted.replica_id is not None:
            self.replica(accepted.replica_id).leave(accepted)
        elif accepted.wait is not None:
            self.queue.remove(accepted)
        self._shares.claim(accepted.request.tenant, -accepted.claim)
        self._leaving.append((now_ns + LATELY_NS, accepted.request.tenant))
        self._let_leave(now_ns)

    def _let_leave(self, now_ns: int) -> None:
        while self._leaving and self._leaving[0][0] <= now_ns:
            self._shares.leave(self._leaving.popleft()[1])

    def enqueue(self, accepted: Accepted, now_ns: int) -> None:
        """Let a request wait, until the bound on waits, its class's bound or its own deadline."""
        bounds_ns = (
            now_ns + self.limits.queue_wait_ns_max,
            accepted.request.queue_due_ns,
            accepted.request.deadline_ns,
        )
        accepted.due_ns = min(bound_ns for bound_ns in bounds_ns if bound_ns is not None)
        if self.limits.scale is not None and not self.ready():  # held until one serves
            accepted.due_ns = max(accepted.due_ns, now_ns + self.limits.scale.hold_ns)
        self.queue.add(accepted)

    def yielding(self, waiting: Iterable[Accepted], accepted: Accepted) -> list[Accepted]:
        """Those of the waiting that leave their room to a newcomer: of its tier none that was
        promised one."""
        tier = accepted.order.tier
        return [other for other in waiting if other.order.newcomer or other.order.tier > tier]

    def no_room(
        self, accepted: Accepted, without: Sequence[Accepted], now_ns: int
    ) -> Refusal | None:
        """Why the queue ``without`` some of the waiting has no room; ``None`` if it has."""
        request, queue = accepted.request, self.queue
        places, places_max = self.places() + request.choices, self.places_max()
        places -= sum(other.request.choices for other in without)
        if places <= places_max and len(self.returns):
            places += self._promised_places(accepted, now_ns)
        if places > places_max:
            wait_ns = self.departure_ns(places - places_max, now_ns)
            return Refusal(429, "queue_full", places, places_max, wait_ns)
        if len(queue) == len(without):
            return None
        gone = sum(other.request.prompt_tokens for other in without)
        tokens, most = queue.tokens + request.prompt_tokens - gone, self.tokens_max()
        if most is not None and tokens > most:
            return Refusal(429, "queue_tokens", tokens, most, self.departure_ns(1, now_ns))
        gone = sum(other.request.body_bytes for other in without)
        held, most = queue.bytes + request.body_bytes - gone, self.limits.queue_bytes_max
        if most is not None and held > most:
            return Refusal(429, "queue_bytes", held, most, self.departure_ns(1, now_ns))
        return None

    def refusal_before(self, least: Request, now_ns: int) -> Refusal | None:
        """Why a request is refused whatever its prompt is: nothing is free to run or to wait in."""
        takes_over = self.smaller is not None and Rung.SMALLER in least.overload
        free = sum(max(0, replica.seats - replica.places) for replica in self.ready())
        if takes_over or free > self._kept_for_expected(least.tenant, now_ns):
            return None
        reason, places, places_max = "queue_full", self.places() + least.choices, self.places_max()
        if Rung.QUEUE not in least.overload:
            reason, places_max = "no_free_place", self.seats()
        if not least.likeness or places <= places_max:
            return None  # a client that comes back could not be recognised, or there is room
        if self.returns.is_due(least, now_ns):
            return None  # it was told to come now
        rank = (least.tier, self._shares.ahead(least.tenant))
        if reason == "queue_full" and any(self.rank(other) > rank for other in self.queue):
            return None  # someone may give way
        wait_ns = self.departure_ns(places - places_max, now_ns)
        return Refusal(429, reason, places, places_max, wait_ns)

    def ready_in_ns(self, now_ns: int) -> int:
        """Predicted time until a replica is ready."""
        waits = [self.load_ns]
        for replica in self.replicas:
            if replica.start_ns is not None:
                waits.append(replica.start_ns + self.load_ns - now_ns)
            elif replica.state is ReplicaState.STARTING:
                wakes = self.scaler is not None and replica.woken
                waits.append(replica.started_ns + (0 if wakes else self.load_ns) - now_ns)
            elif replica.state is ReplicaState.WARM or replica.can_start:
                waits.append(self.load_ns if replica.can_start else 0)
        return max(NS_PER_S, min(waits[1:] or waits))

    # --------------------------------------------------------------------------------- promises

    def in_order(self) -> Sequence[Accepted]:
        """The waiting as they go."""
        return self.queue.in_order(self._shares)

    def order_with(self, accepted: Accepted) -> list[Accepted]:
        """The waiting as they go, and a newcomer among them."""
        order = list(self.in_order())
        insort(order, accepted, key=self._service_order)
        return order

    def goes_first(self, accepted: Accepted, now_ns: int) -> bool:
        """Whether a newcomer goes ahead of all who wait."""
        first = self._head(now_ns, accepted.order.tier)
        return not first.aged and self._service_order(accepted) < self._service_order(first)

    def rank(self, accepted: Accepted) -> Rank:
        """The class that says who gives way: the larger one does."""
        return (accepted.order.tier, self._shares.ahead(accepted.request.tenant))

    def _service_order(self, accepted: Accepted) -> tuple[Rank, Order]:
        return (self.rank(accepted), accepted.order)

    def promised(self, accepted: Accepted, now_ns: int) -> float:
        """The factor on predicted waits that makes a promise; a client that came back had one."""
        if not accepted.order.newcomer:
            return 1.0
        quantile = accepted.request.quantile
        return self.wait_margin.factor(quantile, now_ns) / self.limits.utilisation

    def restricted(self, accepted: Accepted, now_ns: int) -> bool:
        """Whether the kept places are not for this request; those who were promised are not kept
        from them."""
        if accepted.aged or not accepted.order.newcomer:
            return False
        if accepted.order.tier > 0 and now_ns < self._strict_until_ns:
            return True
        return self._shares.ahead(accepted.request.tenant)

    def kept_places(self) -> int:
        """Places that restricted requests leave free; less than half of what there is."""
        seats = self.seats()
        return min((seats - 1) // 2, round(self.limits.headroom * seats))

    def kept_from(self, accepted: Accepted, most: int, now_ns: int) -> int:
        """Of at ``most`` so many places those that this request leaves free."""
        if accepted.aged or not accepted.order.newcomer:
            return 0
        expected = self._kept_for_expected(accepted.request.tenant, now_ns)
        return most if self.restricted(accepted, now_ns) else expected

    def _kept_for_expected(self, tenant: str, now_ns: int) -> int:
        """One place, of many, where another tenant asked not long ago but not lately.

        It would wait for somebody to end if all places were taken when it asks again.
        """
        expects = self.limits.remote is None and any(
            other != tenant and at_ns > now_ns - EXPECTED_NS and other not in self._shares
            for other, at_ns in self._latest
        )
        return int(expects and self.kept_places() > 1)

    def standing(self, accepted: Accepted, now_ns: int) -> tuple[ReplicaScore, ...]:
        """The replicas that can start the request at once, best first.

        It leaves free what is kept from it. A restricted one starts only where no prompt is being
        computed: the next prompt of the others has at most one of the restricted before it.
        """
        request = accepted.request
        restricted = self.restricted(accepted, now_ns)
        kept = self.kept_from(accepted, self.kept_places(), now_ns)
        free = sum(replica.seats - replica.places for replica in self.ready()) if kept else 0
        if kept and free < min(request.choices + kept, self.seats()):
            return ()
        # Asking one elsewhere also tells how many it may be given, so none is passed over.
        elsewhere = self.limits.remote is not None
        replicas = [
            replica
            for replica in self.replicas
            if (elsewhere or replica.places < replica.seats or not replica.places)
            and not (restricted and replica.prefilling)
        ]
        return rank(
            request.prompt_tokens,
            accepted.cached,
            replicas,
            lambda replica: replica.doubt(accepted, now_ns),
            asks_all=elsewhere,
        )

    def forecast(
        self,
        order: Sequence[Accepted],
        now_ns: int,
        *,
        newcomer: Accepted | None = None,
        expected: int = 0,
    ) -> list[Outlook]:
        """What becomes of the waiting, in this order, without margins.

        ``expected`` clients were told to come back soon and go ahead of ``newcomer``.
        """
        sweep = Sweep([r.track(self.rank, self.service, now_ns) for r in self.ready()])
        kept, most = 0, self.kept_places()
        outlooks = []
        for accepted in order:
            more = self.kept_from(accepted, most, now_ns) - kept if kept < most else 0
            sweep.keep(max(0, more))
            kept += max(0, more)
            if accepted is newcomer:
                for _ in range(expected):
                    sweep.place(self.usual_work(accepted), self.rank(accepted))
            outlooks.append(sweep.place(accepted.work, self.rank(accepted)))
        return outlooks

    # --------------------------------------------------------------------------------- decisions

    def next_up(self, now_ns: int) -> Accepted:
        """The waiting request that goes next, with what is cached of it now."""
        accepted = self._head(now_ns, TIER_MAX)
        accepted.cached = self.cached(accepted.chain)
        return accepted

    def _head(self, now_ns: int, newcomer_tier: int) -> Accepted:
        strictest = 0 if now_ns < self._strict_until_ns else newcomer_tier
        return self.queue.head(
            self._shares,
            now_ns,
            self.gap_ns,
            aging_ns=self.limits.aging_ns,
            strictest=strictest,
        )

    def start(self, accepted: Accepted, scores: tuple[ReplicaScore, ...], now_ns: int) -> Dispatch:
        """Give a request that does not wait to the best of these replicas."""
        replica = self.replica(scores[0].replica_id)
        replica.board(accepted, now_ns)
        if accepted.attempts == 1:
            self._shares.charge(accepted.request.tenant, accepted.prefill_tokens)
        waited = accepted.predicted_wait_ns
        return Dispatch(accepted.request.id, replica.id, accepted.attempts, scores, waited)

    def progress(self, accepted: Accepted, tokens: int, now_ns: int) -> None:
        """Tokens of a request on board reached its client."""
        assert accepted.replica_id is not None
        if not accepted.tokens:
            if accepted.start_first_ns is not None:
                actual_ns = now_ns - accepted.dispatched_ns
                self.start_margin.observe(accepted.start_first_ns, actual_ns, now_ns)
            if accepted.predicted_first_ns is not None and accepted.attempts == 1:
                actual_ns = now_ns - accepted.accepted_ns
                self.wait_margin.observe(accepted.predicted_first_ns, actual_ns, now_ns)
            replica = self.replica(accepted.replica_id)
            if replica.gate is not None:
                predicted_ns = self.service.prefill_ns(accepted.prefill_tokens, None)
                replica.first_token(accepted, predicted_ns, now_ns)
            replica.prefilled(accepted, now_ns)
            self.stuck = False
        accepted.tokens += tokens
        self._shares.charge(accepted.request.tenant, tokens)

    def completed(self, accepted: Accepted, ended: Ended, now_ns: int) -> None:
        """A request ran to its end; of one that was not streamed no token was told before."""
        untold = ended.usage.completion_tokens - accepted.tokens
        if untold > 0:
            self._shares.charge(accepted.request.tenant, untold)
        if accepted.replica_id is not None and not accepted.tokens:
            self.replica(accepted.replica_id).whole(accepted, now_ns)
        self.service.completed(ended, accepted.request)

    def sweep_is_due(self, now_ns: int) -> bool:
        """Whether the waiting are to be looked at again; then it is noted that they were."""
        if not self.queue.timed or 0 <= now_ns - self._swept_ns < SWEEP_NS or not self.ready():
            return False
        self._swept_ns = now_ns
        return True

    def next_open_ns(self, now_ns: int) -> int | None:
        """When a remote replica may be given what waits, or a request is to be tried again."""
        if self.limits.remote is None:
            return None
        times = [at_ns for at_ns, _, _ in self.resting[:1]]
        if self.queue:
            opens = (replica.opens_ns for replica in self.replicas)
            times += [at_ns for at_ns in opens if at_ns is not None and at_ns > now_ns]
        return min(times, default=None)

    def next_sweep_ns(self) -> int | None:
        """When the waiting are to be looked at again."""
        return self._swept_ns + SWEEP_NS if self.queue.timed and self.ready() else None

    def wake_times_ns(self, now_ns: int) -> tuple[int | None, ...]:
        """When something about those that wait is to be looked at again."""
        scaler = self.scaler
        scaled = () if scaler is None else (scaler.due_ns, scaler.leave_ns)
        if not self.queue.places and not self.resting:
            return scaled
        waiting = (self.queue.next_due_ns(), self.next_sweep_ns(), self.next_open_ns(now_ns))
        return (*scaled, *waiting)

    # ------------------------------------------------------------------------- when to come back

    def refuse(self, request: Request, refusal: Refusal, now_ns: int, chance: Random) -> Reject:
        """The refusal as it is told; one for want of room or time books a place in the future.

        Told times leave as much of the pool to newcomers as promises do.
        """
        if self.scaler is not None:
            self.scaler.refused()
        spacing_ns = round(self.gap_ns() * request.choices / self.limits.utilisation)
        return self.returns.told(request, refusal, now_ns, chance, spacing_ns=spacing_ns)

    def expected(self, accepted: Accepted, now_ns: int) -> int:
        """Clients that are expected back before this request must have started."""
        due_ns, deadline_ns = accepted.ttft_due_ns, accepted.request.deadline_ns
        until_ns = due_ns if due_ns is not None else deadline_ns
        return 0 if until_ns is None else self._due_back(accepted, until_ns, now_ns)

    def _due_back(self, accepted: Accepted, until_ns: int, now_ns: int) -> int:
        """Clients told to come by then, whose places are not for newcomers."""
        if not accepted.order.newcomer or not len(self.returns):
            return 0
        served_by_then = RETURNS_AT_ONCE + max(0, until_ns - now_ns) // self.gap_ns()
        return min(served_by_then, self.returns.expected(accepted.order.tier, until_ns, now_ns))

    def _promised_places(self, accepted: Accepted, now_ns: int) -> int:
        """Free places that are needed for clients who come back before others become free."""
        departures_ns = self._departures_ns(min(self.seats(), DEPARTURES_AHEAD), now_ns)
        return max(
            self._due_back(accepted, now_ns + departure_ns - 1, now_ns) - free_by_then
            for free_by_then, departure_ns in enumerate(departures_ns)
        )

    def gap_ns(self) -> int:
        """Predicted time between two departures while all places are in use."""
        ready = self.ready()
        if not ready:
            return NS_PER_S
        reports = [replica.report for replica in ready]
        service, tokens = self.service, self.service.mean_prefill_tokens
        rate = fsum(replica.seats / service.mean_ns(replica.report) for replica in ready)
        prefill_ns = max(service.prefill_ns(tokens, report) for report in reports)
        return max(1, round(1.0 / rate), prefill_ns // len(ready))

    def departure_ns(self, count: int, now_ns: int) -> int:
        """Predicted time until so many of the requests on board have ended."""
        return self._departures_ns(count, now_ns)[-1]

    def _departures_ns(self, count: int, now_ns: int) -> list[int]:
        """Predicted times until the first, the second … and so many have ended."""
        soon, service, gap_ns = min(count, RELEASES_NEAR), self.service, self.gap_ns()
        near = (at for r in self.ready() for at in r.predicted_releases(service, now_ns)[:soon])
        times = [max(1, release.at_ns - now_ns) for release in nsmallest(soon, near)]
        last_ns = times[-1] if times else 0
        return [*times, *(last_ns + n * gap_ns for n in range(1, count - len(times) + 1))]

    def wait_ns(self, now_ns: int) -> int:
        """Predicted wait of a newcomer of the default tier and the usual size."""
        if not self.ready():
            return self.ready_in_ns(now_ns)
        if not self.queue and any(r.places < r.seats for r in self.ready()):
            return 0
        usual = self.accept(Request("", now_ns, (0,), 1, tier=TIER_DEFAULT), 0, now_ns)
        usual.work = self.usual_work(usual)
        order = self.order_with(usual)
        return self.forecast(order, now_ns)[order.index(usual)].start_ns - now_ns
