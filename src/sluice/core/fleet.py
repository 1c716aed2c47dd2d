"""The fleet: which requests are accepted, where they run, and what becomes of replicas.

``Fleet.handle`` takes one event and the time and returns effects; the gateway performs them. Check
and count happen in the same call. Requests wait here, not in a replica: a replica is given as many
sequences as it can hold (``sequences_max``), so that a lost replica takes few requests with it and
the strictest tier goes next whatever else waits. What one model's pool can take is judged in
``core/pools.py``; what runs inside a replica is decided by ``core/replica.py``.

Every accepted request ends once: by ``Ended`` or ``Cancelled`` coming in, or by ``Fail`` going out
(``Reject`` where it was never dispatched). All it holds is returned in that same call.
"""

from collections.abc import Sequence
from random import Random
from typing import assert_never

from sluice.core.accepted import Accepted
from sluice.core.admission import NS_PER_S, Refusal, never_runs, reject
from sluice.core.attempts import ended, fallback, not_rescued, rested, shut, stand_in, tried_again
from sluice.core.door import Door, answer, give_up, overdue, place_next, predicted, refusal_before
from sluice.core.events import (
    Abort,
    Arrived,
    AttemptFailed,
    Cancelled,
    Dispatch,
    Ended,
    Fail,
    FleetDraining,
    FleetEffect,
    FleetEvent,
    Progress,
    QuotaTold,
    Reconfigured,
    Reject,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    ReplicasPinned,
    Retarget,
    Shorten,
    StartReplica,
    StopReplica,
    Tick,
    WakeAt,
)
from sluice.core.fleet_replica import FleetReplica, RestartLimits
from sluice.core.holding import not_held, not_ready
from sluice.core.ladder import Leaves, Stays
from sluice.core.lifecycle import REPLICA_MOVES, ReplicaState
from sluice.core.limits import PoolLimits, RouteLimits, TenantLimits
from sluice.core.membership import let_leave, set_limits
from sluice.core.model_routes import Choice, ModelRoute, Question, set_routes
from sluice.core.news import hear
from sluice.core.path_budget import Predicted
from sluice.core.pool_view import PoolView, view
from sluice.core.pools import Pool
from sluice.core.request import EndReason, Request, Rung, Usage
from sluice.core.supply import attend, begin, overstayed, pin
from sluice.core.tenants import Allowance, TenantLedger

# What leaves the replicas' states as they are.
_OF_REQUESTS = (Arrived, Cancelled, Progress, Ended, AttemptFailed, ReplicaReported, QuotaTold)


