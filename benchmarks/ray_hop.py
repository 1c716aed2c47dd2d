"""What Ray adds to a first token: ``python benchmarks/ray_hop.py [--requests N] [--json]``.

The same gateway code with the same simulated model, once over child processes and once over actors
on a Ray cluster of three nodes on this machine. Requests alternate between the two: the noise of
the machine meets both. Prints the time to first token and the gap between tokens, by placement, and
the difference of the medians with a 95 % interval (bootstrap over pairs). For comparison: a bare
call of an actor, which is what a stream over Ray's own calls would pay for each chunk.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from sluice.cluster.gateway import LocalGateway
from sluice.config.sections import JournalSection, ModelSection, PlacementSection, ReplicaNeeds
from sluice.config.settings import Settings
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.generation import Call, Delta, TokenPrompt
from sluice.wiring.gateway import make_gateway, prepare
from sluice.wiring.remote import RemoteIds
from tests.cluster.placement.ray_rig import SmallCluster, small_cluster

_PROMPT_TOKENS, _OUTPUT_TOKENS = 100, 16
_BOOTSTRAPS = 2000


def gateway_on(kind: str, cluster: SmallCluster) -> LocalGateway:
    """A gateway with one replica, in this placement."""
    model = ModelSection(source="sim:llama-3.1-8b@h100", needs=ReplicaNeeds(cpus=1.0))
    settings = Settings(
        models={"m": model},
        placement=PlacementSection(
            kind="ray" if kind == "ray" else "local", ray_address=cluster.address, name="hop"
        ),
        journal=JournalSection(enabled=False),
    )
    prepared = prepare(settings.models, settings.catalogue, _tell_nothing)
    return make_gateway(settings, prepared, RemoteIds())


def _tell_nothing(_what: str, _done: int, _whole: int | None) -> None:
    """Simulated models are prepared at once."""


async def one(gateway: LocalGateway, number: int) -> tuple[float, float]:
    """Milliseconds to the first token of a request, and of the mean gap after it."""
    prompt = TokenPrompt(tuple((number * 31 + i) % 1000 for i in range(_PROMPT_TOKENS)))
    sent_ns = monotonic_ns()
    call = Call(
        id=f"r{number}", model="m", arrived_ns=sent_ns, prompt=prompt,
        output_tokens_max=_OUTPUT_TOKENS, likeness=number,
    )  # fmt: skip
    times = [
        monotonic_ns() async for piece in await gateway.generate(call) if isinstance(piece, Delta)
    ]
    gaps = (times[-1] - times[0]) / max(1, len(times) - 1)
    return (times[0] - sent_ns) / 1e6, gaps / 1e6


async def measure(cluster: SmallCluster, requests: int) -> dict[str, Any]:
    """Both placements in turn."""
    gateways = {kind: gateway_on(kind, cluster) for kind in ("local", "ray")}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in gateways}
    try:
        for gateway in gateways.values():
            await gateway.start()
        order = list(gateways)
        for number in range(requests + 10):
            order.reverse()
            for kind in order:
                measured = await one(gateways[kind], number)
                if number >= 10:
                    found[kind].append(measured)
    finally:
        for gateway in gateways.values():
            await gateway.close()
    added = [ray[0] - local[0] for ray, local in zip(found["ray"], found["local"], strict=True)]
    return {
        "requests": requests,
        **{kind: _told(rows) for kind, rows in found.items()},
        "added_ttft_ms": _interval(added),
        "actor_call_ms": _actor_call_ms(),
    }


def _told(rows: Sequence[tuple[float, float]]) -> dict[str, float]:
    ttft = sorted(row[0] for row in rows)
    return {
        "ttft_ms_p50": statistics.median(ttft),
        "ttft_ms_p99": ttft[int(len(ttft) * 0.99) - 1],
        "gap_ms_p50": statistics.median(row[1] for row in rows),
    }


def _interval(added: Sequence[float]) -> dict[str, float]:
    """The median of the differences, and where it lies with 95 %."""
    chance = random.Random(1)
    medians = sorted(
        statistics.median(chance.choices(added, k=len(added))) for _ in range(_BOOTSTRAPS)
    )
    return {
        "median": statistics.median(added),
        "low": medians[int(_BOOTSTRAPS * 0.025)],
        "high": medians[int(_BOOTSTRAPS * 0.975)],
    }


def _actor_call_ms() -> float:
    import ray  # noqa: PLC0415 - started by the measurement

    class Echo:
        def say(self) -> int:
            return 1

    actor: Any = ray.remote(Echo).options(num_cpus=0).remote()
    ray.get(actor.say.remote())
    times = []
    for _ in range(200):
        begun = time.perf_counter()
        ray.get(actor.say.remote())
        times.append((time.perf_counter() - begun) * 1e3)
    ray.kill(actor)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with small_cluster() as cluster:
        cluster.add()
        cluster.add()
        result = asyncio.run(measure(cluster, options.requests))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print("| replica in | TTFT p50, ms | TTFT p99, ms | gap p50, ms |\n|---|---|---|---|")
    for kind, name in (("local", "a child process"), ("ray", "an actor on Ray")):
        row = result[kind]
        cells = (row["ttft_ms_p50"], row["ttft_ms_p99"], row["gap_ms_p50"])
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    added = result["added_ttft_ms"]
    print(f"\nadded to TTFT: {added['median']:.2f} ms ({added['low']:.2f} to {added['high']:.2f})")
    print(f"one call of an actor: {result['actor_call_ms']:.2f} ms")


if __name__ == "__main__":
    main()
