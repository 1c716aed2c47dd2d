"""Which replicas a model has while that changes: new ones come, old ones finish what they have.

A replica that leaves gets nothing more from the moment that another one serves which stays, so that
a model whose replicas are all exchanged is served throughout. It is gone when it has no request on
board. Called by ``core/fleet.py``; which replicas there are to be is the operator's decision.
"""

from collections.abc import Mapping

from sluice.core.fleet_replica import FleetReplica
from sluice.core.limits import PoolLimits
from sluice.core.pools import Pool


def replicas_of(limits: PoolLimits, known: Mapping[str, FleetReplica]) -> tuple[FleetReplica, ...]:
    """The replicas that a model is to have, in order; those that are not known are made."""
    weights = limits.weights or (1.0,) * len(limits.replica_ids)
    replicas = []
    for name, weight in zip(limits.replica_ids, weights, strict=True):
        replica = known.get(name)
        if replica is None:
            replica = FleetReplica(name, limits.model, remote=limits.remote)
        replica.weight = weight
        replicas.append(replica)
    return tuple(replicas)


def change(pool: Pool, limits: PoolLimits) -> tuple[FleetReplica, ...]:
    """Let other limits hold for a pool; gives the replicas that it has then.

    Those that are not among the limits' own begin to leave.
    """
    staying = replicas_of(limits, {one.id: one for one in pool.replicas})
    leaving = [one for one in pool.replicas if one.id not in limits.replica_ids]
    for replica in leaving:
        replica.leaving = True
    pool.limits = limits
    pool.set_replicas((*staying, *leaving))
    return pool.replicas


def depart(pool: Pool) -> list[FleetReplica]:
    """The replicas that are gone now; the pool has them no more."""
    leaving = [one for one in pool.replicas if one.leaving]
    if any(one.is_serving and not one.leaving for one in pool.replicas):
        for replica in leaving:
            replica.draining = True
    gone = [one for one in leaving if not one.on_board and not one.is_serving]
    if gone:
        pool.set_replicas(tuple(one for one in pool.replicas if one not in gone))
    return gone