class Fleet:
    """All models behind one gateway."""

    def __init__(
        self,
        pools: Sequence[PoolLimits],
        *,
        chance: Random,
        tenants: Sequence[TenantLimits] = (),
        routes: Sequence[RouteLimits] = (),
        restarts: RestartLimits | None = None,
    ) -> None:
        self._chance = chance
        self._ledger = TenantLedger(tenants)
        self._restarts = restarts or RestartLimits()
        self._pools: dict[str, Pool] = {}
        self._replicas: dict[str, FleetReplica] = {}
        self._are_leaving = set_limits(self._pools, self._replicas, pools)
        self.routes: dict[str, ModelRoute] = {}
        set_routes(self.routes, routes)
        self._accepted: dict[str, Accepted] = {}
        self._arrivals = 0
        self._drain_by_ns: int | None = None
        self._wake_ns: int | None = None
        self._start_ns: int | None = None  # the next planned start of a replica

    def handle(self, event: FleetEvent, now_ns: int) -> list[FleetEffect]:
        """Take one event and return what is to be done. The first ``Tick`` starts the replicas.

        Raises ``KeyError`` for a model or replica that is not configured and ``ValueError`` for a
        request id that is in use; nothing is changed then.
        """
        if isinstance(event, Progress):
            if not self._progress(event, now_ns):
                return []
            effects = list[FleetEffect]()
        else:
            effects = self._take(event, now_ns)
            for pool in self._pools.values():
                pool.stuck = False
        if not isinstance(event, _OF_REQUESTS):
            starts = (replica.start_ns for replica in self._replicas.values())
            self._start_ns = min((at_ns for at_ns in starts if at_ns is not None), default=None)
        if self._are_leaving:
            gone, self._are_leaving = let_leave(self._pools, self._replicas)
            effects += [StopReplica(replica_id) for replica_id in gone]
        for pool in self._pools.values() if self._drain_by_ns is None else ():
            if pool.scaler is not None:
                effects += attend(pool, pool.scaler, now_ns)
        effects += self._dispatch(now_ns)
        wake_ns = self._next_wake_ns(now_ns)
        if wake_ns is not None and wake_ns != self._wake_ns:
            effects.append(WakeAt(wake_ns))
        self._wake_ns = wake_ns
        return effects

    def _take(self, event: FleetEvent, now_ns: int) -> list[FleetEffect]:
        match event:
            case Arrived():
                return self._arrived(self._pools[event.model], event.request, now_ns)
            case Cancelled():
                return self._cancelled(event, now_ns)
            case Ended():
                self._ended(event, now_ns)
            case Progress():
                pass  # see ``handle``
            case AttemptFailed():
                return self._attempt_failed(event, now_ns)
            case ReplicaLost():
                return self._lost(event, now_ns)
            case ReplicaReady() | ReplicaReported() | QuotaTold() | ReplicaDraining():
                replica = self._replicas[event.replica_id]
                hear(self._pools[replica.model], replica, event, now_ns)
            case ReplicasPinned():
                pin(self._pools[event.model], event.number)
            case Reconfigured():
                return self._reconfigured(event, now_ns)
            case FleetDraining():
                return self._draining(event.deadline_ns, now_ns)
            case Tick():
                return self._tick(now_ns)
            case _:
                assert_never(event)
        return []

    # ---------------------------------------------------------------------------------- requests

    def _arrived(self, pool: Pool, request: Request, now_ns: int) -> list[FleetEffect]:
        if request.id in self._accepted:
            raise ValueError(f"request id {request.id} is in use")
        refusal = self._refusal(pool, request, now_ns)
        if refusal is not None:
            instead = fallback(pool, request, refusal, now_ns)
            return [instead or reject(request.id, refusal, self._chance)]
        self._arrivals += 1
        door, verdict = answer(pool, request, self._arrivals, now_ns)
        match verdict:
            case Refusal():
                return [pool.refuse(request, verdict, now_ns, self._chance)]
            case Leaves(model, spared):
                return [Retarget(request.id, model, spared.measured, spared.threshold)]
            case Stays():
                return self._accept(pool, door, now_ns)
            case _:
                assert_never(verdict)

    def _refusal(self, pool: Pool, request: Request, now_ns: int) -> Refusal | None:
        """Why the request is refused whatever else is being served."""
        limits = pool.widest()
        if limits is not None and (never := never_runs(request, limits)) is not None:
            return never
        if (closed := self._closed(pool, now_ns)) is not None:
            return closed
        if request.deadline_ns is not None and request.deadline_ns <= now_ns:
            return Refusal(429, "deadline_past", (now_ns - request.deadline_ns) / NS_PER_S, 0.0)
        return self._ledger.refusal(request, now_ns)

    def _closed(self, pool: Pool, now_ns: int) -> Refusal | None:
        """Why nothing at all is accepted for this model."""
        if self._drain_by_ns is not None:
            return Refusal(503, "draining", 0, 0, max(0, self._drain_by_ns - now_ns))
        return shut(pool, now_ns) if pool.ready() else not_held(pool, now_ns)

    def _accept(self, pool: Pool, door: Door, now_ns: int) -> list[FleetEffect]:
        """Count a request, and start it if it can: who waits was placed as far as possible."""
        accepted, effects = door.accepted, list[FleetEffect]()
        request = accepted.request
        self._accepted[request.id] = accepted
        self._ledger.reserve(request, now_ns)
        pool.enter(accepted)
        if Rung.SHORTEN in request.degraded:
            effects.append(Shorten(request.id, request.output_tokens_max))
        if door.scores:
            if pool.queue:
                pool.queue.took_turn(accepted)
            return [*effects, begin(pool, accepted, door.scores, now_ns)]
        pool.enqueue(accepted, now_ns)
        for dropped, refusal in door.drops:
            effects += self._turn_away(dropped, refusal, now_ns)
        return effects

    def _cancelled(self, event: Cancelled, now_ns: int) -> list[FleetEffect]:
        accepted = self._accepted.get(event.request_id)
        if accepted is None:
            return []
        replica_id = accepted.replica_id
        if event.withdrawn:
            self._ledger.release(event.request_id, now_ns)
        self._release(accepted, now_ns)
        return [] if replica_id is None else [Abort(event.request_id, replica_id)]

    def _progress(self, event: Progress, now_ns: int) -> bool:
        """Whether something may follow from it: a further token makes nobody start."""
        accepted = self._accepted.get(event.request_id)
        if accepted is None or accepted.replica_id is None:
            return False
        first = not accepted.tokens
        self._pools[accepted.model].progress(accepted, event.tokens, now_ns)
        return first

    def _ended(self, event: Ended, now_ns: int) -> None:
        accepted = self._accepted.get(event.request_id)
        if accepted is not None:
            usage = ended(self._pools[accepted.model], accepted, event, now_ns)
            self._release(accepted, now_ns, usage)

    def _attempt_failed(self, event: AttemptFailed, now_ns: int) -> list[FleetEffect]:
        accepted = self._accepted.get(event.request_id)
        if accepted is None or accepted.replica_id is None:
            return []
        pool = self._pools[accepted.model]
        if tried_again(pool, accepted, event, self._chance, now_ns):
            return []
        instead = self._fall_back(accepted, now_ns)
        return instead or self._end(accepted, EndReason.FAILED, event.error, now_ns)

    def _fall_back(self, accepted: Accepted, now_ns: int) -> list[FleetEffect]:
        """Let another model answer what was accepted and cannot be served; empty if none may."""
        instead = stand_in(self._pools[accepted.model], accepted, now_ns)
        if instead is None or self._drain_by_ns is not None:
            return []
        self._ledger.release(accepted.request.id, now_ns)
        self._release(accepted, now_ns)
        return [instead]

    def _release(self, accepted: Accepted, now_ns: int, usage: Usage | None = None) -> None:
        """The one place where an accepted request stops being one; without ``usage`` it is known
        from what reached the client."""
        pool, request = self._pools[accepted.model], accepted.request
        del self._accepted[request.id]
        if usage is None and accepted.attempts:
            was_computed = accepted.tokens or not accepted.tried
            usage = Usage(request.prompt_tokens if was_computed else 0, 0, accepted.tokens)
        if usage is None:
            self._ledger.release(request.id, now_ns)
        else:
            self._ledger.settle(request.id, usage, now_ns)
        pool.leave(accepted, now_ns)

    def _end(
        self, accepted: Accepted, reason: EndReason, error: str, now_ns: int
    ) -> list[FleetEffect]:
        """End a request from this side; its replica, if it has one, is told to drop it."""
        request_id, replica_id = accepted.request.id, accepted.replica_id
        self._release(accepted, now_ns)
        abort: list[FleetEffect] = [] if replica_id is None else [Abort(request_id, replica_id)]
        return [*abort, Fail(request_id, reason, error)]

    def _turn_away(self, accepted: Accepted, refusal: Refusal, now_ns: int) -> list[FleetEffect]:
        """End a waiting request: refused if it was never dispatched, else failed."""
        if accepted.attempts:
            reason = EndReason.EXPIRED if refusal.reason == "queue_deadline" else EndReason.FAILED
            what = "failed it" if accepted.tried else "was lost"
            error = f"its replica {what}; then: {refusal.reason}"
            return self._end(accepted, reason, error, now_ns)
        self._release(accepted, now_ns)
        pool = self._pools[accepted.model]
        return [pool.refuse(accepted.request, refusal, now_ns, self._chance)]

    def _dispatch(self, now_ns: int) -> list[FleetEffect]:
        """Give waiting requests to replicas in order; one that fits nowhere holds the rest.

        Then those that cannot be on time any more make room for the others.
        """
        effects: list[FleetEffect] = []
        for pool in self._pools.values():
            while pool.queue.places and not pool.stuck:
                placed = place_next(pool, now_ns)
                if placed is None:
                    pool.stuck = True
                elif isinstance(placed, Dispatch):
                    effects.append(placed)
                else:
                    effects += self._turn_away(*placed, now_ns)
            for accepted, refusal in give_up(pool, now_ns) if pool.queue.timed else ():
                effects += self._turn_away(accepted, refusal, now_ns)
        return effects

    # ---------------------------------------------------------------------------------- replicas

    def _lost(self, event: ReplicaLost, now_ns: int) -> list[FleetEffect]:
        replica, error = self._replicas[event.replica_id], event.error
        if ReplicaState.BACKOFF not in REPLICA_MOVES[replica.state]:
            return []
        if event.permanent:
            replica.fail(error)
        elif event.keeps_board and self._drain_by_ns is None:
            replica.part(error, now_ns)
        else:
            replica.lose(error, self._restarts if self._drain_by_ns is None else None, now_ns)
        effects: list[FleetEffect] = []
        for accepted in [] if event.keeps_board else list(replica.on_board.values()):
            replica.leave(accepted)
            why = not_rescued(self._pools[replica.model], accepted, event, now_ns)
            if why is not None:
                effects += self._end(accepted, EndReason.FAILED, why, now_ns)
        return effects + self._give_up(self._pools[replica.model], now_ns)

    def _give_up(self, pool: Pool, now_ns: int) -> list[FleetEffect]:
        """End what waits for a pool of which nothing will serve soon."""
        if pool.may_serve_soon():
            return []
        effects: list[FleetEffect] = []
        for accepted in list(pool.queue):
            instead = self._fall_back(accepted, now_ns)
            effects += instead or self._turn_away(accepted, not_ready(pool, now_ns), now_ns)
        return effects

    def _reconfigured(self, event: Reconfigured, now_ns: int) -> list[FleetEffect]:
        self._are_leaving = set_limits(self._pools, self._replicas, event.pools)
        set_routes(self.routes, event.routes)
        running = [accepted.request for accepted in self._accepted.values()]
        self._ledger.replace(event.tenants, running, now_ns)
        return self._start_due(now_ns)

    # ------------------------------------------------------------------------------ time and end

    def _draining(self, deadline_ns: int, now_ns: int) -> list[FleetEffect]:
        """Admit nothing more and start nothing more; what serves or loads may end what waits."""
        self._drain_by_ns = deadline_ns
        effects: list[FleetEffect] = []
        for replica in self._replicas.values():
            replica.stay_down()
        for pool in self._pools.values():
            effects += self._give_up(pool, now_ns)
        return effects

    def _tick(self, now_ns: int) -> list[FleetEffect]:
        # A timer may fire a little early: then the same time is asked for again.
        self._wake_ns = None
        effects: list[FleetEffect] = []
        if self._drain_by_ns is not None and now_ns >= self._drain_by_ns:
            for accepted in list(self._accepted.values()):
                why = "the server is shutting down"
                effects += self._end(accepted, EndReason.SHUTDOWN, why, now_ns)
        for pool in self._pools.values():
            for accepted in rested(pool, now_ns):
                why = "no replica is left that could try it again"
                instead = self._fall_back(accepted, now_ns)
                effects += instead or self._end(accepted, EndReason.FAILED, why, now_ns)
            for accepted in overstayed(pool, now_ns):
                why = "its replica was to be stopped and waited for it as long as it may"
                effects += self._end(accepted, EndReason.SHUTDOWN, why, now_ns)
            for accepted in pool.queue.overdue(now_ns):
                effects += self._turn_away(accepted, overdue(pool, accepted, now_ns), now_ns)
        return effects + self._start_due(now_ns)

    def _start_due(self, now_ns: int) -> list[FleetEffect]:
        if self._drain_by_ns is not None:
            return []
        due = [replica for replica in self._replicas.values() if replica.is_due(now_ns)]
        for replica in due:
            replica.start(now_ns)
        return [StartReplica(replica.id) for replica in due]

    def _next_wake_ns(self, now_ns: int) -> int | None:
        times = [self._start_ns, self._drain_by_ns if self._accepted else None]
        for pool in self._pools.values():
            if pool.scaler is not None or pool.queue.places or pool.resting:
                times += pool.wake_times_ns(now_ns)
        due = [at_ns for at_ns in times if at_ns is not None]
        return max(now_ns, min(due)) if due else None

    def choose(self, question: Question, now_ns: int) -> Choice:
        """The model for a request that names a route. Raises ``KeyError`` for an unknown one."""
        return self.routes[question.route].choose(question, self._pools, now_ns)

    @property
    def requests(self) -> int:
        """Accepted requests that have not ended; after ``FleetDraining``, 0 means done."""
        return len(self._accepted)

    @property
    def draining(self) -> bool:
        """Whether nothing more is admitted, because of ``FleetDraining``."""
        return self._drain_by_ns is not None

    def allowance(self, tenant: str, now_ns: int) -> Allowance | None:
        """What a tenant may still use per minute, ``None`` where it has no such limit."""
        return self._ledger.allowance(tenant, now_ns)

    def refusal_before(self, model: str, least: Request, now_ns: int) -> Reject | None:
        """How a request would be refused whatever its prompt is, ``None`` if that depends on it.

        ``least`` is the request without its prompt. For a driver that would otherwise work in vain;
        nothing is promised: ``Arrived`` decides, and counts. Raises ``KeyError`` as that does.
        """
        pool = self._pools[model]
        pool.came(least, now_ns)
        refusal = self._refusal(pool, least, now_ns)
        refusal = refusal or refusal_before(pool, least, self._arrivals + 1, now_ns)
        if refusal is None or refusal.status == 400 or refusal.reason == "tokens_per_minute":
            return None  # none, or one that is told with the size of the prompt
        if fallback(pool, least, refusal, now_ns) is not None:
            return None
        return pool.refuse(least, refusal, now_ns, self._chance)

    def predicted(self, model: str, now_ns: int, request: Request | None = None) -> Predicted:
        """What the next request for a model, which may be this one, is predicted to take."""
        return predicted(self._pools[model], request, now_ns)

    def pools(self, now_ns: int) -> tuple[PoolView, ...]:
        """All models with their replicas, in the order of configuration."""
        return tuple(view(pool, now_ns) for pool in self._pools.values())
