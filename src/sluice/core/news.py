"""What replicas and their operator tell, taken in where it belongs.

Called by ``core/fleet.py``. Nothing follows from it at once but what the next dispatch finds.
"""

from typing import assert_never

from sluice.core.events import QuotaTold, ReplicaDraining, ReplicaReady, ReplicaReported
from sluice.core.fleet_replica import FleetReplica
from sluice.core.lifecycle import ReplicaState
from sluice.core.pools import Pool
from sluice.core.scaling import Scaler

News = ReplicaReady | ReplicaReported | QuotaTold | ReplicaDraining


def hear(pool: Pool, replica: FleetReplica, news: News, now_ns: int) -> None:
    """Take in what is told of a replica of this pool."""
    match news:
        case ReplicaReady():
            if pool.scaler is not None:
                _scaled_ready(pool, pool.scaler, replica, news, now_ns)
            elif replica.state is not ReplicaState.STOPPED:
                replica.serve(news.limits, now_ns)
                if replica.remote is None:  # of others that time is how long they were away
                    pool.load_ns = now_ns - replica.started_ns
        case ReplicaReported():
            if replica.state in (ReplicaState.READY, ReplicaState.DRAINING):
                before, report = replica.report, news.report
                if pool.scaler is not None and before is not None:
                    pool.scaler.preempted(report.preemptions - before.preemptions)
                replica.reported(report, now_ns)
                pool.service.reported(news.report)
        case QuotaTold():
            replica.told(news.left, news.request_id, now_ns)
        case ReplicaDraining():
            replica.let_drain(on=news.on)
        case _:
            assert_never(news)


def _scaled_ready(
    pool: Pool, scaler: Scaler, replica: FleetReplica, ready: ReplicaReady, now_ns: int
) -> None:
    """One that was asked for serves or is kept warm; one that is not awaited is neither."""
    if replica.state is not ReplicaState.STARTING:
        return
    times = scaler.wakes if replica.woken else scaler.starts
    times.took(now_ns - replica.asked_ns)
    pool.load_ns = scaler.starts.lead_ns
    if replica.warming:
        replica.keep_warm(ready.limits)
    else:
        replica.serve(ready.limits, now_ns)
    replica.woken = False
