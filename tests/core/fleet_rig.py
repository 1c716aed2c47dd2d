"""A fleet that a test feeds with events, at times of its own."""

import random
from dataclasses import replace

from sluice.core.admission import NS_PER_S
from sluice.core.events import (
    Arrived,
    Dispatch,
    Ended,
    FleetEffect,
    FleetEvent,
    Reject,
    ReplicaLimits,
    ReplicaReady,
    Report,
    Tick,
    WakeAt,
)
from sluice.core.fleet import Fleet
from sluice.core.fleet_replica import RestartLimits
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.pool_view import PoolView
from sluice.core.request import EndReason, PhaseTimes, Request, Usage

LIMITS = ReplicaLimits(context_tokens_max=2048, block_size=32, blocks_total=256, sequences_max=1)


def seconds(s: float) -> int:
    return round(s * NS_PER_S)


def request(name: str, prompt: int = 10, output: int = 20, **fields: object) -> Request:
    made = Request(name, arrived_ns=0, prompt=tuple(range(prompt)), output_tokens_max=output)
    return replace(made, **fields)  # type: ignore[arg-type]


def report(**fields: object) -> Report:
    zero = Report(0, 0, 256, 256, 0, 0, 0, 0, 1000.0, 0)
    return replace(zero, **fields)  # type: ignore[arg-type]


class Driver:
    """Feeds a fleet and keeps its effects; time is set by the test."""

    def __init__(
        self,
        *pools: PoolLimits,
        tenants: tuple[TenantLimits, ...] = (),
        restarts: RestartLimits | None = None,
    ) -> None:
        self.fleet = Fleet(pools, chance=random.Random(1), tenants=tenants, restarts=restarts)
        self.now_ns = 0
        self.at(0, Tick())

    def at(self, time_s: float, *events: FleetEvent) -> list[FleetEffect]:
        """Handle events at a time; gives the effects without wake-ups."""
        self.now_ns = seconds(time_s)
        effects = [e for event in events for e in self.fleet.handle(event, self.now_ns)]
        return [effect for effect in effects if not isinstance(effect, WakeAt)]

    def arrive(self, time_s: float, *requests: Request, model: str = "m") -> list[FleetEffect]:
        return self.at(time_s, *(Arrived(model, request) for request in requests))

    def complete(self, time_s: float, name: str, service_s: float = 2.0) -> list[FleetEffect]:
        """End a request whose decode took the whole of ``service_s``."""
        usage = Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=20)
        phases = PhaseTimes(decode_ns=seconds(service_s))
        return self.at(time_s, Ended(name, EndReason.STOP, usage, phases))

    @property
    def pool(self) -> PoolView:
        return self.fleet.pools(self.now_ns)[0]


def one_slot(queue: int = 2, limits: ReplicaLimits = LIMITS) -> Driver:
    driver = Driver(PoolLimits("m", ("m-0",), queue_places_max=queue))
    driver.at(0, ReplicaReady("m-0", limits))
    return driver


def two_replicas(sequences: int = 8, **restarts: int) -> Driver:
    driver = Driver(PoolLimits("m", ("a", "b")), restarts=RestartLimits(**restarts))
    limits = replace(LIMITS, sequences_max=sequences)
    driver.at(0, ReplicaReady("a", limits), ReplicaReady("b", limits))
    return driver


def dispatched(effects: list[FleetEffect]) -> list[tuple[str, str]]:
    return [(e.request_id, e.replica_id) for e in effects if isinstance(e, Dispatch)]


def rejects(effects: list[FleetEffect]) -> list[Reject]:
    return [effect for effect in effects if isinstance(effect, Reject)]
