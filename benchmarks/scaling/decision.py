"""The time of one decision on how many replicas there are to be, at 200 replicas with work."""

import time
from dataclasses import replace
from random import Random
from statistics import median

from sluice.core.events import (
    Arrived,
    ReplicaLimits,
    ReplicaReady,
    ReplicaReported,
    ReplicasPinned,
    Report,
    Tick,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits, ScaleLimits
from sluice.core.request import Request
from sluice.core.supply import scale

REPLICAS = 200
ROUNDS = 2000
SEATS = 11  # each has ten requests: about as many replicas are needed as there are
SECOND = 10**9


def measure() -> None:
    """Print the median and the 99th percentile."""
    names = tuple(f"m-{number}" for number in range(REPLICAS + 20))
    limits = ScaleLimits(replicas_max=len(names), warm=4)
    fleet = Fleet([PoolLimits("m", names, scale=limits)], chance=Random("measure"))
    fleet.handle(ReplicasPinned("m", REPLICAS), 0)
    for name in names[: REPLICAS + 4]:
        fleet.handle(ReplicaReady(name, ReplicaLimits(8192, 16, 40_000, SEATS)), SECOND)
    fleet.handle(ReplicasPinned("m", None), 2 * SECOND)
    report = Report(0, 20, 20_000, 40_000, 0, 0, 0, 0, 2e4, 20_000_000, 0, SEATS)
    report = replace(report, decode_tokens_per_s=3000.0)
    for number, name in enumerate(names[:REPLICAS]):
        fleet.handle(ReplicaReported(name, report), 3 * SECOND + number)
    for number in range(10 * REPLICAS):
        request = Request(str(number), 4 * SECOND + number, tuple(range(100)), 200)
        fleet.handle(Arrived("m", request), 4 * SECOND + number)
    (pool,) = fleet._pools.values()  # noqa: SLF001 - what is measured is inside
    assert pool.scaler is not None
    times = []
    for number in range(ROUNDS):
        now_ns = 5 * SECOND + number * 10 * SECOND
        for name in names[:REPLICAS]:  # before the decision is due
            fleet.handle(ReplicaReported(name, report), now_ns - SECOND)
        began = time.perf_counter_ns()
        scale(pool, pool.scaler, now_ns)
        times.append((time.perf_counter_ns() - began) / 1000)
    times.sort()
    print(
        f"a decision with {REPLICAS} replicas: {median(times):.0f} us, "
        f"p99 {times[int(0.99 * ROUNDS)]:.0f} us"
    )
    fleet.handle(Tick(), 5 * SECOND)
