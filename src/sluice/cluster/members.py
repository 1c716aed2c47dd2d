"""The replicas that the fleet has started, warmed or is letting go, by id.

An id is one replica over all its comings and goings: it can be started again while what stood under
its name still ends, and begins when that is gone. When to start and to stop is the fleet's
decision; what a replica is made of is told by ``Launch``. Called by ``fleet_driver``.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from sluice.cluster.placement.replica import PlacedReplica, ReplicaListener
from sluice.cluster.remote import RemoteListener, RemoteReplica

_log = logging.getLogger(__name__)


class AnyListener(ReplicaListener, RemoteListener, Protocol):
    """Who listens to replicas of both kinds."""


AnyReplica = PlacedReplica | RemoteReplica
Launch = Callable[[str, AnyListener], AnyReplica]


class Members(Mapping[str, AnyReplica]):
    """The replicas that there are, which does not say that they run."""

    def __init__(self, listener: AnyListener) -> None:
        self._listener = listener
        self._launches: dict[str, Launch] = {}
        self._here: dict[str, AnyReplica] = {}
        self._departures: dict[str, asyncio.Task[None]] = {}
        self._wishes: dict[str, Callable[[str], None]] = {}  # of those that still end

    def __getitem__(self, replica_id: str) -> AnyReplica:
        return self._here[replica_id]

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._here

    def __iter__(self) -> Iterator[str]:
        return iter(self._here)

    def __len__(self) -> int:
        return len(self._here)

    def know(self, replica_ids: Iterable[str], launch: Launch) -> None:
        """Let ``launch`` make these replicas; one that is known already stays as it is."""
        for replica_id in replica_ids:
            if replica_id not in self._launches:
                self._launches[replica_id] = launch
                self._here[replica_id] = launch(replica_id, self._listener)

    def start(self, replica_id: str) -> None:
        """Let a replica serve: start it, or wake it."""
        self._soon(replica_id, lambda one: self._made(one).start())

    def warm(self, replica_id: str) -> None:
        """Let a replica be loaded and wait."""
        self._soon(replica_id, lambda one: self._made(one).warm())

    def stop(self, replica_id: str) -> None:
        """Let a replica end. Nothing more is heard of it, until it is started again."""
        self._wishes.pop(replica_id, None)
        member = self._here.pop(replica_id, None)
        if member is not None:
            task = asyncio.get_running_loop().create_task(member.stop())
            self._departures[replica_id] = task
            task.add_done_callback(partial(self._departed, replica_id))

    async def close(self) -> None:
        """Stop them all and wait until everything has ended."""
        self._wishes.clear()
        members = [member.stop() for member in self._here.values()]
        await asyncio.gather(*members, *self._departures.values())

    def _soon(self, replica_id: str, wish: Callable[[str], None]) -> None:
        if replica_id in self._departures:
            self._wishes[replica_id] = wish
        else:
            wish(replica_id)

    def _made(self, replica_id: str) -> AnyReplica:
        member = self._here.get(replica_id)
        if member is None:
            member = self._launches[replica_id](replica_id, self._listener)
            self._here[replica_id] = member
        return member

    def _departed(self, replica_id: str, task: asyncio.Task[None]) -> None:
        del self._departures[replica_id]
        if not task.cancelled() and task.exception() is not None:
            _log.error("replica %s did not end well", replica_id, exc_info=task.exception())
        wish = self._wishes.pop(replica_id, None)
        if wish is not None:
            wish(replica_id)
