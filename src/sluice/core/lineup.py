"""The replicas of a pool by what they do: who serves, who is on the way, who is kept loaded.

Made anew only when one of them changed that, which is rare, so that what is asked with each request
and each decision costs the same however many there are. Kept by ``core/pools.py``; nothing is
decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from sluice.core.events import ReplicaLimits
from sluice.core.fleet_replica import FleetReplica, Tally
from sluice.core.lifecycle import ReplicaState as R

_TOKENS_MAX = attrgetter("tokens_max")


@dataclass(frozen=True, slots=True)
class Lineup:
    """Each list is in the order of configuration.

    ``coming`` will serve without being asked again, ``warm`` are loaded, or load to be, and serve
    when they are asked to. ``others`` are all that do not serve, those of the other lists among
    them. ``widest`` is the limits of the one that takes the longest request. ``tally`` is kept up
    to date while the lists hold.
    """

    serving: list[FleetReplica]
    coming: list[FleetReplica]
    warm: list[FleetReplica]
    others: list[FleetReplica]
    widest: ReplicaLimits | None
    tally: Tally

    def of(self, state: R) -> list[FleetReplica]:
        """Those that do not serve and are in this state."""
        return [replica for replica in self.others if replica.state is state]


class Lineups:
    """The lineup of the moment."""

    def __init__(self, replicas: Sequence[FleetReplica]) -> None:
        self._replicas = replicas
        places, blocks = (r.places for r in replicas), (r.blocks_reserved for r in replicas)
        self._tally = Tally(sum(places), sum(blocks))
        for replica in replicas:
            replica.tally = self._tally
        self._made = self._make()
        self._moves = self._tally.moves

    def now(self) -> Lineup:
        """As the replicas are sorted since the last of them moved."""
        if self._moves != self._tally.moves:
            self._made, self._moves = self._make(), self._tally.moves
        return self._made

    def _make(self) -> Lineup:
        others = [replica for replica in self._replicas if not replica.is_serving]
        started = [replica for replica in others if replica.state in (R.STARTING, R.BACKOFF)]
        widest = max(self._replicas, key=_TOKENS_MAX, default=None)
        return Lineup(
            serving=[replica for replica in self._replicas if replica.is_serving],
            coming=[replica for replica in started if not replica.warming],
            warm=[replica for replica in others if replica.state is R.WARM or replica.warming],
            others=others,
            widest=None if widest is None else widest.limits,
            tally=self._tally,
        )
