"""Whether a request can be promised what its class says: at the door, while it waits, at its start.

Asked by ``core/fleet.py`` about a ``core/pools.py`` pool. A promise counts on the pool's
``utilisation`` and on what was learned of its margins; a request that waits is given up only when
it would be late without either, so that what was promised is not taken back for a guess.

The first late request of a sweep says who has to go (after Moore and Hodgson 1968): of those up to
it, one of the worst class present, with the most work. The class is the tier and, within it,
whether the tenant is ahead of its share. Within its own class it is the late one itself, or the
newcomer that would delay it: a refusal at once can be acted on and one after a wait cannot.
"""

from collections.abc import Iterable, Sequence

from sluice.core.accepted import Accepted, Rank, Work
from sluice.core.admission import NS_PER_S, Refusal, never_runs
from sluice.core.events import Dispatch, ReplicaScore
from sluice.core.feasibility import Outlook
from sluice.core.holding import unserved
from sluice.core.ladder import Leaves, Stays, walk
from sluice.core.path_budget import Predicted
from sluice.core.pools import Pool
from sluice.core.request import TIER_DEFAULT, Request, Rung
from sluice.core.supply import asked, begin

# At most so many of the waiting give way to one newcomer, or are given up in one sweep.
DROPS_MAX = 8
# Of the times from dispatch to first token this part of the allowed misses is planned for: the rest
# is left for what nobody predicted.
START_MISSES = 0.4
# So many that the time of one is told in parts of a nanosecond.
_MANY_TOKENS = 1_000_000


def answer(
    pool: Pool, request: Request, number: int, now_ns: int
) -> tuple["Door", Stays | Leaves | Refusal]:
    """What becomes of a request that can run here; nothing is counted yet."""
    pool.came(request, now_ns)
    accepted = pool.accept(request, number, now_ns)
    asked(pool, accepted.work, now_ns)
    if pool.returns.claimed(request, now_ns):
        accepted.order = accepted.order._replace(newcomer=False)
        if hopeless(pool, accepted):
            accepted.ttft_due_ns = None
    door = Door(pool, accepted, now_ns)
    if not pool.ready():
        accepted.ttft_due_ns = None  # held until a replica serves: it is late whatever is done
        return door, Stays(request)
    return door, walk(request, door)


def refusal_before(pool: Pool, least: Request, number: int, now_ns: int) -> Refusal | None:
    """Why a request is refused whatever its prompt is; ``least`` is the request without it."""
    if not pool.ready():
        return None
    refusal = pool.refusal_before(least, now_ns)
    refusal = refusal or late_whatever(pool, least, number, now_ns)
    if refusal is not None and pool.scaler is not None:
        asked(pool, pool.usual_work(pool.accept(least, number, now_ns)), now_ns)
    return refusal


def late_whatever(pool: Pool, least: Request, number: int, now_ns: int) -> Refusal | None:
    """Why a request would be late whatever its prompt is: its wait alone takes too long.

    ``least`` is the request without its prompt, which makes it wait least of all. ``None`` also
    where something else may become of it: it could start, someone would give way, a smaller model
    could answer it, or it was told to come now.
    """
    takes_over = pool.smaller is not None and Rung.SMALLER in least.overload
    if takes_over or least.ttft_due_ns is None or not least.likeness or not pool.ready():
        return None
    accepted = pool.accept(least, number, now_ns)
    rank = pool.rank(accepted)
    if pool.returns.is_due(least, now_ns) or any(pool.rank(other) > rank for other in pool.queue):
        return None
    if (not pool.queue or pool.goes_first(accepted, now_ns)) and pool.standing(accepted, now_ns):
        return None
    order = pool.order_with(accepted)
    order = order[: order.index(accepted) + 1]
    expected = pool.expected(accepted, now_ns)
    outlook = pool.forecast(order, now_ns, newcomer=accepted, expected=expected)[-1]
    return lateness(pool, accepted, outlook, pool.promised(accepted, now_ns), now_ns)


def place_next(pool: Pool, now_ns: int) -> Dispatch | tuple[Accepted, Refusal] | None:
    """Give the request that goes next to the best replica; ``None`` where it fits on none.

    One that would be late gets its refusal instead.
    """
    accepted = pool.next_up(now_ns)
    scores = pool.standing(accepted, now_ns)
    if not scores:
        return None
    refusal = late_at_start(pool, accepted, scores[0].replica_id, now_ns)
    if refusal is not None and not accepted.attempts:
        return accepted, refusal
    pool.queue.took_turn(accepted)
    pool.queue.remove(accepted)
    return begin(pool, accepted, scores, now_ns)


