"""From a number of replicas to what becomes of each: who starts, wakes, drains and stops.

More is taken from what is soonest ready: replicas that drain, warm ones, those that load to be
warm, then cold ones. Less is taken first from what does not serve yet, then from who has the least
to finish. ``core/scaling.py`` decides the numbers; called by ``core/fleet.py``.
"""

from operator import attrgetter

from sluice.core.accepted import Accepted, Work
from sluice.core.admission import NS_PER_S
from sluice.core.events import (
    Dispatch,
    DrainReplica,
    FleetEffect,
    ReplicaScore,
    Scaled,
    StartReplica,
    StopReplica,
    WarmReplica,
)
from sluice.core.fleet_replica import FleetReplica
from sluice.core.lifecycle import ReplicaState as R
from sluice.core.pools import Pool
from sluice.core.scaling import Decision, Scaler, Standing

# A replica with work that has told nothing for so long: nobody knows how it is.
STALE_NS = 30 * NS_PER_S
# Who has waited for so long is reason to wake a warm replica before the next decision is due.
WAKE_NS, WAITED = NS_PER_S, "queue_wait"
_SEATS, _REPORTED_NS = attrgetter("seats"), attrgetter("reported_ns")


def scale(pool: Pool, scaler: Scaler, now_ns: int) -> list[FleetEffect]:
    """Decide how many replicas there are to be, and let it happen."""
    before = scaler.decision
    return _decided(pool, before, scaler.decide(standing(pool, now_ns), now_ns), now_ns)


def _decided(pool: Pool, before: Decision, now: Decision, now_ns: int) -> list[FleetEffect]:
    assert pool.scaler is not None
    effects: list[FleetEffect] = []
    short = (before.short_of is None) != (now.short_of is None)
    if short or now.number != before.number:
        numbers = (before.number, now.number)
        effects.append(Scaled(pool.limits.model, *numbers, now.reason, now.terms, now.short_of))
    return effects + supply(pool, pool.scaler, now_ns)


def attend(pool: Pool, scaler: Scaler, now_ns: int) -> list[FleetEffect]:
    """Let go who has finished; decide anew where it is time, or where nobody would serve who
    waits; let another take the place of one that was lost."""
    effects = _let_go(pool, scaler) if scaler.leave_ns is not None else []
    if scaler.is_due(now_ns) or (pool.queue and scaler.pinned is None and nobody(pool)):
        effects += scale(pool, scaler, now_ns)
    elif scaler.pinned is None and _awaited(pool, now_ns):
        before, now = scaler.decision, standing(pool, now_ns)
        effects += _decided(pool, before, scaler.more(WAITED, now, now_ns), now_ns)
    elif _is_short(pool, scaler.decision):
        effects += supply(pool, scaler, now_ns)
    return effects


def nobody(pool: Pool) -> bool:
    """Whether no replica serves or is on its way to it, and one could be."""
    lineup = pool.lineup()
    if lineup.serving or lineup.coming:
        return False
    return bool(lineup.warm or lineup.of(R.STOPPED) or lineup.of(R.DRAINING))


def _awaited(pool: Pool, now_ns: int) -> bool:
    """Whether somebody waits for a warm replica, and none is being woken."""
    if not pool.queue or next(iter(pool.queue)).accepted_ns + WAKE_NS > now_ns:
        return False
    lineup = pool.lineup()
    return bool(lineup.of(R.WARM)) and not any(replica.woken for replica in lineup.coming)


def _is_short(pool: Pool, decision: Decision) -> bool:
    """Whether one was lost that is replaced at once: by a warm one, or by its own next start."""
    lineup = pool.lineup()
    missing = decision.number > len(lineup.serving) + len(lineup.coming)
    return missing and bool(lineup.warm or any(one.error for one in lineup.of(R.STOPPED)))


def pin(pool: Pool, number: int | None) -> None:
    """Somebody else says how many are to serve, or leaves it to the load again."""
    if pool.scaler is not None:
        pool.scaler.pinned, pool.scaler.due_ns = number, 0


def asked(pool: Pool, work: Work, now_ns: int) -> None:
    """A request came, whatever becomes of it."""
    if pool.scaler is not None:
        pool.scaler.asked(
            _work_s(pool, work.prefill_tokens, work.places * work.output_tokens) or 0.0, now_ns
        )


def begin(
    pool: Pool, accepted: Accepted, scores: tuple[ReplicaScore, ...], now_ns: int
) -> Dispatch:
    """Give a request to the best of these replicas."""
    if pool.scaler is not None and not accepted.attempts:
        work = accepted.work
        work_s = _work_s(pool, work.prefill_tokens, work.places * work.output_tokens)
        pool.scaler.began(work_s or 0.0, now_ns - accepted.accepted_ns)
    return pool.start(accepted, scores, now_ns)


def _work_s(pool: Pool, prefill_tokens: int, output_tokens: int) -> float | None:
    widest = pool.widest()
    seats = 1 if widest is None else widest.sequences_max
    return pool.service.work_s(prefill_tokens, output_tokens, seats)


