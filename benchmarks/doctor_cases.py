"""Which incidents are made: the kinds of faults, decoys, and the mix of both that is drawn by seed.

Played by ``doctor_incidents``.
"""

from dataclasses import dataclass
from random import Random

NS = 1_000_000_000
MODEL = "chat"
METRICS = ("ttft", "tpot", "e2e")
# What a fault must do to a percentile to be an incident: it is left out otherwise.
EFFECT_MIN = 0.20

ENGINE_FAULTS = (
    "queue_backed_up", "noisy_tenant", "long_prompts", "mixed_prompts", "longer_context",
    "output_length", "cache_hits", "engine_slowdown", "slow_replica", "host_cpu", "cold_start",
    "imbalance", "preemption", "admission_limits", "slow_retrieval", "slow_clients",
)  # fmt: skip
VENDOR_FAULTS = ("vendor_throttling", "upstream_failover", "upstream_slow")
DECOYS = ("deploy", "tenants_swap", "longer_prompts_spare", "retrieval_flat")
# What a diagnosis is to name for each fault.
CAUSES = {name: name for name in (*ENGINE_FAULTS, *VENDOR_FAULTS)} | {
    "mixed_prompts": "long_prompts",
    "slow_replica": "engine_slowdown",
    "upstream_slow": "engine_slowdown",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One incident to make: its faults with severities from 0 to 1, and decoys beside them."""

    seed: int
    faults: tuple[tuple[str, float], ...]
    decoys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A word for folders and tables."""
        parts = [f"{name}@{severity:.2f}" for name, severity in self.faults]
        return f"{self.seed}-" + ("+".join((*parts, *self.decoys)) or "null")

    @property
    def is_remote(self) -> bool:
        """Whether a vendor answers."""
        return any(name in VENDOR_FAULTS for name, _ in self.faults) or "vendor" in self.decoys


def cases(first_seed: int, count: int) -> list[Case]:
    """A mix of single faults, doubles and nulls, with and without decoys, drawn by seed."""
    found = []
    kinds = (*ENGINE_FAULTS, *VENDOR_FAULTS)
    for number in range(count):
        seed = first_seed + number
        draw = Random(f"case/{seed}")
        roll = number % 10
        faults: tuple[tuple[str, float], ...] = ()
        if roll < 6:
            faults = ((kinds[(number // 10 * 6 + roll) % len(kinds)], draw.random()),)
        elif roll < 8:
            pair = draw.sample(ENGINE_FAULTS, 2)
            faults = tuple((name, draw.random()) for name in pair)
        decoys = tuple(draw.sample(DECOYS, 1)) if draw.random() < 0.4 else ()
        if not faults and draw.random() < 0.15:
            decoys = ("vendor",)
        found.append(Case(seed, faults, decoys))
    return found