def predicted(pool: Pool, request: Request | None, now_ns: int) -> Predicted:
    """What a newcomer of the default tier takes, with the margins that promises are made with.

    Of the prompt of this ``request`` it is told what is cached, as its admission will count it.
    """
    service, rank, report = pool.service, (TIER_DEFAULT, False), None
    cached = {} if request is None else pool.accept(request, 0, now_ns).cached
    wait_ns = round(pool.wait_ns(now_ns) * pool.wait_margin.factor(0.95, now_ns))
    backlogs = [
        (replica.backlog_ns(rank, pool.rank, service, now_ns), place, replica.report)
        for place, replica in enumerate(pool.ready())
    ]
    if backlogs:
        backlog_ns, _, report = min(backlogs, key=lambda one: one[:2])
        wait_ns += backlog_ns
    prefill_ns = service.prefill_ns(_MANY_TOKENS, report) * pool.start_margin.factor(0.95, now_ns)
    return Predicted(
        queue_ns=wait_ns,
        prefill_token_ns=prefill_ns / _MANY_TOKENS or None,
        token_ns=service.token_ns(report),
        output_tokens=service.mean_output_tokens,
        cached_tokens=max(cached.values(), default=0),
    )


# Who gives way, and what it is told.
Drop = tuple[Accepted, Refusal]


class Door:
    """The judgement of one arrival. ``accepted`` is the request as it would be counted.

    After consent, ``scores`` are the replicas that can start it, best first, empty where it waits;
    ``drops`` are the waiting that give way to it.
    """

    def __init__(self, pool: Pool, accepted: Accepted, now_ns: int) -> None:
        self._pool = pool
        self._now_ns = now_ns
        self.accepted = accepted
        self.scores: tuple[ReplicaScore, ...] = ()
        self.drops: tuple[Drop, ...] = ()

    def _shape(self, request: Request) -> None:
        if request is not self.accepted.request:
            self.accepted.request = request
            self.accepted.work = self._pool.work(request, self.accepted.cached)

    def starts(self, request: Request) -> Refusal | None:
        """See ``ladder.Door``."""
        self._shape(request)
        pool, accepted, now_ns = self._pool, self.accepted, self._now_ns
        accepted.predicted_wait_ns = accepted.predicted_first_ns = None
        if not pool.queue or pool.goes_first(accepted, now_ns):
            self.scores = pool.standing(accepted, now_ns)
        if not self.scores:
            kept = pool.kept_from(accepted, pool.kept_places(), now_ns)
            places, free = pool.places() + request.choices, pool.seats() - kept
            return Refusal(429, "no_free_place", places, free, pool.departure_ns(1, now_ns))
        refusal = late_at_start(pool, accepted, self.scores[0].replica_id, now_ns)
        if refusal is not None:
            self.scores = ()
        return refusal

    def waits(self, request: Request) -> Refusal | None:
        """See ``ladder.Door``."""
        self._shape(request)
        pool, accepted, now_ns = self._pool, self.accepted, self._now_ns
        drops: list[Drop] = []
        while (refusal := pool.no_room(accepted, [drop for drop, _ in drops], now_ns)) is not None:
            left = [other for other in pool.queue if not any(other is drop for drop, _ in drops)]
            dropped = gives_way(pool, pool.yielding(left, accepted), accepted)
            if dropped is None or dropped is accepted or len(drops) == DROPS_MAX:
                return refusal
            drops.append((dropped, _making_room(refusal)))
        if accepted.timed or pool.queue.timed:
            return self._feasible(pool, accepted, drops, now_ns)
        self.drops = tuple(drops)
        # Nobody can be late, and the wait is told to the operator alone.
        accepted.predicted_wait_ns = pool.departure_ns(pool.queue.places + 1, now_ns)
        return None

    def smaller(self, request: Request) -> str | None:
        """See ``ladder.Door``."""
        pool = self._pool.smaller
        if pool is None or Rung.SMALLER in request.degraded:
            return None
        if not pool.ready():
            unserved(pool, self._now_ns)  # those that come after it find one
            return None
        limits = pool.widest()
        if limits is None or never_runs(request, limits) is not None:
            return None
        door = Door(pool, pool.accept(request, self.accepted.number, self._now_ns), self._now_ns)
        waits = Rung.QUEUE in request.overload
        if door.starts(request) is None or (waits and door.waits(request) is None):
            return pool.limits.model
        return None

    def _feasible(
        self, pool: Pool, accepted: Accepted, drops: list[Drop], now_ns: int
    ) -> Refusal | None:
        """Whether it, and those behind whom it would delay, are on time; notes who gives way.

        ``drops`` make room already.
        """
        order = pool.order_with(accepted)
        for gone, _ in drops:
            order.remove(gone)
        expected = pool.expected(accepted, now_ns)
        while True:
            outlooks = pool.forecast(order, now_ns, newcomer=accepted, expected=expected)
            place = order.index(accepted)
            accepted.predicted_wait_ns = outlooks[place].start_ns - now_ns
            accepted.predicted_first_ns = outlooks[place].first_ns - now_ns
            refusal = lateness(
                pool, accepted, outlooks[place], pool.promised(accepted, now_ns), now_ns
            )
            if refusal is not None:
                return refusal
            found = first_late(pool, order, outlooks, now_ns, start=place + 1)
            if found is None:
                self.drops = tuple(drops)
                return None
            late, refusal = found
            spared = _sparing(refusal, pool, now_ns)
            if pool.rank(order[late]) == pool.rank(accepted) or len(drops) == DROPS_MAX:
                return spared
            dropped = gives_way(pool, order[:late], order[late])
            if dropped is None or dropped is accepted:
                return spared
            drops.append((dropped, refusal if dropped is order[late] else spared))
            order.remove(dropped)


