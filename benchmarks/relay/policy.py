"""How long the fleet's decisions take for one request, from arrival to its end, at 20 replicas.

A steady state in virtual time: as many requests are accepted at any moment as the case says, one
comes for each that ends. Measured is the time in ``Fleet.handle`` alone: arrival, first
token, a number of further tokens, ending, and the reports of replicas that come meanwhile.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter_ns

from sluice.core.events import (
    Arrived,
    Dispatch,
    Ended,
    FleetEvent,
    Progress,
    Reject,
    ReplicaLimits,
    ReplicaReady,
    ReplicaReported,
    Report,
    Tick,
    WakeAt,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.request import EndReason, PhaseTimes, Request, Usage

REPLICAS, SEATS = 20, 32
_LIMITS = ReplicaLimits(8192, 32, 8192, SEATS)
_PROMPT_TOKENS, _OUTPUT_TOKENS = 400, 60
_REPORT = Report(
    waiting=0,
    running=SEATS // 2,
    blocks_free=4096,
    blocks_total=8192,
    blocks_cached=0,
    preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
    prefill_tokens_per_s=20_000.0,
    step_ns=30_000_000,
)
_REPORT_NS = 250_000_000
_LIFE_NS = 2_000_000_000
_REPEATS, _REQUESTS = 5, 2000
_RATE = 10**9


@dataclass(frozen=True, slots=True)
class Case:
    """``accepted`` requests run or wait at any moment; ``timed`` ones have targets."""

    name: str
    accepted: int
    timed: bool


CASES = (
    Case("half of the places used", REPLICAS * SEATS // 2, timed=False),
    Case("the same, with targets", REPLICAS * SEATS // 2, timed=True),
    Case("all used, 200 wait", REPLICAS * SEATS + 200, timed=False),
    Case("the same, with targets", REPLICAS * SEATS + 200, timed=True),
)


class Stand:
    """A fleet in a steady state. ``used_ns`` is the time spent in it."""

    def __init__(self, case: Case) -> None:
        names = tuple(f"r{number}" for number in range(REPLICAS))
        self.fleet = Fleet(
            (PoolLimits("m", names, queue_places_max=64),),
            chance=Random(1),
            tenants=(TenantLimits("t", _RATE, _RATE * 1000, 10**6),),
        )
        self.case = case
        self.names = names
        self.now_ns = 0
        self.used_ns = 0
        self.running: deque[str] = deque()
        self.unbegun: deque[str] = deque()
        self.wake_ns: int | None = None
        self.number = self.refused = self.reported = 0
        self.handle(Tick())
        for name in names:
            self.handle(ReplicaReady(name, _LIMITS))

    def handle(self, event: FleetEvent) -> None:
        """Let the fleet take an event, and take the effects that matter here."""
        began_ns = perf_counter_ns()
        effects = self.fleet.handle(event, self.now_ns)
        self.used_ns += perf_counter_ns() - began_ns
        for effect in effects:
            match effect:
                case Dispatch(request_id):
                    self.running.append(request_id)
                    self.unbegun.append(request_id)
                case Reject():
                    self.refused += 1
                case WakeAt(at_ns):
                    self.wake_ns = at_ns
                case _:
                    pass

    def arrive(self) -> None:
        """A request comes, with a prompt that shares its beginning with some others."""
        number = self.number = self.number + 1
        prompt = (*range(number % 50, number % 50 + 64), *range(number, number + 336))
        due_ns = self.now_ns + 10 * _LIFE_NS if self.case.timed else None
        request = Request(
            f"q{number}",
            self.now_ns,
            prompt,
            _OUTPUT_TOKENS,
            tenant="t",
            ttft_due_ns=due_ns,
            tpot_ns=_LIFE_NS // 20 if self.case.timed else None,
            body_bytes=2000,
        )
        self.handle(Arrived("m", request))

    def turn(self, tokens: int) -> None:
        """One request comes, one gets its first token, one ends with its last ``tokens``."""
        self.now_ns += _LIFE_NS // self.case.accepted
        if self.wake_ns is not None and self.wake_ns <= self.now_ns:
            self.wake_ns = None
            self.handle(Tick())
        while self.reported < self.now_ns * REPLICAS // _REPORT_NS:
            self.reported += 1
            name = self.names[self.reported % REPLICAS]
            self.handle(ReplicaReported(name, _REPORT))
        self.arrive()
        while len(self.unbegun) > REPLICAS:
            self.handle(Progress(self.unbegun.popleft(), 1))
        first = self.running.popleft()
        for _ in range(tokens):
            self.handle(Progress(first, 1))
        usage = Usage(_PROMPT_TOKENS, 0, _OUTPUT_TOKENS)
        phases = PhaseTimes(prefill_ns=_LIFE_NS // 10, decode_ns=_LIFE_NS * 9 // 10)
        self.handle(Ended(first, EndReason.STOP, usage, phases))


def life_us(case: Case, tokens: int) -> list[float]:
    """Microseconds of one request's life, mean of many, for each repeat."""
    stand, found = Stand(case), []
    for _ in range(case.accepted):
        stand.now_ns += 1000
        stand.arrive()
    for _ in range(_REPEATS):
        for _ in range(_REQUESTS // 10):
            stand.turn(tokens)
        stand.used_ns = 0
        for _ in range(_REQUESTS):
            stand.turn(tokens)
        found.append(stand.used_ns / 1000 / _REQUESTS)
    if stand.refused:
        raise SystemExit(f"{case.name}: {stand.refused} requests were refused")
    return found


def policy_table() -> tuple[str, Mapping[str, Sequence[float]]]:
    """The table, and its figures by case."""
    lines = [
        f"| policy: {REPLICAS} replicas, {SEATS} places each | µs a request | µs a further token |",
        "|---|--:|--:|",
    ]
    figures = {}
    for case in CASES:
        found = life_us(case, 0)
        token_us = (median(life_us(case, 20)) - median(found)) / 20
        spread = f"({min(found):.1f}–{max(found):.1f})"
        lines.append(f"| {case.name} | {median(found):.1f} {spread} | {token_us:.2f} |")
        figures[f"{case.accepted} accepted, targets {case.timed}"] = found
    return "\n".join(lines), figures
