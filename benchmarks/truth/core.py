"""Trials on the production core in virtual time: the fleet and a replica, as they serve.

Nothing waits for a clock, so a trial of a minute takes as long as its steps take to plan. Played by
``benchmarks.search`` and the tests of searches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from random import Random

from sluice.cluster.classes import ServiceClasses
from sluice.core.costmodel import Coefficients, FixedCostModel, StepTimes
from sluice.core.events import (
    Ended,
    Fail,
    FleetEffect,
    FleetEvent,
    Progress,
    Reject,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLimits,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.request import SequenceId
from sluice.core.roster import BatchingLimits
from sluice.executors.base import StepExecutor
from sluice.executors.simulated import SimulatedExecutor
from sluice.loadtest.trial import (
    ClosedLoop,
    Ending,
    OpenLoop,
    RequestOutcome,
    Span,
    TrialOutcome,
    TrialPlan,
    Watch,
)
from sluice.loadtest.trial import Progress as TrialProgress
from sluice.planner.simulation import END_TOKEN, KNOWN_CHUNK_TOKENS, SimulatedPool
from sluice.runtime.virtual import Stretching
from sluice.runtime.virtual_fleet import VirtualFleet
from sluice.workload.asks import Ask
from sluice.workload.lengths import Lengths, lengths_of
from sluice.workload.prompts import Prompts
from sluice.workload.synthetic import Synthetic

NS = 10**9
WATCHED_EVERY_NS = NS
REFUSED_AGAIN_NS = NS // 10
SILENCE_NS_MAX = 250_000_000
# A small model on a small GPU, so that a search has no more than some ten thousand requests to
# simulate: weights, tokens, rows, context read, scores, in nanoseconds.
SMALL_GPU = Coefficients(20e6, 150e3, 60e3, 150.0, 1.0)
LIMITS = ReplicaLimits(8192, 64, 1500, 64)
LENGTHS = lengths_of(400, 40, 0.5)
CHUNK_TOKENS = 2048
COMPLETE = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True)
class CoreEngine:
    """One replica and what is asked of it."""

    name: str = "core"
    times: StepTimes = SMALL_GPU
    limits: ReplicaLimits = LIMITS
    lengths: Lengths = LENGTHS

    @property
    def pool(self) -> SimulatedPool:
        """The replica behind its fleet, with no targets of its own: the client judges."""
        batching = BatchingLimits(
            self.limits.context_tokens_max,
            self.limits.block_size,
            self.limits.blocks_total,
            sequences_max=self.limits.sequences_max,
            chunk_tokens_max=CHUNK_TOKENS,
            step_ns_max=NS,
        )
        limits = PoolLimits("model", ("model-0",))
        return SimulatedPool(limits, batching, self.times, ServiceClasses({}))


@dataclass(frozen=True, slots=True)
class CoreStimulus:
    """Poisson arrivals of requests of these lengths."""

    lengths: Lengths

    def open_loop(self, rate_rps: float, span: Span, seed: int) -> TrialPlan:
        """See ``Stimulus``."""
        until_ns = round(span.arriving_s * NS)
        asks = Synthetic(rate_rps, self.lengths).asks(seed)
        due = tuple(takewhile(lambda ask: ask.at_ns < until_ns, asks))
        return TrialPlan(OpenLoop(rate_rps), span, due, seed)

    def closed_loop(self, concurrency: int, span: Span, seed: int) -> TrialPlan:
        """See ``Stimulus``."""
        asks = tuple(islice(Synthetic(1.0, self.lengths).asks(seed), 20 * concurrency + 400))
        return TrialPlan(ClosedLoop(concurrency), span, asks, seed)


class CoreRunner:
    """Plays plans on a ``CoreEngine`` that has just started when each begins."""

    def __init__(self, engine: CoreEngine) -> None:
        self.engine = engine

    def run(self, plan: TrialPlan, watch: Watch | None = None) -> TrialOutcome:
        """See ``Runner``."""
        return _Trial(self.engine, plan).run(watch)


@dataclass(slots=True, eq=False)
class _Life:
    """A request while it is served."""

    ask: Ask
    number: int
    at_s: float
    first_s: float | None = None
    first_tokens: int = 0


class _Trial:
    """One trial. Watches the fleet, and keeps clients busy in a closed loop."""

    def __init__(self, engine: CoreEngine, plan: TrialPlan) -> None:
        self._plan, self._pool, self._prompts = plan, engine.pool, Prompts()
        self._lives: dict[str, _Life] = {}
        self._over: list[RequestOutcome] = []
        self._asks: Iterator[Ask] = iter(plan.asks)
        self._begun = 0
        self._virtual = VirtualFleet(
            Fleet([self._pool.limits], chance=Random(f"{plan.seed}/fleet")),
            self._make,
            end_tokens=frozenset({END_TOKEN}),
            watcher=self,
            stretching=Stretching(silence_ns_max=SILENCE_NS_MAX),
        )
        if isinstance(plan.load, ClosedLoop):
            for _ in range(plan.load.concurrency):
                self._virtual.driver.call_at(1, self._begin_next)
        else:
            for ask in plan.asks:
                self._virtual.driver.call_at(ask.at_ns, partial(self._begin, ask))

    def run(self, watch: Watch | None) -> TrialOutcome:
        """Play until all requests that count are over, or it is broken off."""
        span, now_ns = self._plan.span, 0
        stopped_s: float | None = None
        while stopped_s is None and not self._told(now_ns / NS):
            now_ns += WATCHED_EVERY_NS
            self._virtual.run(until_ns=now_ns)
            if watch is not None and watch(self._progress(now_ns / NS)):
                stopped_s = now_ns / NS
        took_s = now_ns / NS
        left = [
            RequestOutcome(life.number, life.at_s, Ending.LEFT, took_s, sent_s=life.at_s)
            if took_s < life.at_s + span.patience_s
            else RequestOutcome(life.number, life.at_s, Ending.TIMEOUT, took_s, sent_s=life.at_s)
            for life in self._lives.values()
        ]
        outcomes = sorted([*self._over, *left], key=lambda one: one.at_s)
        return TrialOutcome(self._plan, outcomes, took_s, stopped_s=stopped_s)

    def _told(self, now_s: float) -> bool:
        span = self._plan.span
        if now_s < span.to_s:
            return False
        counted = (life for life in self._lives.values() if span.from_s <= life.at_s < span.to_s)
        return all(now_s >= life.at_s + span.patience_s for life in counted)

    def _progress(self, now_s: float) -> TrialProgress:
        ended = len(self._over)
        return TrialProgress(now_s, self._begun, self._begun, ended, ended)

    def _make(self, _: str) -> tuple[Replica, StepExecutor]:
        limits, times = self._pool.batching, self._pool.times
        executor = SimulatedExecutor(
            limits.replica, times, output_tokens=self._output_tokens, checked=False
        )
        return Replica(limits, FixedCostModel(times, chunk_tokens=KNOWN_CHUNK_TOKENS)), executor

    def _output_tokens(self, sequence: SequenceId) -> int | None:
        life = self._lives.get(sequence.request_id)
        return None if life is None else life.ask.output_tokens

    def _begin_next(self) -> None:
        ask = next(self._asks, None)
        if ask is None:
            self._asks = iter(self._plan.asks)
            ask = next(self._asks)
        self._begin(ask)

    def _begin(self, ask: Ask) -> None:
        now_ns = self._virtual.driver.now_ns
        named = Ask(self._begun, now_ns, ask.prompt, ask.output_tokens)
        request = self._pool.request(named, now_ns, self._prompts.tokens(ask.prompt))
        self._lives[request.id] = _Life(ask, self._begun, now_ns / NS)
        self._begun += 1
        self._virtual.arrive(now_ns, self._pool.limits.model, request)

    def fleet_event(self, event: FleetEvent, now_ns: int, effects: Sequence[FleetEffect]) -> None:
        """See ``Watcher``."""
        if isinstance(event, Progress):
            life = self._lives.get(event.request_id)
            if life is not None and life.first_s is None:
                life.first_s, life.first_tokens = now_ns / NS, event.tokens
        elif isinstance(event, Ended):
            done = event.reason in COMPLETE
            tokens = event.usage.completion_tokens
            self._end(event.request_id, now_ns, Ending.DONE if done else Ending.FAILED, tokens)
        for effect in effects:
            if isinstance(effect, Reject):
                self._end(effect.request_id, now_ns, Ending.REFUSED)
            elif isinstance(effect, Fail):
                self._end(effect.request_id, now_ns, Ending.FAILED)

    def replica_event(
        self, replica_id: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> None:
        """See ``Watcher``; the fleet is told all that is counted."""

    def _end(self, request_id: str, now_ns: int, ending: Ending, tokens: int | None = None) -> None:
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        now_s = now_ns / NS
        self._over.append(
            RequestOutcome(
                life.number,
                life.at_s,
                ending,
                now_s,
                sent_s=life.at_s,
                first_s=life.first_s,
                last_s=now_s,
                prompt_tokens=life.ask.prompt_tokens,
                output_tokens=tokens,
                first_tokens=life.first_tokens,
                chunks=tokens or 0,
            )
        )
        if isinstance(self._plan.load, ClosedLoop):
            # A client that is refused would ask again in the same instant, for ever.
            again_ns = now_ns if ending is Ending.DONE else now_ns + REFUSED_AGAIN_NS
            self._virtual.driver.call_at(again_ns, self._begin_next)