def _sparing(late: Refusal, pool: Pool, now_ns: int) -> Refusal:
    """The refusal of one that goes so that another one is not late."""
    late_s = late.measured - late.threshold
    return Refusal(429, "gives_way", late_s, 0.0, pool.departure_ns(1, now_ns))


def _making_room(full: Refusal) -> Refusal:
    """The refusal of one that goes so that a stricter one need not wait for room."""
    return Refusal(429, "gives_way", (full.wait_ns or 0) / NS_PER_S, 0.0, full.wait_ns)


def lateness(
    pool: Pool, accepted: Accepted, outlook: Outlook, factor: float, now_ns: int
) -> Refusal | None:
    """Why the request would be late if all before its first token takes ``factor`` times as long.

    The refusal's wait is the time by which it would be late.
    """
    first_ns = now_ns + round((outlook.first_ns - now_ns) * factor)
    late = _late_answer(pool, accepted, outlook, first_ns, now_ns)
    due_ns = accepted.ttft_due_ns
    if late is not None or due_ns is None or first_ns <= due_ns:
        return late
    arrived_ns = accepted.request.arrived_ns
    measured, threshold = first_ns - arrived_ns, due_ns - arrived_ns
    wait_ns = first_ns - due_ns
    return Refusal(429, "predicted_late", measured / NS_PER_S, threshold / NS_PER_S, wait_ns)


def _late_answer(
    pool: Pool, accepted: Accepted, outlook: Outlook, first_ns: int, now_ns: int
) -> Refusal | None:
    """Why the request would not be done by its deadline with its first token at ``first_ns``."""
    request = accepted.request
    if request.deadline_ns is None:
        return None
    token_ns = (outlook.end_ns - outlook.first_ns) / max(1, accepted.work.output_tokens - 1)
    if first_ns + (request.output_tokens_max - 1) * token_ns <= request.deadline_ns:
        return None
    tokens = pool.service.output_tokens(request, 0, request.quantile)
    decode_ns = round((tokens - 1) * token_ns)
    left_ns, measured_ns = request.deadline_ns - now_ns, first_ns + decode_ns - now_ns
    if measured_ns <= left_ns:
        return None
    # Where an idle replica takes longer than the client ever gives it, no later time is better.
    least_ns = (tokens - 1) * (pool.service.least_token_ns() or 0)
    budget_ns = request.deadline_ns - request.arrived_ns
    wait_ns = None if least_ns > budget_ns else measured_ns - left_ns
    measured, threshold = measured_ns / NS_PER_S, left_ns / NS_PER_S
    return Refusal(429, "deadline_infeasible", measured, threshold, wait_ns)