def overstayed(pool: Pool, now_ns: int) -> list[Accepted]:
    """Requests on replicas that were to be gone by now."""
    return [
        accepted
        for replica in pool.lineup().others
        if replica.leave_by_ns is not None and replica.leave_by_ns <= now_ns
        for accepted in replica.on_board.values()
    ]


def standing(pool: Pool, now_ns: int) -> Standing:
    """The replicas as the decision sees them; those that drain or are gone count for nothing."""
    lineup, queue = pool.lineup(), pool.queue
    serving, widest = lineup.serving, lineup.widest
    aside = [r for r in lineup.others if r.places]
    held = lineup.tally.places - sum([r.places for r in aside])
    blocks = lineup.tally.blocks - sum([r.blocks_reserved for r in aside])
    seats = sum(map(_SEATS, serving))
    places, kv = 0.0, 0.0
    if seats:
        places = (held + queue.places) * len(serving) / seats
    if widest is not None:
        kv = blocks / widest.blocks_total
    waiting_s = _work_s(pool, queue.tokens, queue.places * pool.service.mean_output_tokens)
    old_ns = now_ns - STALE_NS
    stale = min(map(_REPORTED_NS, serving), default=now_ns) < old_ns and any(
        r.places and r.reported_ns < old_ns for r in serving
    )
    return Standing(
        serving=len(serving),
        coming=len(lineup.coming),
        warm=len(lineup.warm),
        requests=held + queue.places,
        waiting=len(queue),
        waiting_s=waiting_s or 0.0,
        places=places,
        kv=kv,
        stale=stale or (waiting_s is None and bool(queue.places + held)),
    )


def supply(pool: Pool, scaler: Scaler, now_ns: int) -> list[FleetEffect]:
    """Bring the replicas nearer to what was decided."""
    effects = _more(pool, scaler.decision, now_ns)
    effects += _fewer(pool, scaler, now_ns)
    return effects + _let_go(pool, scaler) + _warmed(pool, scaler.decision, now_ns)


def _let_go(pool: Pool, scaler: Scaler) -> list[FleetEffect]:
    """Those that drained are kept warm where that is wanted, else stopped."""
    decision, effects = scaler.decision, list[FleetEffect]()
    for replica in [r for r in pool.lineup().of(R.DRAINING) if not r.on_board]:
        if len(pool.lineup().warm) < decision.loaded - decision.number:
            assert replica.limits is not None
            replica.keep_warm(replica.limits)
            effects.append(WarmReplica(replica.id, decision.reason))
        else:
            replica.rest()
            effects.append(StopReplica(replica.id, decision.reason))
    leaving = [r.leave_by_ns for r in pool.lineup().others if r.leave_by_ns is not None]
    scaler.leave_ns = min(leaving, default=None)
    return effects


def _more(pool: Pool, decision: Decision, now_ns: int) -> list[FleetEffect]:
    lineup = pool.lineup()
    missing = decision.number - len(lineup.serving) - len(lineup.coming)
    if missing <= 0:
        return []
    sources = (
        sorted(lineup.of(R.DRAINING), key=_work, reverse=True),
        lineup.of(R.WARM),
        [r for r in lineup.warm if r.warming],
        lineup.of(R.STOPPED),
    )
    chosen = [replica for source in sources for replica in source][:missing]
    for replica in chosen:
        if replica.state is R.DRAINING:
            replica.move(R.READY)
            replica.leave_by_ns = None
        elif replica.warming:
            replica.serve_when_ready()
        else:
            replica.woken, replica.asked_ns = replica.state is R.WARM, now_ns
            replica.start(now_ns)
    return [StartReplica(replica.id, decision.reason) for replica in chosen]


def _fewer(pool: Pool, scaler: Scaler, now_ns: int) -> list[FleetEffect]:
    lineup, reason = pool.lineup(), scaler.decision.reason
    surplus = len(lineup.coming) + len(lineup.serving) - scaler.decision.number
    if surplus <= 0:
        return []
    effects: list[FleetEffect] = []
    order = [*lineup.coming, *sorted(lineup.serving, key=_work)]
    for replica in order[:surplus]:
        if replica.is_serving:
            replica.move(R.DRAINING)
            replica.leave_by_ns = now_ns + scaler.limits.leave_ns
            effects.append(DrainReplica(replica.id, reason))
        else:
            replica.rest()
            effects.append(StopReplica(replica.id, reason))
    return effects


def _work(replica: FleetReplica) -> tuple[int, int, int]:
    """How much there is to lose: requests, then what its prefix cache holds."""
    return (replica.places, replica.prefill_tokens, len(replica.prefixes.known))


def _warmed(pool: Pool, decision: Decision, now_ns: int) -> list[FleetEffect]:
    """Keep as many warm as were decided, beside what serves."""
    lineup = pool.lineup()
    warm = lineup.warm
    missing = decision.loaded - decision.number - len(warm)
    effects: list[FleetEffect] = []
    for replica in lineup.of(R.STOPPED)[:missing] if missing > 0 else []:
        replica.warm_up(now_ns)
        effects.append(WarmReplica(replica.id, "warm pool"))
    for replica in warm[len(warm) + min(0, missing) :]:
        replica.rest()
        effects.append(StopReplica(replica.id, "warm pool"))
    return effects
