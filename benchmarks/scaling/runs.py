"""One run: a scene, a cold start and a policy in the virtual fleet."""

import csv
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks.scaling.baselines import (
    Knative,
    LastValue,
    Law,
    Oracle,
    RayServe,
    Seen,
    hpa_concurrency,
    keda_waiting,
)
from benchmarks.scaling.scenes import Part, Scene
from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import SloSection
from sluice.core import scaling
from sluice.core.admission import NS_PER_S
from sluice.core.events import ReplicasPinned
from sluice.core.lifecycle import ReplicaState
from sluice.core.limits import PoolLimits, ScaleLimits
from sluice.planner.simulation import SimulatedFleet, SimulatedPool, Simulation, Span
from sluice.workload import asks as values
from sluice.workload.asks import Ask, own_text

REPLICAS_MAX = 40
MODEL = "model"
# Cold starts spread as published ones do.
COLD_SIGMA = 0.35
WAKE_S = 2.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Who decides: one of the laws, or sluice with these limits."""

    name: str
    limits: Mapping[str, Any] | None = None


NO_OVERRIDE = "sluice, no override"
OURS = (
    Policy("sluice", {"warm": 1}),
    Policy("sluice, no warm pool", {}),
    Policy("sluice, no forecast", {"warm": 1, "quantile": 0.0}),
    Policy(NO_OVERRIDE, {"warm": 1}),
)
BASELINES = (
    "hpa 50%", "hpa 70%", "keda waiting", "knative", "ray, target 2", "ray, 70%", "last value",
)  # fmt: skip


def policies() -> list[Policy]:
    """All that are compared."""
    return [*OURS, *(Policy(name) for name in BASELINES), Policy("oracle")]


@dataclass(slots=True)
class Starts:
    """How long replicas take: the n-th start takes as long under every policy."""

    cold_s: float
    seed: int
    begun: int = 0

    def load_ns(self, replica_id: str, now_ns: int) -> int:  # noqa: ARG002
        """See ``virtual_fleet.Starting``."""
        if now_ns == 0:
            return 0
        self.begun += 1
        drawn = Random(f"{self.seed}/{self.begun}").lognormvariate(0.0, COLD_SIGMA)
        return round(self.cold_s * drawn * NS_PER_S)

    def wake_ns(self, replica_id: str, now_ns: int) -> int:  # noqa: ARG002
        """See ``virtual_fleet.Starting``."""
        return round(WAKE_S * NS_PER_S)


@dataclass(slots=True)
class Result:
    """What came of one run."""

    scene: str
    cold_s: float
    policy: str
    requests: int
    attainment: float
    refused: int
    failed: int
    hours: float
    warm_hours: float
    starts: int
    flips: int
    least: int
    most: int
    cpu_s: float
    numbers: list[tuple[float, int]] = field(default_factory=list)


class Load:
    """The work of a part of a trace, between any two times."""

    def __init__(self, part: Part) -> None:
        self._times = [ask.at_ns / NS_PER_S for ask in part.drawn]
        works = [part.scene.work_s(ask) for ask in part.drawn]
        self._sums = [0.0, *accumulate(works)]

    def between(self, from_s: float, to_s: float) -> float:
        """Replica seconds that arrive from one time to another."""
        first, last = (bisect_left(self._times, at_s) for at_s in (from_s, to_s))
        return self._sums[last] - self._sums[first]


def law_of(name: str, part: Part, load: Load, cold_s: float) -> Law:
    """A baseline by its name."""
    seats = part.scene.seats
    match name:
        case "hpa 50%":
            return hpa_concurrency(seats, 0.5)
        case "hpa 70%":
            return hpa_concurrency(seats, 0.7)
        case "keda waiting":
            return keda_waiting()
        case "knative":
            return Knative(seats)
        case "ray, target 2":
            return RayServe(2.0)
        case "ray, 70%":
            return RayServe(0.7 * seats)
        case "last value":
            return LastValue(load.between)
        case "oracle":
            return Oracle(load.between, cold_s, part.scene.ttft_s)
    raise ValueError(name)


def fleet_of(scene: Scene, scale: ScaleLimits, starts: Starts) -> SimulatedFleet:
    """Replicas for a scene."""
    slo = {"targets": SloSection(ttft_s=scene.ttft_s, tpot_s=scene.tpot_s)}
    names = tuple(f"{MODEL}-{number}" for number in range(scale.replicas_max))
    pool = SimulatedPool(
        PoolLimits(MODEL, names, scale=scale),
        scene.batching,
        scene.coefficients,
        ServiceClasses(slo, default="targets"),
    )
    return SimulatedFleet((pool,), starting=starts)


def run(part: Part, cold_s: float, policy: Policy, seed: int) -> Result:
    """Play the part under the policy, from as many replicas as its first five minutes need."""
    began_s, load = time.process_time(), Load(part)
    first = max(1, ceil(load.between(0.0, 300.0) / 300.0 / 0.85))
    limits = ScaleLimits(
        replicas_max=REPLICAS_MAX, start_ns=round(cold_s * NS_PER_S), **(policy.limits or {})
    )
    starts = Starts(cold_s, seed)
    simulation = Simulation(
        fleet_of(part.scene, limits, starts),
        seed,
        Span(len(part.drawn), silence_ns_max=2 * NS_PER_S),
        None,
    )
    virtual = simulation.virtual
    virtual.at(0, ReplicasPinned(MODEL, first))
    virtual.driver.call_at(1, lambda: _unmeasured(simulation, limits))
    if policy.limits is not None:
        virtual.at(1, ReplicasPinned(MODEL, None))
    else:
        _follow(simulation, law_of(policy.name, part, load, cold_s), part.scene.seats)
    never = 10**9 if policy.name == NO_OVERRIDE else scaling.LATE_PERIODS
    with patch.object(scaling, "LATE_PERIODS", never):
        outcome = simulation.run(part)
    numbers = [(one.at_s, one.number) for one in outcome.scalings if one.at_s > 0.0]
    counts = [number for _, number in numbers] or [first]
    return Result(
        part.scene.name, cold_s, policy.name, outcome.whole.requests, outcome.attainment,
        outcome.whole.refused, outcome.whole.failed, outcome.replica_hours, outcome.warm_hours,
        starts.begun, outcome.direction_changes, min(counts), max(counts),
        time.process_time() - began_s, numbers,
    )  # fmt: skip


def _unmeasured(simulation: Simulation, limits: ScaleLimits) -> None:
    """Forget how long the first replicas took: that they serve at once is no measurement."""
    scaler = simulation.virtual._fleet._pools[MODEL].scaler  # noqa: SLF001
    assert scaler is not None
    scaler.starts = scaling.Times(limits.start_ns)


def _follow(simulation: Simulation, law: Law, seats: int) -> None:
    """Ask a law at its interval, and let the fleet do what it says."""
    virtual = simulation.virtual
    asked = [0]

    def look() -> None:
        now_ns = virtual.driver.now_ns
        (pool,) = virtual.pools()
        coming = (ReplicaState.READY, ReplicaState.STARTING, ReplicaState.BACKOFF)
        replicas = [one for one in pool.replicas if one.state in coming]
        ready = [one for one in replicas if one.is_serving]
        seen = Seen(
            now_ns / NS_PER_S,
            len(replicas),
            len(ready),
            sum(one.places for one in ready),
            pool.waiting,
            seats,
        )
        number = max(1, min(REPLICAS_MAX, law.wanted(seen)))
        if number != len(replicas) or number != asked[0]:
            asked[0] = number
            virtual.at(now_ns, ReplicasPinned(MODEL, number))
        virtual.driver.call_at(now_ns + round(law.every_s * NS_PER_S), look)

    virtual.driver.call_at(round(law.every_s * NS_PER_S), look)


def kept(part: Part, folder: Path) -> Part:
    """The part with its requests from ``folder``, where they are drawn already, else put there."""
    path = folder / f"{part.scene.name}-{part.seed}.csv"
    if path.exists() and not part.scene.file.startswith("mooncake"):
        with path.open(newline="") as file:
            rows = [[int(value) for value in row] for row in csv.reader(file)]
        drawn = [
            Ask(number, at_ns, (values.Part(own_text(number), prompt),), output)
            for number, (at_ns, prompt, output) in enumerate(rows)
        ]
        part.__dict__["drawn"] = drawn
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(
                (ask.at_ns, ask.prompt_tokens, ask.output_tokens) for ask in part.drawn
            )
    return part
