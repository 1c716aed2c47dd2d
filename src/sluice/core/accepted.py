"""A request that was accepted, as the fleet counts it, and the work that it stands for.

Changed by ``core/pools.py``, ``core/queue.py`` and ``core/fleet_replica.py`` alone. Facts and
counts; what becomes of the request is decided elsewhere.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sluice.core.request import Request

# The class of a request among those of a pool, smaller goes first: its tier, and whether its tenant
# is ahead of its share.
Rank = tuple[int, bool]


class Work(NamedTuple):
    """What a request is predicted to take of a replica.

    ``prefill_tokens`` are the tokens of its prompt that are probably not cached, ``output_tokens``
    the further tokens of one choice, ``blocks`` its KV at the end.
    """

    places: int
    prefill_tokens: int
    output_tokens: int
    blocks: int


class Order(NamedTuple):
    """The place of a request in its pool's queue, the smaller goes first.

    ``newcomer`` is false for a client that came back as it was told. ``due_ns`` is its due time
    with its own work added.
    """

    tier: int
    newcomer: bool
    due_ns: int
    number: int


@dataclass(slots=True, eq=False)
class Accepted:
    """A request that was not refused and has not ended.

    It waits in its pool's queue or is on board of the replica ``replica_id``. ``number``
    counts arrivals. ``due_ns`` ends its wait, in the queue or for a replica that has not failed it,
    ``ttft_due_ns`` is its first token's due time, ``None`` where no promise about it is made.
    ``attempts`` counts dispatches and ``losses`` the replicas lost under it, ``tried`` are the
    remote replicas that failed it. ``wait`` is the number of its present wait, ``None`` while it is
    on board. ``chain`` stands for its prompt's blocks, ``cached`` are the tokens of them that a
    replica probably has. ``claim`` are the tokens that it was predicted to take when it was
    accepted, ``tokens`` reached its client. ``over`` says that it has ended.

    ``predicted_wait_ns`` and ``predicted_first_ns`` are its wait and the time to its first token as
    predicted when it began to wait at ``accepted_ns``, without margin; ``None`` where it started at
    once. ``start_first_ns`` is the same for the time from its dispatch.
    """

    request: Request
    model: str
    number: int
    order: Order
    work: Work
    chain: tuple[int, ...]
    cached: dict[str, int]
    accepted_ns: int
    ttft_due_ns: int | None
    due_ns: int = 0
    predicted_wait_ns: int | None = None
    predicted_first_ns: int | None = None
    start_first_ns: int | None = None
    replica_id: str | None = None
    dispatched_ns: int = 0
    attempts: int = 0
    losses: int = 0
    tried: tuple[str, ...] = ()
    tokens: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    claim: int = 0
    wait: int | None = None
    aged: bool = False
    over: bool = False

    @property
    def timed(self) -> bool:
        """Whether it can be late."""
        return self.ttft_due_ns is not None or self.request.deadline_ns is not None
