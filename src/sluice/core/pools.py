"""The pool of a model: its replicas, the requests that wait for one, and what it can promise.

Owned and changed by ``core/fleet.py`` alone; the views are for everyone.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from sluice.core.admission import (
    NS_PER_S,
    Refusal,
    ServiceTimes,
    never_runs,
    remaining_ns,
    tokens_max,
)
from sluice.core.events import Dispatch, ReplicaLimits
from sluice.core.fleet_replica import Accepted, FleetReplica, ReplicaView
from sluice.core.lifecycle import ReplicaState
from sluice.core.request import Request
from sluice.core.routing import block_chain, rank

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
class PoolView:
    """One model as metrics and operators see it. ``limits`` is ``None`` before one was ready."""

    model: str
    waiting: int
    waiting_places: int
    places: int
    places_max: int
    limits: ReplicaLimits | None
    replicas: tuple[ReplicaView, ...]


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
    replicas: tuple[FleetReplica, ...]
    queue: Queue = field(default_factory=Queue)
    service: ServiceTimes = field(default_factory=ServiceTimes)
    load_ns: int = LOAD_NS_UNKNOWN
    _drain: tuple[int, int] | None = None  # when it was predicted, and what

    def ready(self) -> list[FleetReplica]:
        """The replicas that serve."""
        return [replica for replica in self.replicas if replica.state is ReplicaState.READY]

    def may_serve_soon(self) -> bool:
        """Whether a replica serves or is about to."""
        hopeless = (ReplicaState.CRASH_LOOP, ReplicaState.FAILED, ReplicaState.STOPPED)
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

    def refusal(self, request: Request, now_ns: int) -> Refusal | None:
        """Why the request cannot be accepted, ``None`` if it can."""
        limits = self.widest()
        if limits is not None and (never := never_runs(request, limits)) is not None:
            return never
        return self._no_room(request.choices, now_ns)

    def refusal_before(self, choices: int, now_ns: int) -> Refusal | None:
        """Why a request is refused whatever its prompt is; ``None`` where that depends on it."""
        limits = self.widest()
        if limits is not None and choices > limits.sequences_max:
            return None  # it can never run, which is another refusal
        return self._no_room(choices, now_ns)

    def _no_room(self, choices: int, now_ns: int) -> Refusal | None:
        if not self.ready():
            return self.not_ready(now_ns)
        places, places_max = self.places() + choices, self.places_max()
        if places > places_max:
            return Refusal(429, "queue_full", places, places_max, self.drain_ns(now_ns))
        return None

    def not_ready(self, now_ns: int) -> Refusal:
        """The refusal of what no replica serves; asking again is in vain where all failed."""
        if all(replica.state is ReplicaState.FAILED for replica in self.replicas):
            return Refusal(503, "load_failed", 0, 1)
        return Refusal(503, "not_ready", 0, 1, self.ready_in_ns(now_ns))

    def overdue(self, accepted: Accepted, now_ns: int) -> Refusal:
        """The refusal of what waited too long."""
        arrived_ns = accepted.request.arrived_ns
        waited_s = (now_ns - arrived_ns) / NS_PER_S
        limit_s = (accepted.due_ns - arrived_ns) / NS_PER_S
        return Refusal(429, "queue_deadline", waited_s, limit_s, self.drain_ns(now_ns))

    def place_head(self, now_ns: int) -> Dispatch | None:
        """Give the request that goes next to the best replica; ``None`` where it fits on none."""
        accepted = self.queue.head
        request = accepted.request
        able = {replica.id: replica for replica in self.replicas if replica.takes(request)}
        if not able:
            return None
        limits = self.widest()
        if accepted.chain is None and limits is not None and len(self.replicas) > 1:
            accepted.chain = block_chain(request.prompt, limits.block_size)
        candidates = [replica.candidate(accepted, now_ns) for replica in able.values()]
        output_tokens = self.service.predict_output_tokens(request.output_tokens_max)
        scores = rank(request, output_tokens, candidates)
        self.queue.remove(accepted)
        chosen = able[scores[0].replica_id]
        chosen.board(accepted, output_tokens, now_ns)
        return Dispatch(request.id, chosen.id, accepted.attempts, scores)

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
            work_ns = sum(self._work_ns(waiting, 0) for waiting in self.queue)
            for replica in self.replicas:
                for running in replica.on_board.values():
                    work_ns += self._work_ns(running, now_ns - running.dispatched_ns)
            self._drain = (now_ns, work_ns // max(1, self._slots()))
        return self._drain[1]

    def _work_ns(self, accepted: Accepted, run_ns: int) -> int:
        request = accepted.request
        predicted_ns = self.service.predict_ns(len(request.prompt), request.output_tokens_max)
        return request.choices * remaining_ns(predicted_ns, run_ns)

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
