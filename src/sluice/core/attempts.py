"""What becomes of a request whose replica failed it or was lost; when no attempt is worth making.

Called by ``core/fleet.py`` with the pool of the request's model. An attempt is repeated only where
its client has seen nothing and the budget has a retry left; then another replica goes first, for
which it waits a little, and where there is none the same one is asked again after a wait.
"""

from heapq import heappop, heappush
from random import Random
from typing import assert_never

from sluice.core.accepted import Accepted
from sluice.core.admission import NS_PER_S, Refusal
from sluice.core.events import AttemptFailed, Ended, ReplicaLost, Retarget
from sluice.core.gate import AfterTrial, OpenNow, OpensAt
from sluice.core.holding import unserved
from sluice.core.pools import Pool
from sluice.core.request import COMPLETE, Request, Rung, Usage

# A request that was on board of this many lost replicas is not tried again: it may be the cause.
LOSSES_MAX = 2

# Refusals for want of anything that serves. Attempts that all failed count as the first.
_NOTHING_SERVES = ("not_ready", "not_held", "held_full", "load_failed", "upstream_busy")


def tried_again(
    pool: Pool, accepted: Accepted, failed: AttemptFailed, chance: Random, now_ns: int
) -> bool:
    """Note how the attempt went, and let the request wait for another one if there shall be one."""
    assert accepted.replica_id is not None
    replica = pool.replica(accepted.replica_id)
    replica.settle(accepted, failed.outcome, now_ns, failed.rest_ns)
    replica.leave(accepted)
    retries = len(accepted.tried)
    accepted.tried += (replica.id,)
    if accepted.tokens or pool.retries is None:
        return False
    wait_ns = _wait_ns(pool, accepted, now_ns)
    if wait_ns:
        wait_ns = max(wait_ns, pool.retries.wait_ns(retries, chance))
    if wait_ns is None or wait_ns > pool.retries.limits.wait_ns_max:
        return False  # the client is told of it, with the time that the engine named
    if not pool.retries.take(retries):
        return False
    if wait_ns:
        accepted.due_ns = now_ns + pool.retries.limits.wait_ns_max
        heappush(pool.resting, (now_ns + wait_ns, accepted.number, accepted))
    else:
        pool.enqueue(accepted, now_ns)
    return True


def _wait_ns(pool: Pool, accepted: Accepted, now_ns: int) -> int | None:
    """Time until a replica may be asked, ``None`` where there is none.

    0 is for one that was not tried and has a place now: where others are full, the one that failed
    it would get it again at once.
    """
    waits_ns = []
    for replica in pool.ready():
        match replica.opening(now_ns):
            case OpenNow():
                if replica.id not in accepted.tried and replica.doubt(accepted, now_ns) is not None:
                    return 0
                waits_ns.append(1)
            case AfterTrial():
                waits_ns.append(1)
            case OpensAt(at_ns):
                waits_ns.append(at_ns - now_ns)
            case never:
                assert_never(never)
    return min(waits_ns, default=None)


def _waits_for_others(pool: Pool, accepted: Accepted, now_ns: int) -> bool:
    """Whether a replica that was not tried is only full, and its place may yet be waited for."""
    return now_ns < accepted.due_ns and any(
        replica.id not in accepted.tried and isinstance(replica.opening(now_ns), OpenNow)
        for replica in pool.ready()
    )


def ended(pool: Pool, accepted: Accepted, event: Ended, now_ns: int) -> Usage:
    """A replica ended a request; what that is charged. One that hung there is charged nothing."""
    if event.reason in COMPLETE:
        pool.completed(accepted, event, now_ns)
    elif event.silent and accepted.replica_id is not None:
        predicted_ns = pool.service.prefill_ns(accepted.prefill_tokens, None)
        if pool.replica(accepted.replica_id).hung(accepted, predicted_ns, now_ns):
            return Usage(0, 0, 0)
    return event.usage


def not_rescued(pool: Pool, accepted: Accepted, lost: ReplicaLost, now_ns: int) -> str | None:
    """Why a request whose replica was lost is not tried again; ``None`` where it waits for that.

    Silence is not risked twice.
    """
    accepted.losses += LOSSES_MAX if lost.silent else 1
    if not accepted.tokens and accepted.losses < LOSSES_MAX:
        pool.enqueue(accepted, now_ns)
        return None
    when = "with it on board" if lost.silent else "twice"
    when = f"after {accepted.tokens} tokens were sent" if accepted.tokens else when
    return f"its replica was lost {when}: {lost.error}"


def rested(pool: Pool, now_ns: int) -> list[Accepted]:
    """Let those go on whose wait for another attempt is over; gives those that cannot.

    What was about to be tried again may be gone, or shut, by then.
    """
    hopeless = []
    while pool.resting and pool.resting[0][0] <= now_ns:
        accepted = heappop(pool.resting)[2]
        if accepted.over or pool.retries is None:
            continue
        wait_ns = _wait_ns(pool, accepted, now_ns)
        if wait_ns is None or wait_ns > pool.retries.limits.wait_ns_max:
            hopeless.append(accepted)
        elif wait_ns and _waits_for_others(pool, accepted, now_ns):
            again_ns = now_ns + pool.retries.limits.wait_ns_min
            heappush(pool.resting, (again_ns, accepted.number, accepted))
        else:
            pool.enqueue(accepted, now_ns)
    return hopeless


def fallback(
    pool: Pool, request: Request, refusal: Refusal, now_ns: int, *, begun: bool = False
) -> Retarget | None:
    """The first of the other models that may answer, where nothing of its own does.

    One that was ``begun`` to be relayed stays with engines elsewhere.
    """
    if refusal.reason not in _NOTHING_SERVES or Rung.FALLBACK in request.degraded:
        return None
    if begun and pool.limits.remote is None:
        return None
    for other in pool.fallback if request.may_fall_back else ():
        remote = other.limits.remote is not None
        if (remote or not begun) and other.ready() and shut(other, now_ns) is None:
            measured, threshold = refusal.measured, refusal.threshold
            return Retarget(request.id, other.limits.model, measured, threshold, Rung.FALLBACK)
        if not other.ready():
            unserved(other, now_ns)
    return None


def stand_in(pool: Pool, accepted: Accepted, now_ns: int) -> Retarget | None:
    """The other model that may answer what was accepted and cannot be served by its own."""
    if accepted.tokens:
        return None
    failed = Refusal(503, "not_ready", 0, 1)
    return fallback(pool, accepted.request, failed, now_ns, begun=accepted.attempts > 0)


def shut(pool: Pool, now_ns: int) -> Refusal | None:
    """Why nothing is accepted: every replica that serves is known to take nothing for a while.

    Breakers that are open are told as such; a rest that the engines asked for only where it
    outlasts the longest wait.
    """
    openings = []
    for replica in pool.ready():
        if replica.gate is None or replica.gate.is_open(now_ns):
            return None
        opening = replica.opening(now_ns)
        if not isinstance(opening, OpensAt):
            return None
        openings.append(opening)
    if not openings:
        return None
    least_ns = min(openings).at_ns - now_ns
    if all(opening.broken for opening in openings):
        return Refusal(503, "not_ready", 0, 1, least_ns)
    most_ns = pool.limits.queue_wait_ns_max
    if least_ns <= most_ns:
        return None
    return Refusal(429, "upstream_busy", least_ns / NS_PER_S, most_ns / NS_PER_S, least_ns)
