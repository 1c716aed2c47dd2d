"""Plays a world in virtual time, with the server's own policy: what latencies would have been.

Called by ``shares`` with what happened and with what would have happened without a cause. Nothing
is judged here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np

from sluice.core.costmodel import Coefficients, FixedCostModel, Load
from sluice.core.events import (
    Cancelled,
    Ended,
    FleetEffect,
    FleetEvent,
    Progress,
    ReplicaDraining,
    ReplicaEffect,
    ReplicaEvent,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.request import COMPLETE, Request, SequenceId
from sluice.core.roster import BatchingLimits
from sluice.doctor.columns import Floats
from sluice.doctor.world import ReplicaWorld, World
from sluice.executors.base import StepExecutor
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.virtual import AT_ONCE
from sluice.runtime.virtual_fleet import VirtualFleet
from sluice.workload.asks import Part, own_text, shared_text
from sluice.workload.prompts import Prompts

_POOL = "pool"
_END_TOKEN = 0
# Chunks at which replicas tell their speed of prefill.
_CHUNK_TOKENS = 256


@dataclass(frozen=True, eq=False, slots=True)
class Played:
    """Seconds by row of the world; NaN where there was no such time."""

    ttft: Floats
    tpot: Floats
    e2e: Floats

    def of(self, metric: str) -> Floats:
        """One of them."""
        found: Floats = getattr(self, metric)
        return found


class Player:
    """Plays worlds; the texts of prompts are made once."""

    def __init__(self) -> None:
        self._prompts = Prompts()

    def play(self, world: World) -> Played:
        """Play until all requests have ended."""
        return _Run(world, self._prompts).played()


@dataclass(slots=True, eq=False)
class _Pace:
    """Step times of one replica at the moment."""

    coefficients: Coefficients
    factor: float = 1.0

    def predict_ns(self, load: Load) -> float:
        return self.coefficients.predict_ns(load) * self.factor

    def turn(self, factor: float) -> None:
        """Another factor holds from here on."""
        self.factor = factor


class _Run:
    """One play of one world."""

    def __init__(self, world: World, prompts: Prompts) -> None:
        self._world, self._prompts = world, prompts
        count = len(world.rows)
        self._first_ns = np.full(count, np.nan)
        self._ended_ns = np.full(count, np.nan)
        self._made = np.zeros(count)
        self._replicas = {replica.name: replica for replica in world.replicas}
        self._paces = {r.name: _Pace(r.coefficients) for r in world.replicas}
        self._virtual = VirtualFleet(
            Fleet(self._pools(), chance=Random(1)),
            self._make,
            end_tokens=frozenset({_END_TOKEN}),
            watcher=self,
            stretching=AT_ONCE,
        )
        for replica in world.replicas:
            self._plan(replica)

    def played(self) -> Played:
        """See ``Player.play``."""
        self._virtual.feed(self._arrivals())
        for row in np.flatnonzero(np.isfinite(self._world.left_ns) & self._world.kept):
            self._virtual.at(int(self._world.left_ns[row]), Cancelled(str(row)))
        self._virtual.run()
        arrived_ns = self._world.arrived_ns
        ttft = (self._first_ns - arrived_ns) / 1e9
        with np.errstate(invalid="ignore", divide="ignore"):
            after = (self._ended_ns - self._first_ns) / 1e9
            tpot = np.where(self._made > 1, after / (self._made - 1), np.nan)
        return Played(ttft, tpot, (self._ended_ns - arrived_ns) / 1e9)

    def _pools(self) -> list[PoolLimits]:
        names = tuple(self._replicas)
        places = self._world.queue_places_max
        if self._world.pinned:
            return [PoolLimits(name, (name,), queue_places_max=places) for name in names]
        return [PoolLimits(_POOL, names, queue_places_max=places)]

    def _plan(self, replica: ReplicaWorld) -> None:
        """Let its speed and its absences happen."""
        driver, pace = self._virtual.driver, self._paces[replica.name]
        for at_ns, factor in replica.factors:
            driver.call_at(int(at_ns), partial(pace.turn, factor))
        for gone_ns, back_ns in replica.away:
            at_ns = int(gone_ns)
            if gone_ns > 0.0:
                self._virtual.lose(at_ns, replica.name)
            self._virtual.at(at_ns, ReplicaDraining(replica.name, on=True))
            if np.isfinite(back_ns):
                self._virtual.at(int(back_ns), ReplicaDraining(replica.name, on=False))

    def _make(self, replica_id: str) -> tuple[Replica, StepExecutor]:
        limits, pace = self._limits(replica_id), self._paces[replica_id]
        executor = SimulatedExecutor(
            limits.replica, pace, output_tokens=self._output_tokens, checked=False
        )
        return Replica(limits, FixedCostModel(pace, chunk_tokens=_CHUNK_TOKENS)), executor

    def _limits(self, replica_id: str) -> BatchingLimits:
        """What holds at its start; one that comes back has what it had when it was ready."""
        now_ns = self._virtual.driver.now_ns if hasattr(self, "_virtual") else 0
        replica = self._replicas[replica_id]
        back_ns = [back for gone, back in replica.away if gone <= now_ns < back]
        at_ns = max([now_ns, *(back for back in back_ns if np.isfinite(back))])
        held = [limits for since_ns, limits in replica.limits if since_ns <= at_ns]
        return held[-1] if held else replica.limits[0][1]

    def _output_tokens(self, sequence: SequenceId) -> int | None:
        return int(self._world.output[int(sequence.request_id)])

    def _arrivals(self) -> Iterator[tuple[int, str, Request]]:
        world = self._world
        order = np.argsort(world.seen_ns, kind="stable")
        for row in order:
            if world.kept[row]:
                yield int(world.seen_ns[row]), self._pool_of(int(row)), self._request(int(row))

    def _pool_of(self, row: int) -> str:
        if not self._world.pinned:
            return _POOL
        number = int(self._world.replica[row])
        return self._world.replicas[max(0, number)].name

    def _request(self, row: int) -> Request:
        world = self._world
        room = max(1, world.replicas[0].limits[0][1].context_tokens_max - 1)
        prompt = int(min(world.prompt[row], room))
        shared = int(min(world.cached[row], prompt - 1))
        parts = [Part(shared_text(int(world.tenant[row])), shared)] if shared > 0 else []
        parts.append(Part(own_text(row), prompt - shared))
        arrived_ns = int(world.arrived_ns[row])
        made = Request(
            id=str(row),
            arrived_ns=arrived_ns,
            prompt=self._prompts.tokens(tuple(parts)),
            output_tokens_max=int(max(world.output_max[row], world.output[row])),
            tenant=world.tenants[int(world.tenant[row])],
        )
        like = world.classes.get(int(world.slo_class[row]))
        return made if like is None else _in_class(made, like)

    # ---------------------------------------------------------------------------------- watching

    def fleet_event(
        self,
        event: FleetEvent,
        now_ns: int,
        effects: Sequence[FleetEffect],  # noqa: ARG002 - see Watcher
    ) -> None:
        """See ``virtual_fleet.Watcher``."""
        if isinstance(event, Progress):
            row = int(event.request_id)
            if np.isnan(self._first_ns[row]):
                self._first_ns[row] = now_ns
        elif isinstance(event, Ended):
            row = int(event.request_id)
            self._made[row] = event.usage.completion_tokens
            if event.reason in COMPLETE:
                self._ended_ns[row] = now_ns

    def replica_event(
        self, replica_id: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> None:
        """See ``virtual_fleet.Watcher``; the fleet is told all that counts here."""


def _in_class(made: Request, like: Request) -> Request:
    """The request with the targets, and what may become of it, that one of its class had."""

    def since(due_ns: int | None) -> int | None:
        return None if due_ns is None else made.arrived_ns + due_ns - like.arrived_ns

    return replace(
        made,
        tier=like.tier,
        weight=like.weight,
        slo_class=like.slo_class,
        ttft_due_ns=since(like.ttft_due_ns),
        tpot_ns=like.tpot_ns,
        quantile=like.quantile,
        queue_due_ns=since(like.queue_due_ns),
        overload=like.overload,
        shorten_tokens=like.shorten_tokens,
        body_bytes=like.body_bytes,
    )
