"""Requests that come while no replica of their model serves: held until one does, or refused.

Asked by ``core/fleet.py``, ``core/door.py``, ``core/attempts.py`` and, for what is shown,
``core/pool_view.py``. Whoever is not held has asked all the same: it wakes a replica of a model
that has none. What is started is decided in ``core/supply.py``.
"""

from sluice.core.admission import NS_PER_S, Absence, Refusal
from sluice.core.lifecycle import ReplicaState
from sluice.core.pools import Pool
from sluice.core.request import Request
from sluice.core.supply import asked, nobody


def absence(pool: Pool, now_ns: int) -> Absence | None:
    """What becomes of requests while no replica serves; ``None`` where one does."""
    if pool.ready():
        return None
    refusal, scaler = _refusal(pool, now_ns), pool.scaler
    wait_ns = pool.ready_in_ns(now_ns) if refusal is None else refusal.wait_ns
    resting = scaler is not None and not scaler.limits.replicas_min and pool.may_serve_soon()
    return Absence(wait_ns, held=refusal is None, resting=resting)


def not_ready(pool: Pool, now_ns: int) -> Refusal:
    """The refusal of what no replica serves; asking again is in vain where all failed."""
    if all(replica.state is ReplicaState.FAILED for replica in pool.replicas):
        return Refusal(503, "load_failed", 0, 1)
    return Refusal(503, "not_ready", 0, 1, pool.ready_in_ns(now_ns))


def not_held(pool: Pool, now_ns: int) -> Refusal | None:
    """Why a request is not held until a replica serves; ``None`` where it is."""
    refusal = _refusal(pool, now_ns)
    if refusal is not None:
        unserved(pool, now_ns)
    return refusal


def _refusal(pool: Pool, now_ns: int) -> Refusal | None:
    refusal, scale = not_ready(pool, now_ns), pool.limits.scale
    wait_ns, places = refusal.wait_ns, pool.queue.places
    if scale is None or wait_ns is None:
        return refusal
    if wait_ns > scale.hold_ns:
        return Refusal(503, "not_held", wait_ns / NS_PER_S, scale.hold_ns / NS_PER_S, wait_ns)
    if places >= scale.hold_places:
        return Refusal(503, "held_full", places + 1, scale.hold_places, wait_ns)
    return None


def unserved(pool: Pool, now_ns: int) -> None:
    """A request that nobody has counted found no replica here, and asks for one."""
    if pool.scaler is None:
        return
    asked(pool, pool.work(Request("", now_ns, (0,), pool.service.mean_output_tokens), {}), now_ns)
    if nobody(pool):
        pool.scaler.due_ns = now_ns
