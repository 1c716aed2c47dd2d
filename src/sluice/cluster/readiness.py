"""What the fleet's views say about serving, in words for probes and operators.

Pure functions over ``core.pools.PoolView``. When a replica is started again is ``core.fleet``'s
decision; that a start has failed for good is the gateway's.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from sluice.core.fleet_replica import ReplicaView
from sluice.core.lifecycle import ReplicaState
from sluice.core.pools import PoolView
from sluice.runtime.generation import Readiness, ReplicaStatus


def readiness(
    pools: Sequence[PoolView],
    now_ns: int,
    remote: AbstractSet[str] = frozenset(),
    *,
    draining: bool,
) -> Readiness:
    """Whether calls are admitted and every model has a replica that serves.

    One of the ``remote`` models may have none while another model is served: that an engine
    elsewhere is down is no reason to keep all clients away.
    """
    statuses = tuple(
        ReplicaStatus(one.id, one.model, _state(one), one.error) for one in _replicas(pools)
    )
    idle = [pool for pool in pools if not serves(pool)]
    if len(idle) < len(pools):
        idle = [pool for pool in idle if pool.model not in remote]
    missing = [_why_not(pool, now_ns) for pool in idle]
    reason = "the server is draining" if draining else "; ".join(missing)
    return Readiness(not reason, reason, statuses)


def crash_loops(pools: Sequence[PoolView]) -> list[str]:
    """The replicas that were lost so often that nothing will serve there soon."""
    return [
        f"{one.id} cannot be started: {one.error}"
        for one in _replicas(pools)
        if one.state is ReplicaState.CRASH_LOOP
    ]


def _replicas(pools: Iterable[PoolView]) -> list[ReplicaView]:
    return [replica for pool in pools for replica in pool.replicas]


def serves(pool: PoolView) -> bool:
    """Whether the model has a replica that may be given requests."""
    return any(replica.is_serving for replica in pool.replicas)


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
    return f"no replica serves {pool.model}: {', '.join(states)}"
