"""How fast virtual time is: simulated requests per minute of one core, and where the time goes.

Run with ``python benchmarks/virtual.py [REQUESTS]``. All policy runs: fleet, replicas, virtual
driver, simulated executors. Two loads: 500 tokens in and 150 out at steady load, and 4,096 in on a
fleet that takes 1,000 requests per second.
"""

import sys
from collections.abc import Iterator, Sequence
from cProfile import Profile
from dataclasses import dataclass
from pathlib import Path
from pstats import Stats
from random import Random
from resource import RUSAGE_SELF, getrusage
from time import process_time

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.events import Arrived, FleetEffect, FleetEvent, Reject, ReplicaEffect, ReplicaEvent
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits
from sluice.executors.base import StepExecutor
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.virtual import Stretching
from sluice.runtime.virtual_fleet import VirtualFleet
from sluice.workload.asks import Part, own_text
from sluice.workload.prompts import Prompts

# Nanoseconds of an 8B model on one H100, about: reading the weights, multiplying, reading KV.
GPU = Coefficients(
    step_ns=7e6, token_ns=18e3, row_ns=20e3, decode_context_ns=45.0, chunk_context_ns=0.3
)


SILENCE_NS_MAX = 250_000_000  # as the planner simulates


@dataclass(frozen=True, slots=True)
class Case:
    """One load on one fleet."""

    name: str
    replicas: int
    rate_rps: float
    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int = 2048
    sequences_max: int = 256
    blocks_total: int = 7_500


CASES = (
    Case("500 in, 150 out", 8, 120.0, 500, 150),
    Case("4,096 in, 200 out, 1,000/s", 160, 1000.0, 4096, 200),
)


class Counting:
    """Counts endings and refusals."""

    def __init__(self) -> None:
        self.refused = 0

    def fleet_event(self, event: FleetEvent, _: int, effects: Sequence[FleetEffect]) -> None:
        """See ``Watcher``."""
        if isinstance(event, Arrived):
            self.refused += any(isinstance(effect, Reject) for effect in effects)

    def replica_event(
        self, replica_id: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> None:
        """See ``Watcher``."""


def fleet_of(case: Case, counting: Counting) -> VirtualFleet:
    """The fleet of a case, nothing has happened yet."""
    limits = BatchingLimits(
        8192,
        64,
        case.blocks_total,
        sequences_max=case.sequences_max,
        chunk_tokens_max=case.chunk_tokens,
        step_ns_max=80_000_000,
    )

    def make(_: str) -> tuple[Replica, StepExecutor]:
        replica = Replica(limits, FixedCostModel(GPU))
        return replica, SimulatedExecutor(limits.replica, GPU, checked=False)

    names = tuple(f"m-{number}" for number in range(case.replicas))
    return VirtualFleet(
        Fleet([PoolLimits("m", names)], chance=Random(1)),
        make,
        watcher=counting,
        stretching=Stretching(silence_ns_max=SILENCE_NS_MAX),
    )


def requests(case: Case, count: int) -> Iterator[tuple[int, Request]]:
    """Poisson arrivals; prompts have nothing in common, and are made as the planner makes them."""
    random, at_ns, prompts = Random(2), 1_000_000, Prompts()
    for number in range(count):
        at_ns += int(random.expovariate(case.rate_rps) * 1e9)
        prompt = prompts.tokens((Part(own_text(number), case.prompt_tokens),))
        output = round(case.output_tokens * random.uniform(0.5, 1.5))
        yield (
            at_ns,
            Request(
                f"r{number}",
                at_ns,
                prompt,
                output,
                ttft_due_ns=at_ns + 2 * 10**9,
                tpot_ns=60_000_000,
            ),
        )


def run(case: Case, count: int) -> tuple[float, VirtualFleet, Counting]:
    """Processor seconds of a run of ``count`` requests."""
    counting = Counting()
    fleet = fleet_of(case, counting)
    arrivals = requests(case, count)

    def feed() -> None:
        found = next(arrivals, None)
        if found is not None:
            at_ns, request = found
            fleet.arrive(at_ns, "m", request)
            fleet.driver.call_at(at_ns, feed)

    feed()
    began_s = process_time()
    fleet.run()
    return process_time() - began_s, fleet, counting


def main() -> None:
    """Print the table, and the profile by layer."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    for case in CASES:
        spent_s, fleet, counting = run(case, count)
        driver = fleet.driver
        peak_mib = getrusage(RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{case.name:<30} {count / spent_s * 60:>12,.0f} requests/min "
            f"{spent_s / count * 1e6:>7.0f} us/request  {driver.steps / count:>6.1f} steps "
            f"{driver.events / count:>6.1f} events per request, {counting.refused} refused, "
            f"virtual {driver.now_ns / 1e9:.1f} s, peak {peak_mib:.0f} MiB"
        )
        profile = Profile()
        profile.runcall(run, case, max(1, count // 4))
        by_layer(profile)


LAYERS = {
    "driver": ("virtual", "virtual_fleet"),
    "executor": ("simulated", "base"),
    "replica": (
        "replica", "batching", "batch", "policies", "residency", "seats", "sequence", "roster",
        "kv", "lengths", "lifecycle", "costmodel", "expiries", "step",
    ),
    "fleet": (
        "fleet", "fleet_replica", "pools", "door", "queue", "routing", "service", "feasibility",
        "margins", "returns", "bookings", "tenants", "attempts", "gate", "accepted", "admission",
        "ladder", "retries", "window", "quota", "breaker",
    ),
    "shares of tenants": ("fairness",),
}  # fmt: skip


def by_layer(profile: Profile) -> None:
    """Own time by layer; what Python itself does for them is apart."""
    names = {module: layer for layer, modules in LAYERS.items() for module in modules}
    spent: dict[str, float] = {}
    stats = Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, _), (_, _, own_s, _, _) in stats.items():
        path = Path(file)
        name = names.get(path.stem, "rest of sluice") if "sluice" in path.parts else "built in"
        spent[name] = spent.get(name, 0.0) + own_s
    whole = sum(spent.values())
    top = sorted(spent.items(), key=lambda item: -item[1])
    print("  " + ", ".join(f"{name} {own_s / whole:.0%}" for name, own_s in top))


if __name__ == "__main__":
    main()
