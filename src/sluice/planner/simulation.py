"""A fleet that does not exist, under a workload, in virtual time: ``simulate``.

All decisions are those of ``core``: the fleet and the replicas are the server's own, driven by
``runtime/virtual_fleet.py``. Here requests are made of what a workload asks for, and counted.
Called by the planner's search, ``sluice simulate`` and ``sluice replay``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import ceil
from random import Random
from typing import assert_never

from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import SloSection
from sluice.core.admission import NS_PER_S
from sluice.core.costmodel import (
    Coefficients,
    CostModel,
    CostState,
    FixedCostModel,
    LinearCostModel,
    StepTimes,
)
from sluice.core.events import (
    Arrived,
    Cancelled,
    Ended,
    Fail,
    FleetEffect,
    FleetEvent,
    Progress,
    Reject,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLost,
    ReplicaReady,
    Retarget,
    Scaled,
    Shorten,
    StartReplica,
    StopReplica,
    WarmReplica,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.replica import Replica
from sluice.core.request import Request, SequenceId
from sluice.core.roster import BatchingLimits
from sluice.executors.base import StepExecutor
from sluice.planner.estimate import Targets
from sluice.planner.faults import Fault, Lost, Slow, Stall
from sluice.planner.faulty import Condition, FaultyExecutor
from sluice.planner.outcome import Counting, Life, Outcome, Scaling
from sluice.planner.recording import Recording
from sluice.planner.replicas import SimulatedReplica
from sluice.planner.steady import CHUNK_TOKENS_MAX
from sluice.runtime.calibration import calibrate
from sluice.runtime.generation import Call, TokenPrompt
from sluice.runtime.virtual import STEP_BY_STEP, Stretching
from sluice.runtime.virtual_fleet import SameStart, Starting, VirtualFleet
from sluice.telemetry.journal_file import Journal
from sluice.workload.asks import Ask, BadWorkload, Workload
from sluice.workload.prompts import Prompts

END_TOKEN = 0
# What a client asks for that sets no limit of its own, or the length of its answer where that is
# more: replicas reserve memory by what answers were, not by this.
OUTPUT_TOKENS_MAX_DEFAULT = 2048
STEP_S_MAX = 1.0
# The fleet hears of a replica that only decodes at least so often, unless one says: every few
# steps.
SILENCE_NS_MAX = 250_000_000
# Replicas that know their speed tell that of prefill in chunks of this size.
KNOWN_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """One model: what the fleet and each replica hold to, and how long its steps take.

    ``ratio`` says by how much a step differs from ``times`` at a time after the workload began.
    ``cost`` is what replicas know of their speed when they start, ``None`` where they know all.
    """

    limits: PoolLimits
    batching: BatchingLimits
    times: StepTimes
    classes: ServiceClasses
    ratio: Callable[[int], float] | None = None
    cost: CostState | None = None

    def request(self, ask: Ask, at_ns: int, prompt: tuple[int, ...], attempt: int = 1) -> Request:
        """What the fleet is told at ``at_ns``, by the rules that calls of clients go through."""
        arrived_ns = at_ns - ask.read_ns
        limit = ask.output_tokens_max
        if limit is None:
            limit = max(OUTPUT_TOKENS_MAX_DEFAULT, ask.output_tokens)
        room = self.batching.context_tokens_max - len(prompt)
        call = Call(
            id=str(ask.number) if attempt == 1 else f"{ask.number}~{attempt}",
            model=self.limits.model,
            arrived_ns=arrived_ns,
            prompt=TokenPrompt(()),
            choices=ask.choices,
            tenant=ask.tenant,
            slo_class=ask.slo_class,
            priority=ask.tier,
            may_degrade=ask.may_degrade,
            deadline_ns=None if ask.deadline_ns is None else arrived_ns + ask.deadline_ns,
            likeness=ask.number + 1,
        )
        return self.classes.request(self.classes.named(call), prompt, max(1, min(limit, room)))


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """All models. A replica that starts takes ``load_ns``; the workload begins when all have.

    ``starting`` says it for each replica, where they follow the load: then those that there are at
    first serve at once.
    """

    pools: tuple[SimulatedPool, ...]
    tenants: tuple[TenantLimits, ...] = ()
    load_ns: int = 0
    faults: tuple[Fault, ...] = ()
    starting: Starting | None = None

    @property
    def by_model(self) -> Mapping[str, SimulatedPool]:
        """The pools by the names of their models."""
        return {pool.limits.model: pool for pool in self.pools}

    @property
    def model_of(self) -> Mapping[str, str]:
        """The model of each replica."""
        return {name: pool.limits.model for pool in self.pools for name in pool.limits.replica_ids}

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """All replicas."""
        return tuple(name for pool in self.pools for name in pool.limits.replica_ids)


@dataclass(frozen=True, slots=True)
class Span:
    """How much is simulated: so many ``requests``, of which the first ``warm_up`` are not counted.

    More come behind them, which are not counted either, until these have ended, so that the last
    ones do not have the fleet for themselves; at most as many again, and none into a journal.
    A client that is refused comes back when it was told to, up to ``retries`` times. The fleet
    hears of a replica that only decodes every ``silence_ns_max``. ``told`` is called with the
    number of requests that have arrived, now and then. No more come once more than ``misses_max``
    of those that are counted have missed their targets: what a run would say is known by then.
    """

    requests: int
    warm_up: int = 0
    retries: int = 0
    silence_ns_max: int = SILENCE_NS_MAX
    misses_max: int | None = None
    told: Callable[[int], None] | None = field(default=None, compare=False)


TOLD_EVERY = 100
# Share of the requests that begin on an empty fleet and are not counted, unless one says.
WARM_UP = 0.1


def _stretching(faults: Sequence[Fault], silence_ns_max: int) -> Stretching:
    """A fault that comes to a replica must find it where it is."""
    return Stretching(silence_ns_max=None if faults else silence_ns_max)


def simulate(
    workload: Workload,
    fleet: SimulatedFleet,
    *,
    seed: int,
    span: Span,
    journal: Journal | None = None,
) -> Outcome:
    """Play the first requests of a workload on a fleet, until all have ended.

    The same arguments give the same outcome, and the same journal where one is written: then no
    step is skipped and replicas learn their speed from their steps, as live ones do. Raises
    ``BadWorkload``.
    """
    return Simulation(fleet, seed, span, journal).run(workload)


def one_model_fleet(
    replica: SimulatedReplica,
    replicas: int,
    targets: Targets | None,
    chunk_tokens: int = CHUNK_TOKENS_MAX,
) -> SimulatedFleet:
    """Replicas of one model under the default policy, with one class of requests and prefill in
    chunks of at most ``chunk_tokens``."""
    names = tuple(f"model-{number}" for number in range(replicas))
    limits = replica.limits
    slo = {}
    if targets is not None:
        slo["targets"] = SloSection(
            ttft_s=targets.ttft_s,
            tpot_s=targets.tpot_s,
            e2e_s=targets.e2e_s,
            percentile=targets.percentile,
        )
    return SimulatedFleet(
        (
            SimulatedPool(
                PoolLimits("model", names),
                BatchingLimits(
                    limits.context_tokens_max,
                    limits.block_size,
                    limits.blocks_total,
                    sequences_max=limits.sequences_max,
                    chunk_tokens_max=chunk_tokens,
                    step_ns_max=int(STEP_S_MAX * NS_PER_S),
                ),
                replica.times,
                ServiceClasses(slo, default="targets" if slo else None),
            ),
        )
    )


class Simulation:
    """One run. Watches the fleet and counts."""

    def __init__(
        self, fleet: SimulatedFleet, seed: int, span: Span, journal: Journal | None
    ) -> None:
        self._counting = Counting(span.requests, span.warm_up)
        self.outcome = self._counting.outcome
        self._pools = fleet.by_model
        self._model_of = fleet.model_of
        self._span = span
        self._prompts = Prompts()
        self._lives: dict[str, Life] = {}
        self._replicas: list[Replica] = []
        self._running_ns: dict[str, int] = {}
        self._warming: set[str] = set()
        self._warm_ns: dict[str, int] = {}
        self._fed, self._scales = False, fleet.starting is not None
        self._first_ns = self._last_ns = self._over_ns = self._counted_over_ns = 0
        self._usual = next(iter(self._pools))
        core = Fleet(
            [pool.limits for pool in fleet.pools],
            chance=Random(f"{seed}/fleet"),
            tenants=fleet.tenants,
        )
        self.virtual = VirtualFleet(
            core,
            self._make,
            starting=fleet.starting or SameStart(fleet.load_ns),
            end_tokens=frozenset({END_TOKEN}),
            watcher=self,
            stretching=STEP_BY_STEP
            if journal is not None
            else _stretching(fleet.faults, span.silence_ns_max),
        )
        self._recording: Recording | None = None
        if journal is not None:
            driver = self.virtual.driver
            self._recording = Recording(journal, self._model_of, lambda: driver.now_ns)
        self._seed = seed
        self._began_ns = 0 if fleet.starting is not None else fleet.load_ns
        slows = any(isinstance(fault, Slow) for fault in fleet.faults)
        self._learns = slows or journal is not None
        self._conditions: dict[str, Condition] = {}
        for fault in fleet.faults:
            self._plan_fault(fault)

    def run(self, workload: Workload) -> Outcome:
        """Play the workload to its end."""
        behind = 0 if self._recording is not None else self._span.requests - self._span.warm_up
        asks = islice(workload.asks(self._seed), self._span.requests + behind)
        self.virtual.feed(self._arrivals(asks))
        self.virtual.run()
        self._finish()
        if self._recording is not None:
            self._recording.close()
        return self.outcome

    # ------------------------------------------------------------------------------------ making

    def _arrivals(self, asks: Iterator[Ask]) -> Iterator[tuple[int, str, Request]]:
        """The requests as they come to the door; each is made when the one before has arrived."""
        for count, ask in enumerate(asks):
            at_ns = self._began_ns + ask.at_ns
            if count < self._span.requests:
                self._comes(count, at_ns)
            elif self._counting.complete:
                break
            if self._is_known():
                break
            model = ask.model or self._usual
            pool = self._pools.get(model)
            if pool is None:
                models = ", ".join(self._pools)
                raise BadWorkload(f"a request asks for {model!r}; models are {models}")
            request = pool.request(ask, at_ns, self._prompts.tokens(ask.prompt))
            self._lives[request.id] = Life(ask, request, model)
            if ask.leaves_ns is not None:
                self.virtual.at(at_ns + ask.leaves_ns, Cancelled(request.id))
            yield at_ns, model, request
        self._fed = True
        self._rest()

    def _is_known(self) -> bool:
        """Whether more have missed their targets than a run is played for."""
        most, whole = self._span.misses_max, self.outcome.whole
        return most is not None and whole.requests - whole.unknown - whole.met > most

    def _comes(self, count: int, at_ns: int) -> None:
        """Note the arrival of one that is counted, or is of the warm-up."""
        span = self._span
        if count == span.warm_up:
            self._first_ns = at_ns
        if count == (span.requests + span.warm_up) // 2:
            self.outcome.waiting_at_half = len(self._lives)
            self.outcome.queued_at_half = self._queued()
        if span.told is not None and count % TOLD_EVERY == 0:
            span.told(count)
        self._last_ns = at_ns
        self.outcome.waiting_at_end = len(self._lives)
        if count == span.requests - 1:
            self.outcome.queued_at_end = self._queued()

    def _queued(self) -> int:
        """Requests without a first token."""
        return sum(life.first_ns is None for life in self._lives.values())

    def _make(self, replica_id: str) -> tuple[Replica, StepExecutor]:
        pool = self._pools[self._model_of[replica_id]]
        limits = pool.batching.replica
        executor = FaultyExecutor(limits, self._condition(replica_id), self._output_tokens)
        cost = self._cost(pool, executor)
        replica = Replica(pool.batching, cost)
        if self._recording is not None:
            assert isinstance(cost, LinearCostModel)  # noqa: S101 - what is recorded learns
            self._recording.started(replica_id, replica, cost)
        self._replicas.append(replica)
        return replica, executor

    def _cost(self, pool: SimulatedPool, executor: StepExecutor) -> CostModel:
        """What a replica that starts knows of its speed."""
        if pool.cost is not None:
            return LinearCostModel(pool.cost.seed, pool.cost)
        if not self._learns:
            return FixedCostModel(pool.times, chunk_tokens=KNOWN_CHUNK_TOKENS)
        cost = LinearCostModel(Coefficients())
        calibrate(executor, pool.batching.replica, cost)
        return cost

    def _condition(self, replica_id: str) -> Condition:
        found = self._conditions.get(replica_id)
        if found is None:
            pool = self._pools[self._model_of[replica_id]]
            found = self._conditions[replica_id] = Condition(pool.times, self._ratio(pool))
        return found

    def _ratio(self, pool: SimulatedPool) -> Callable[[], float] | None:
        ratio, driver, began_ns = pool.ratio, self.virtual.driver, self._began_ns
        return None if ratio is None else lambda: ratio(driver.now_ns - began_ns)

    def _plan_fault(self, fault: Fault) -> None:
        at_ns = self._began_ns + fault.at_ns
        condition, call_at = self._condition(fault.replica_id), self.virtual.driver.call_at
        match fault:
            case Lost():
                self.virtual.lose(at_ns, fault.replica_id, permanent=fault.permanent)
            case Slow():
                call_at(at_ns, partial(condition.slow, fault.factor))
                call_at(at_ns + fault.for_ns, partial(condition.recover, fault.factor))
            case Stall():
                call_at(at_ns, partial(condition.stall, fault.for_ns))
            case _:
                assert_never(fault)

    def _output_tokens(self, sequence: SequenceId) -> int | None:
        life = self._lives.get(sequence.request_id)
        return None if life is None else life.ask.output_tokens

    # ---------------------------------------------------------------------------------- counting

    def fleet_event(self, event: FleetEvent, now_ns: int, effects: Sequence[FleetEffect]) -> None:
        """See ``virtual_fleet.Watcher``."""
        if self._recording is not None:
            self._recording.fleet_event(event, now_ns, effects)
        if isinstance(event, Progress):
            life = self._lives.get(event.request_id)
            if life is not None and life.first_ns is None:
                life.first_ns, life.first_tokens = now_ns, event.tokens
        elif isinstance(event, Ended):
            life = self._over(event.request_id, now_ns)
            if life is not None:
                self._counting.ended(life, event, now_ns)
        elif isinstance(event, Cancelled):
            life = self._over(event.request_id, now_ns)
            if life is not None:
                self._counting.left(life, now_ns)
        elif isinstance(event, ReplicaLost):
            self._stopped(event.replica_id, now_ns)
        elif isinstance(event, ReplicaReady) and event.replica_id in self._warming:
            self._warm_ns.setdefault(event.replica_id, now_ns)
        elif isinstance(event, Arrived):
            self._lives[event.request.id].model = event.model
        if effects:
            self._decided(effects, now_ns)

    def _decided(self, effects: Sequence[FleetEffect], now_ns: int) -> None:
        for effect in effects:
            match effect:
                case Reject():
                    life = self._over(effect.request_id, now_ns)
                    if life is not None and not self._comes_back(life, effect, now_ns):
                        self._counting.refused(life, effect.reason)
                case Fail():
                    life = self._over(effect.request_id, now_ns)
                    if life is not None:
                        self._counting.failed(life)
                case Shorten() | Retarget():
                    self._lives[effect.request_id].degraded = True
                case StartReplica():
                    self._running_ns.setdefault(effect.replica_id, now_ns)
                    self._woken(effect.replica_id, now_ns)
                case WarmReplica():
                    if effect.replica_id in self._running_ns:
                        self._warm_ns[effect.replica_id] = now_ns
                    self._warming.add(effect.replica_id)
                    self._running_ns.setdefault(effect.replica_id, now_ns)
                case StopReplica():
                    self._stopped(effect.replica_id, now_ns)
                case Scaled() if effect.number != effect.before:
                    at_s = (now_ns - self._began_ns) / NS_PER_S
                    self.outcome.scalings.append(
                        Scaling(at_s, effect.model, effect.number, effect.reason)
                    )
                case _:
                    pass

    def _comes_back(self, life: Life, told: Reject, now_ns: int) -> bool:
        """Let a refused client ask again when it was told to, unless it has had enough."""
        wait_s, pool = told.retry_after_s, self._pools[life.ask.model or self._usual]
        if wait_s is None or not told.should_retry or life.tries > self._span.retries:
            return False
        at_ns = now_ns + ceil(wait_s * NS_PER_S)
        request = pool.request(life.ask, at_ns, life.request.prompt, life.tries + 1)
        earlier_ns = life.earlier_ns + request.arrived_ns - life.request.arrived_ns
        self._lives[request.id] = Life(
            life.ask, request, pool.limits.model, life.tries + 1, earlier_ns
        )
        self.virtual.arrive(at_ns, pool.limits.model, request)
        return True

    def replica_event(
        self, replica_id: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> None:
        """See ``virtual_fleet.Watcher``; the fleet is told all that is counted."""
        if self._recording is not None:
            self._recording.replica_event(replica_id, event, now_ns, effects)

    def _over(self, request_id: str, now_ns: int) -> Life | None:
        """A request that ends now; ``None`` for one whose client has left before."""
        life = self._lives.pop(request_id, None)
        if life is not None:
            self._over_ns = now_ns
            if self._counting.counts(life):
                self._counted_over_ns = now_ns
            self._rest()
        return life

    def _rest(self) -> None:
        """Let no timer go on where all is over: how many replicas there are is decided for ever."""
        if self._fed and not self._lives and self._scales:
            driver = self.virtual.driver
            driver.call_at(driver.now_ns, self._halt_if_over)

    def _halt_if_over(self) -> None:
        if not self._lives:
            self.virtual.halt()

    def _woken(self, replica_id: str, now_ns: int) -> None:
        self._warming.discard(replica_id)
        warm_ns = self._warm_ns.pop(replica_id, None)
        if warm_ns is not None:
            self.outcome.warm_hours += (now_ns - warm_ns) / NS_PER_S / 3600

    def _stopped(self, replica_id: str, now_ns: int) -> None:
        self._woken(replica_id, now_ns)
        started_ns = self._running_ns.pop(replica_id, None)
        if started_ns is not None:
            self.outcome.replica_hours += (now_ns - started_ns) / NS_PER_S / 3600

    def _finish(self) -> None:
        driver, outcome = self.virtual.driver, self.outcome
        for replica_id in list(self._running_ns):
            self._stopped(replica_id, self._over_ns)
        outcome.arriving_s = (self._last_ns - self._first_ns) / NS_PER_S
        outcome.counted_s = (self._counted_over_ns - self._first_ns) / NS_PER_S
        outcome.simulated_s = (self._over_ns - self._began_ns) / NS_PER_S
        outcome.preemptions = sum(replica.roster.preemptions for replica in self._replicas)
        outcome.steps = driver.steps
