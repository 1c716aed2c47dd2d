"""Open-loop load on a fleet in virtual time: clients that retry or do not, and what came of each.

Used by ``test_overload_*``. A call is one wish of a client; each of its tries is a request.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil

from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.core.events import (
    Cancelled,
    Dispatch,
    Emit,
    Ended,
    Fail,
    Reject,
    ReplicaLimits,
    Retarget,
    Shorten,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.request import COMPLETE, Request
from sluice.core.roster import BatchingLimits
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.virtual_fleet import VirtualFleet

MS = 1_000_000
S = 1_000_000_000
TTFT_NS = 2 * S
TPOT_NS = 60 * MS
BLOCK = 32
# Of the order of a large GPU: a row more or less makes little difference to a step.
GPU = Coefficients(20e6, 0.05e6, 0.05e6, 20.0, 2.0)


@dataclass
class Call:
    """One wish: its tries, and the times and tokens of the one that was served."""

    name: str
    model: str
    request: Request
    length: int
    retries_max: int
    tries: int = 0
    told_s: list[float] = field(default_factory=list)
    outcome: str = ""
    degraded: tuple[str, ...] = ()
    arrived_ns: int = 0  # of the last try
    dispatched_ns: int | None = None
    first_ns: int | None = None
    ended_ns: int | None = None
    tokens: int = 0

    @property
    def ttft_ns(self):
        assert self.first_ns is not None
        return self.first_ns - self.arrived_ns

    @property
    def tpot_ns(self):
        assert self.first_ns is not None
        assert self.ended_ns is not None
        return (self.ended_ns - self.first_ns) / max(1, self.tokens - 1)

    @property
    def good(self):
        return self.outcome in COMPLETE and self.ttft_ns <= TTFT_NS and self.tpot_ns <= TPOT_NS


class Stalling:
    """An executor whose step takes ``stall_ns`` longer where it begins after ``stall_at_ns``."""

    def __init__(self, inner, run):
        self.inner, self.owner = inner, run
        self.load, self.open_sequence = inner.load, inner.open_sequence
        self.end_sequence, self.close = inner.end_sequence, inner.close

    def run(self, plan):
        outcome, owner = self.inner.run(plan), self.owner
        if owner.stall_at_ns is None or owner.fleet.driver.now_ns < owner.stall_at_ns:
            return outcome
        owner.stall_at_ns = None
        return replace(outcome, duration_ns=outcome.duration_ns + owner.stall_ns)

    def foresee(self, plan, steps):
        return self.inner.foresee(plan, steps)


class Overload:
    """A pool of simulated replicas under load. ``seed`` decides arrivals, sizes and jitter."""

    def __init__(self, seed, replicas=1, blocks=1024, sequences=32, coefficients=None, **limits):
        names = tuple(f"m-{number}" for number in range(replicas))
        self.random = random.Random(seed)
        self.blocks, self.sequences = blocks, sequences
        self.coefficients = coefficients or Coefficients()
        self.calls: dict[str, Call] = {}
        self.of_request: dict[str, Call] = {}
        self.replicas: dict[str, Replica] = {}
        self.stall_at_ns: int | None = None
        self.stall_ns = 0
        self.reasons: Counter[str] = Counter()
        self.retries_ns: list[int] = []
        self.refused_ns: list[int] = []
        self.core = Fleet([PoolLimits("m", names, **limits)], chance=random.Random(seed))
        self.fleet = VirtualFleet(self.core, self.make, end_tokens=frozenset({0}), watcher=self)

    def make(self, replica_id):
        limits = BatchingLimits(4096, BLOCK, self.blocks, sequences_max=self.sequences)
        executor = SimulatedExecutor(
            ReplicaLimits(4096, BLOCK, self.blocks, self.sequences),
            self.coefficients,
            output_tokens=lambda sequence: self.of_request[sequence.request_id].length,
        )
        self.replicas[replica_id] = Replica(limits, LinearCostModel(self.coefficients))
        return self.replicas[replica_id], Stalling(executor, self)

    # ---------------------------------------------------------------------------------- clients

    def call(self, at_ns, prompt, length, *, limit=512, retries=0, **fields):
        """Let a client ask once at this time, and again as told, at most so many times."""
        name = f"c{len(self.calls)}"
        start = self.random.randrange(1_000_000)
        request = Request(
            name, at_ns, tuple(range(start, start + prompt)), limit, slo_class="chat",
            **{"ttft_due_ns": TTFT_NS, "tpot_ns": TPOT_NS, **fields},
        )  # fmt: skip
        call = Call(name, "m", request, min(length, limit), retries)
        self.calls[name] = call
        self.fleet.driver.call_at(at_ns, partial(self.ask, call))
        return call

    def ask(self, call):
        now_ns = self.fleet.driver.now_ns
        due_ns = call.request.ttft_due_ns
        request = replace(
            call.request,
            id=f"{call.name}.{call.tries}",
            arrived_ns=now_ns,
            ttft_due_ns=None if due_ns is None else now_ns + due_ns,
        )
        call.tries += 1
        call.arrived_ns = now_ns
        self.of_request[request.id] = call
        self.fleet.arrive(now_ns, call.model, request)

    def poisson(self, rate, from_s, to_s, *, prompt=200, length=100, **fields):
        """Calls at random times; sizes spread around their means."""
        at_s = from_s + self.random.expovariate(rate)
        while at_s < to_s:
            tokens = round(prompt * self.random.uniform(0.5, 1.5))
            output = 1 + min(511, round(self.random.expovariate(1 / (length - 1))))
            self.call(round(at_s * S), tokens, output, **fields)
            at_s += self.random.expovariate(rate)

    # ---------------------------------------------------------------------------------- watching

    def fleet_event(self, event, now_ns, effects):
        if isinstance(event, Ended):
            call = self.of_request[event.request_id]
            call.outcome, call.ended_ns = event.reason, now_ns
            call.tokens = event.usage.completion_tokens
        elif isinstance(event, Cancelled):
            self.of_request[event.request_id].outcome = "cancelled"
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.of_request[effect.request_id].dispatched_ns = now_ns
            elif isinstance(effect, Reject):
                self.refused(self.of_request[effect.request_id], effect, now_ns)
            elif isinstance(effect, Fail):
                self.of_request[effect.request_id].outcome = effect.reason
            elif isinstance(effect, Shorten):
                self.of_request[effect.request_id].degraded += ("shorten",)
            elif isinstance(effect, Retarget):
                self.of_request[effect.request_id].degraded += ("smaller",)

    def refused(self, call, reject, now_ns):
        self.reasons[reject.reason] += 1
        self.refused_ns.append(now_ns)
        call.outcome = f"{reject.status} {reject.reason}"
        call.told_s.append(reject.retry_after_s)
        if call.tries <= call.retries_max and reject.retry_after_s and reject.should_retry:
            at_ns = now_ns + ceil(reject.retry_after_s * S)
            self.retries_ns.append(at_ns)
            self.fleet.driver.call_at(at_ns, partial(self.ask, call))

    def replica_event(self, replica_id, event, now_ns, effects):
        for effect in effects:
            if isinstance(effect, Emit):
                for sampled in effect.sampled:
                    call = self.of_request[sampled.sequence.request_id]
                    if call.first_ns is None:
                        call.first_ns = now_ns

    def run(self, until_s=None):
        self.fleet.run(None if until_s is None else round(until_s * S))
        return self

    # ---------------------------------------------------------------------------------- figures

    def goodput(self, from_s, to_s):
        """Good calls per second among those that first asked within the time."""
        good = sum(c.good for c in self.between(from_s, to_s))
        return good / (to_s - from_s)

    def between(self, from_s, to_s):
        return [c for c in self.calls.values() if from_s * S <= c.request.arrived_ns < to_s * S]

    def served(self):
        return [call for call in self.calls.values() if call.first_ns is not None]

    @property
    def preemptions(self):
        return sum(replica.roster.preemptions for replica in self.replicas.values())


def peak_over_mean(at_ns, bin_s):
    """Most events in a bin over the mean of the bins, the last and incomplete one left out."""
    first_ns, last_ns = min(at_ns), max(at_ns)
    bins = Counter(int((at - first_ns) / (bin_s * S)) for at in at_ns)
    counts = [bins[number] for number in range(int((last_ns - first_ns) / (bin_s * S)))]
    return max(counts) * len(counts) / sum(counts)


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
