"""What the fleet's views say about serving, in words for probes and operators.

Pure functions over ``core.pools.PoolView``. When a replica is started again is ``core.fleet``'s
decision; that a start has failed for good is the gateway's.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from sluice.core.fleet_replica import ReplicaView
from sluice.core.lifecycle import ReplicaState
from sluice.core.pool_view import PoolView
from sluice.runtime.generation import Absent, Readiness, ReplicaStatus

_GOING = (ReplicaState.STARTING, ReplicaState.WARM, ReplicaState.READY, ReplicaState.DRAINING)


def readiness(
    pools: Sequence[PoolView],
    now_ns: int,
    remote: AbstractSet[str] = frozenset(),
    *,
    draining: bool,
) -> Readiness:
    """Whether calls are admitted and every model has a replica that serves, or starts one for them.

    One of the ``remote`` models may have none while another model is served: that an engine
    elsewhere is down is no reason to keep all clients away. Neither is that a model has no replica
    while nobody asks: only a request that gets here starts one.
    """
    statuses = tuple(_status(one, now_ns) for one in _replicas(pools))
    absent = [pool for pool in pools if not serves(pool)]
    idle = [pool for pool in absent if not rests(pool)]
    if len(absent) < len(pools):
        idle = [pool for pool in idle if pool.model not in remote]
    missing = [_why_not(pool, now_ns) for pool in idle]
    reason = "the server is draining" if draining else "; ".join(missing)
    return Readiness(not reason, reason, statuses, tuple(map(_absent, absent)))


def start_failures(pools: Sequence[PoolView], failed: Mapping[str, str]) -> list[str]:
    """Why the start of a server is given up, in words; ``failed`` says of replicas why they did.

    One of a fixed number of replicas that cannot be loaded, or was lost again and again, is reason
    enough. Of a number that follows the load others may serve.
    """
    found = []
    for pool in pools:
        if pool.scaling is not None and any(one.state in _GOING for one in pool.replicas):
            continue
        for one in pool.replicas:
            if one.id in failed:
                found.append(failed[one.id])
            elif one.state is ReplicaState.CRASH_LOOP:
                found.append(f"{one.id} cannot be started: {one.error}")
    return found


def _replicas(pools: Iterable[PoolView]) -> list[ReplicaView]:
    return [replica for pool in pools for replica in pool.replicas]


def serves(pool: PoolView) -> bool:
    """Whether the model has a replica that may be given requests."""
    return any(replica.is_serving for replica in pool.replicas)


def rests(pool: PoolView) -> bool:
    """Whether the model is without replicas as it may be, and a request starts one."""
    return pool.absence is not None and pool.absence.resting


def _status(one: ReplicaView, now_ns: int) -> ReplicaStatus:
    starts_s = None if one.start_ns is None else max(0, one.start_ns - now_ns) / 1e9
    return ReplicaStatus(one.id, one.model, _state(one), one.error, one.losses, starts_s)


def _absent(pool: PoolView) -> Absent:
    """How long a model of which none serves has to be waited for."""
    assert pool.absence is not None
    ready_in_ns = pool.absence.ready_in_ns
    ready_in_s = None if ready_in_ns is None else ready_in_ns / 1e9
    return Absent(pool.model, ready_in_s, pool.absence.held)


def _state(replica: ReplicaView) -> str:
    return "draining" if replica.draining and replica.state is ReplicaState.READY else replica.state


def is_whole(pool: PoolView) -> bool:
    """Whether every replica of the model serves, so that there are all the places it can have."""
    return all(replica.is_serving for replica in pool.replicas)


def _why_not(pool: PoolView, now_ns: int) -> str:
    """Why no replica of the model serves, in words."""
    states = []
    for replica in pool.replicas:
        words = f"{replica.id} is {_state(replica)}"
        if replica.error:
            words += f" ({replica.error})"
        if replica.start_ns is not None:
            words += f", starts again in {max(0, replica.start_ns - now_ns) / 1e9:.0f} s"
        states.append(words)
    return f"no replica serves {pool.model}: {', '.join(states)}{_expected(pool)}"


def _expected(pool: PoolView) -> str:
    """When one will serve and what becomes of requests until then, in words."""
    absent = _absent(pool)
    if absent.ready_in_s is None:
        return ""
    held = "held until then" if absent.held else "refused until then"
    return f"; one is expected in {absent.ready_in_s:.0f} s, requests are {held}"