def late_at_start(pool: Pool, accepted: Accepted, replica_id: str, now_ns: int) -> Refusal | None:
    """Why a request that is about to be dispatched would be late.

    One that could not be on time on an idle replica either, or for which there is one and nobody
    else, is served for its own sake: a first token target that cannot be met is no reason to be
    never served.
    """
    replica = pool.replica(replica_id)
    work, report = accepted.work, replica.report
    token_ns = pool.service.token_ns(report)
    alone_ns = pool.service.prefill_ns(work.prefill_tokens, report) + token_ns
    first_ns = alone_ns
    if replica.prefilling:
        rank = pool.rank(accepted)
        first_ns += replica.backlog_ns(rank, pool.rank, pool.service, now_ns)
    accepted.start_first_ns = first_ns
    if not accepted.timed:
        return None
    decode_ns = (work.output_tokens - 1) * token_ns
    outlook = Outlook(now_ns, now_ns + first_ns, now_ns + first_ns + decode_ns)
    quantile = 1.0 - START_MISSES * (1.0 - accepted.request.quantile)
    promised = accepted.wait is not None or not accepted.order.newcomer
    factor = 1.0 if promised else pool.start_margin.factor(quantile, now_ns)
    refusal = lateness(pool, accepted, outlook, factor, now_ns)
    if refusal is None or refusal.reason != "predicted_late":
        return refusal
    alone = not replica.places and len(pool.queue) == (accepted.wait is not None)
    return None if alone or hopeless(pool, accepted) else refusal


def hopeless(pool: Pool, accepted: Accepted) -> bool:
    """Whether its first token would be late on a replica with nothing else to do.

    Also where the speed of replicas is not known yet.
    """
    due_ns = accepted.ttft_due_ns
    least_ns = pool.service.least_prefill_ns(accepted.work.prefill_tokens)
    return due_ns is not None and (least_ns is None or accepted.accepted_ns + least_ns > due_ns)


def first_late(
    pool: Pool,
    order: Sequence[Accepted],
    outlooks: Sequence[Outlook],
    now_ns: int,
    start: int = 0,
) -> tuple[int, Refusal] | None:
    """The first of the waiting from ``start`` on that would be late even without any margin."""
    for place in range(start, len(order)):
        if order[place].timed:
            refusal = lateness(pool, order[place], outlooks[place], 1.0, now_ns)
            if refusal is not None:
                return place, refusal
    return None


def gives_way(pool: Pool, others: Iterable[Accepted], late: Accepted) -> Accepted | None:
    """Who goes so that others are on time or have room, ``None`` where nobody can.

    Of the ``others`` in a worse class than ``late`` it is the one with the most work in the worst
    class, else ``late`` itself: what has no target is not dropped for its own class. None that was
    dispatched goes.
    """
    rank = pool.rank(late)
    worse = [other for other in others if not other.attempts and pool.rank(other) > rank]
    if not worse:
        return None if late.attempts else late

    def weight(accepted: Accepted) -> tuple[Rank, int, int]:
        work: Work = accepted.work
        amount = work.prefill_tokens + work.places * work.output_tokens
        return (pool.rank(accepted), amount, accepted.number)

    return max(worse, key=weight)


def give_up(pool: Pool, now_ns: int) -> list[Drop]:
    """Those of the waiting that have to go so that the others are on time; looks now and then."""
    if not pool.sweep_is_due(now_ns):
        return []
    order = list(pool.in_order())
    drops: list[Drop] = []
    start = 0
    while order and len(drops) < DROPS_MAX:
        outlooks = pool.forecast(order, now_ns)
        found = first_late(pool, order, outlooks, now_ns, start=start)
        if found is None:
            break
        late, refusal = found
        dropped = gives_way(pool, order[:late], order[late])
        if dropped is None:
            start = late + 1  # it was dispatched before
            continue
        _missed(pool, dropped, outlooks[order.index(dropped)], now_ns)
        told = refusal if dropped is order[late] else _sparing(refusal, pool, now_ns)
        drops.append((dropped, told))
        order.remove(dropped)
    return drops


def _missed(pool: Pool, accepted: Accepted, outlook: Outlook, now_ns: int) -> None:
    """A promise is taken back: learn from what is predicted now."""
    if accepted.predicted_first_ns is not None:
        total_ns = outlook.first_ns - accepted.accepted_ns
        pool.wait_margin.observe(accepted.predicted_first_ns, total_ns, now_ns)


def overdue(pool: Pool, accepted: Accepted, now_ns: int) -> Refusal:
    """The refusal of what waited too long."""
    waited_s = (now_ns - accepted.request.arrived_ns) / NS_PER_S
    limit_s = (accepted.due_ns - accepted.request.arrived_ns) / NS_PER_S
    return Refusal(429, "queue_deadline", waited_s, limit_s, pool.departure_ns(1, now_ns))
