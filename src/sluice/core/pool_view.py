"""One model with its replicas and its queue, as metrics and operators see it.

Made by ``core/fleet.py`` when somebody asks; nothing is changed by looking.
"""

from dataclasses import dataclass

from sluice.core.admission import Absence
from sluice.core.events import ReplicaLimits
from sluice.core.fleet_replica import ReplicaView
from sluice.core.holding import absence
from sluice.core.pools import Pool
from sluice.core.scaling import Decision


@dataclass(frozen=True, slots=True)
class PoolView:
    """One model as metrics and operators see it. ``limits`` is ``None`` before one was ready.

    ``waiting_tokens`` are the prompt tokens of the waiting, ``waiting_bytes`` their bodies.
    ``wait_ns`` is the wait predicted for a newcomer of the default tier. ``longest_wait_ns`` holds,
    for each tier of which some wait, how long the first of them has waited. ``bookings`` refused
    clients were told when to come back; ``returning`` is the share of them that do. ``margin`` is
    the factor by which predicted waits are stretched. ``scaling`` is the last decision on how many
    replicas there are, where that follows the load; ``absence`` is set where none serves.
    """

    model: str
    waiting: int
    waiting_places: int
    places: int
    places_max: int
    limits: ReplicaLimits | None
    replicas: tuple[ReplicaView, ...]
    waiting_tokens: int = 0
    waiting_bytes: int = 0
    waiting_tokens_max: int | None = None
    waiting_bytes_max: int | None = None
    wait_ns: int = 0
    longest_wait_ns: tuple[tuple[int, int], ...] = ()
    bookings: int = 0
    returning: float = 1.0
    margin: float = 1.0
    scaling: Decision | None = None
    absence: Absence | None = None


def view(pool: Pool, now_ns: int) -> PoolView:
    """What others may know of a pool."""
    pool.returns.expire(now_ns)
    return PoolView(
        model=pool.limits.model,
        waiting=len(pool.queue) + sum(not accepted.over for *_, accepted in pool.resting),
        waiting_places=pool.queue.places,
        places=pool.places(),
        places_max=pool.places_max(),
        limits=pool.widest(),
        replicas=tuple(replica.view(now_ns) for replica in pool.replicas),
        waiting_tokens=pool.queue.tokens,
        waiting_bytes=pool.queue.bytes,
        waiting_tokens_max=pool.tokens_max(),
        waiting_bytes_max=pool.limits.queue_bytes_max,
        wait_ns=pool.wait_ns(now_ns),
        longest_wait_ns=pool.queue.longest_wait_ns(now_ns),
        bookings=len(pool.returns),
        returning=pool.returns.share,
        margin=pool.wait_margin.factor(0.95, now_ns),
        scaling=None if pool.scaler is None else pool.scaler.decision,
        absence=absence(pool, now_ns),
    )
