"""Fleets of incidents and what is asked of them, as faults leave it, drawn by seed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from benchmarks.doctor_cases import NS, Case
from sluice.core.costmodel import Load


@dataclass(frozen=True, slots=True)
class Place:
    """A fleet and its usual traffic, drawn by seed."""

    replicas: int
    rate_rps: float
    prompt: float
    output: float
    spread: float
    system: int
    tenants: int
    retrieval_s: float
    noise: float
    blocks: int
    sequences: int
    before_s: float
    after_s: float
    chunk: int

    @classmethod
    def drawn(cls, seed: int) -> "Place":
        """The place of a seed: what it can take is worked out from its step times."""
        draw = Random(f"place/{seed}")
        replicas = draw.choice((2, 3, 4))
        prompt, output = draw.uniform(200, 900), draw.uniform(20, 50)
        system = int(draw.choice((0, 0.5, 0.6)) * prompt) // 16 * 16
        load = draw.uniform(0.6, 0.9)
        sequences = draw.choice((16, 24, 32))
        rows = 0.6 * sequences
        step_s = Steps().predict_ns(Load(int(rows), int(rows), int(rows * prompt), 0)) / 1e9
        own = prompt - 0.9 * system
        work_s = own * Steps.TOKEN_NS / 1e9 + output * step_s / rows
        rate = load * replicas / work_s
        return cls(
            replicas, rate, prompt, output, draw.uniform(0.3, 0.9), system, draw.choice((3, 5, 8)),
            draw.choice((0.0, 0.04, 0.12)), draw.uniform(0.02, 0.08),
            int(sequences * (prompt + output) * draw.uniform(1.1, 1.8) / 16), sequences,
            420 / rate, 420 / rate, draw.choice((256, 512)),
        )  # fmt: skip

    @classmethod
    def of(cls, case: Case) -> "Place":
        """The place of a case; one that loses its prefix cache has some use of it."""
        place = cls.drawn(case.seed)
        if "cache_hits" in dict(case.faults) and not place.system:
            return replace(place, system=int(0.55 * place.prompt) // 16 * 16)
        return place

    @property
    def fault_ns(self) -> int:
        """When the faults begin."""
        return int(self.before_s * NS)

    @property
    def end_ns(self) -> int:
        """When the last request comes."""
        return int((self.before_s + self.after_s) * NS)


class Steps:
    """Step times of an engine: weights are read once for all tokens until computing takes longer.

    Not of the form that diagnosis fits: the first two terms bend into one another.
    """

    STEP_NS, TOKEN_NS = 18e6, 110e3

    def predict_ns(self, load: Load) -> float:
        """See ``StepTimes``."""
        tokens, rows, context, chunk = load
        bent = float((self.STEP_NS**3 + (self.TOKEN_NS * tokens) ** 3) ** (1 / 3))
        return bent + 250e3 * rows + 90.0 * context + 4.0 * chunk


# ------------------------------------------------------------------------------------ the traffic


@dataclass(slots=True)
class Wish:
    """One request to come: ``at_ns`` by the clock of its client."""

    number: int
    at_ns: int
    shared: int
    own: int
    output: int
    tenant: str
    retrieval_ns: int
    stuck_ns: int = 0


def traffic(place: Place, case: Case, faults: dict[str, float]) -> list[Wish]:
    """All requests, as these faults leave them. Each fault draws from a stream of its own."""
    wishes = _usual(place, case.seed, 0, place.rate_rps, (0, place.end_ns))
    for decoy in case.decoys:
        _decoy(decoy, place, wishes, Random(f"{case.seed}/{decoy}"))
    for name, severity in faults.items():
        change = _CHANGES.get(name)
        if change is not None:
            change(place, wishes, severity, case.seed)
    return sorted(wishes, key=lambda wish: wish.at_ns + wish.retrieval_ns)


def _usual(
    place: Place, seed: int, first: int, rate_rps: float, span_ns: tuple[int, int]
) -> list[Wish]:
    draw = Random(f"{seed}/{first}/traffic")
    found: list[Wish] = []
    at_ns = float(span_ns[0])
    sigma = float(np.sqrt(np.log(1 + place.spread**2)))
    while True:
        at_ns += draw.expovariate(rate_rps) * NS
        if at_ns >= span_ns[1]:
            return found
        own_mean = max(24.0, place.prompt - place.system)
        own = own_mean * draw.lognormvariate(-(sigma**2) / 2, sigma)
        output = place.output * draw.lognormvariate(-(sigma**2) / 2, sigma)
        retrieval = place.retrieval_s * draw.lognormvariate(0, 0.4)
        tenant = f"t{min(int(draw.expovariate(0.7)), place.tenants - 1)}"
        found.append(
            Wish(
                first + len(found), int(at_ns), place.system, max(8, int(own)),
                max(2, int(output)), tenant, int(retrieval * NS),
            )
        )  # fmt: skip


def _late(place: Place, wishes: list[Wish]) -> list[Wish]:
    return [wish for wish in wishes if wish.at_ns >= place.fault_ns]


def _more_demand(place: Place, wishes: list[Wish], severity: float, seed: int) -> None:
    rate = place.rate_rps * (0.2 + 0.7 * severity)
    more = _usual(place, seed, 1_000_000, rate, (place.fault_ns, place.end_ns))
    wishes += more


def _noisy_tenant(place: Place, wishes: list[Wish], severity: float, seed: int) -> None:
    rate = place.rate_rps * (0.3 + 0.7 * severity)
    more = _usual(place, seed, 2_000_000, rate, (place.fault_ns, place.end_ns))
    for wish in more:
        wish.tenant = f"t{place.tenants - 1}"
    wishes += more


def _long_prompts(place: Place, wishes: list[Wish], severity: float, seed: int) -> None:
    draw = Random(f"{seed}/long")
    rate = place.rate_rps * draw.uniform(0.015, 0.05)
    more = _usual(place, seed, 3_000_000, rate, (place.fault_ns, place.end_ns))
    for wish in more:
        wish.own = int(place.prompt * (5 + 11 * severity) * draw.uniform(0.8, 1.3))
    wishes += more


def _mixed_prompts(place: Place, wishes: list[Wish], severity: float, seed: int) -> None:
    """Part of what comes anyway is another kind of work now, with far longer prompts."""
    draw = Random(f"{seed}/mixed")
    share = draw.uniform(0.08, 0.6)
    for wish in _late(place, wishes):
        if draw.random() < share:
            wish.own = int(place.prompt * (2.5 + 13.5 * severity) * draw.uniform(0.8, 1.3))


def _longer_context(place: Place, wishes: list[Wish], severity: float, _seed: int) -> None:
    extra = int(place.prompt * (0.3 + 1.2 * severity))
    for wish in _late(place, wishes):
        wish.own += extra


def _output_length(place: Place, wishes: list[Wish], severity: float, _seed: int) -> None:
    for wish in _late(place, wishes):
        wish.output = int(wish.output * (1.3 + 1.5 * severity))


def _cache_hits(place: Place, wishes: list[Wish], severity: float, seed: int) -> None:
    draw = Random(f"{seed}/salt")
    for wish in _late(place, wishes):
        if draw.random() < 0.5 + 0.5 * severity:
            wish.own, wish.shared = wish.own + wish.shared, 0


def _slow_retrieval(place: Place, wishes: list[Wish], severity: float, seed: int) -> None:
    draw = Random(f"{seed}/retrieval")
    for wish in _late(place, wishes):
        extra = (0.1 + 1.2 * severity) * draw.lognormvariate(0, 0.6)
        wish.retrieval_ns += int(extra * NS)


def _slow_clients(place: Place, wishes: list[Wish], severity: float, seed: int) -> None:
    draw = Random(f"{seed}/clients")
    for wish in _late(place, wishes):
        if draw.random() < 0.05 + 0.2 * severity:
            wish.stuck_ns = int((1.0 + 6.0 * severity) * draw.lognormvariate(0, 0.5) * NS)


_CHANGES: dict[str, Callable[[Place, list[Wish], float, int], None]] = {
    "queue_backed_up": _more_demand,
    "noisy_tenant": _noisy_tenant,
    "long_prompts": _long_prompts,
    "mixed_prompts": _mixed_prompts,
    "longer_context": _longer_context,
    "output_length": _output_length,
    "cache_hits": _cache_hits,
    "slow_retrieval": _slow_retrieval,
    "slow_clients": _slow_clients,
}


def _decoy(name: str, place: Place, wishes: list[Wish], draw: Random) -> None:
    """Changes at the time of the fault that cost nobody anything."""
    late = _late(place, wishes)
    if name == "tenants_swap":
        for wish in late:
            if wish.tenant == "t0" and draw.random() < 0.5:
                wish.tenant = f"t{place.tenants - 1}"
    elif name == "longer_prompts_spare":  # short ones become usual, the long ones stay
        for wish in late:
            wish.own = max(wish.own, int(0.5 * (place.prompt - place.system)))
