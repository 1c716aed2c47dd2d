"""Which replicas each model has, while that changes: new ones come, old ones finish what they have.

A replica that leaves gets nothing more from the moment that another one serves which stays, so that
a model whose replicas are all exchanged is served throughout. It is gone when it has no request on
board. Called by ``core/fleet.py``; which replicas there are to be is the operator's decision.
"""

from collections.abc import Sequence

from sluice.core.fleet_replica import FleetReplica
from sluice.core.limits import PoolLimits
from sluice.core.pools import Pool

Pools = dict[str, Pool]
Replicas = dict[str, FleetReplica]


def set_limits(pools: Pools, replicas: Replicas, limits: Sequence[PoolLimits]) -> bool:
    """Let limits hold: what is new is made, what is missing begins to leave.

    Says whether any replica leaves. Raises ``ValueError`` for other models than there are, and
    changes nothing then.
    """
    if pools and {one.model for one in limits} != pools.keys():
        raise ValueError("models cannot be added or removed")
    for one in limits:
        staying = _staying(one, replicas)
        pool = pools.setdefault(one.model, Pool(one, staying))
        leaving = [other for other in pool.replicas if other.id not in one.replica_ids]
        for replica in leaving:
            replica.leaving = True
        pool.limits = one
        if one.scale is not None and pool.scaler is not None:
            pool.scaler.limits, pool.scaler.due_ns = one.scale, 0
        pool.set_replicas((*staying, *leaving))
        replicas.update((replica.id, replica) for replica in staying)
    for pool in pools.values():
        smaller, remote = pool.limits.smaller, pool.limits.remote
        pool.smaller = None if smaller is None else pools[smaller]
        pool.fallback = tuple(pools[model] for model in pool.limits.fallback)
        if remote is not None and pool.retries is not None:
            pool.retries.limits = remote.retries
    return any(replica.leaving for replica in replicas.values())


def let_leave(pools: Pools, replicas: Replicas) -> tuple[list[str], bool]:
    """The replicas that are gone now, and whether others are still leaving."""
    gone = [replica for pool in pools.values() for replica in _depart(pool)]
    for replica in gone:
        del replicas[replica.id]
    return [replica.id for replica in gone], any(one.leaving for one in replicas.values())


def _staying(limits: PoolLimits, known: Replicas) -> tuple[FleetReplica, ...]:
    weights = limits.weights or (1.0,) * len(limits.replica_ids)
    replicas = []
    for name, weight in zip(limits.replica_ids, weights, strict=True):
        replica = known.get(name)
        if replica is None:
            replica = FleetReplica(name, limits.model, remote=limits.remote)
        replica.scaled = limits.scale is not None
        replica.weight = weight
        replicas.append(replica)
    return tuple(replicas)


def _depart(pool: Pool) -> list[FleetReplica]:
    leaving = [one for one in pool.replicas if one.leaving]
    if any(one.is_serving and not one.leaving for one in pool.replicas):
        for replica in leaving:
            replica.let_drain(on=True)
    gone = [one for one in leaving if not one.on_board and not one.is_serving]
    if gone:
        pool.set_replicas(tuple(one for one in pool.replicas if one not in gone))
    return gone
