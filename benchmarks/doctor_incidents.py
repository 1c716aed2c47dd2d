"""Incidents whose true cause and share are known, for ``benchmarks/doctor.py``.

Each is played with its faults and without them, on the same requests at the same times, by
``planner.simulation``: the core in virtual time, on replicas whose steps do not follow the cost
model that the doctor fits. What differs between the two runs is the effect of the faults. A vendor
behind the gateway is played by a small model of its own, ``Vendor``.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np

from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import SloSection
from sluice.core.costmodel import Load
from sluice.core.events import Reconfigured, ReplicaEffect, ReplicaEvent, StepDone, StepFailed
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan
from sluice.executors.base import Outcome, StepExecutor
from sluice.planner.faults import Fault, Lost, Slow
from sluice.planner.recording import KEY, Recording
from sluice.planner.simulation import SimulatedFleet, SimulatedPool, Simulation, Span
from sluice.runtime.recorder import Recorder
from sluice.telemetry import records
from sluice.telemetry.journal_file import Journal, JournalFile
from sluice.telemetry.records import AnyRecord
from sluice.workload.asks import Ask, Part, own_text, shared_text

NS = 1_000_000_000
MODEL = "chat"
METRICS = ("ttft", "tpot", "e2e")
# What a fault must do to a percentile to be an incident: it is left out otherwise.
EFFECT_MIN = 0.20

ENGINE_FAULTS = (
    "queue_backed_up", "noisy_tenant", "long_prompts", "longer_context", "output_length",
    "cache_hits", "engine_slowdown", "slow_replica", "host_cpu", "cold_start", "imbalance",
    "preemption", "admission_limits", "slow_retrieval", "slow_clients",
)  # fmt: skip
VENDOR_FAULTS = ("vendor_throttling", "upstream_failover", "upstream_slow")
DECOYS = ("deploy", "tenants_swap", "longer_prompts_spare", "retrieval_flat")
# What a diagnosis is to name for each fault.
CAUSES = {name: name for name in (*ENGINE_FAULTS, *VENDOR_FAULTS)} | {
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


# ------------------------------------------------------------------------------------- the place


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


# ------------------------------------------------------------------------------------- playing it


class _Slim(Recorder):
    """Records steps, and of the rest the start and a few submissions: what a diagnosis reads."""

    def __init__(self, journal: Journal, replica_id: str) -> None:
        super().__init__(journal, replica_id, KEY)
        self._told = 0

    def record(self, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]) -> None:
        """See ``Recorder``."""
        if self._told < 20:
            self._told += 1
            super().record(event, now_ns, effects)
            return
        if isinstance(event, StepDone | StepFailed):
            self._record_step(event, now_ns, effects)
        for effect in effects:
            plan = getattr(effect, "plan", None)
            if isinstance(plan, Plan):
                self._plan = plan


class _Recording(Recording):
    def started(self, replica_id: str, replica: Replica, cost: object) -> None:
        """See ``Recording``."""
        recorder = _Slim(self._journal, replica_id)
        recorder.start(replica.limits, cost.state(), self._clock())  # type: ignore[attr-defined]
        self._recorders[replica_id] = recorder


@dataclass(slots=True, eq=False)
class _Tee:
    """Corrects what virtual time cannot know, notes latencies, and writes where there is a file."""

    wishes: dict[str, Wish]
    file: JournalFile | None
    pauses: dict[tuple[str, int], int] = field(default_factory=dict)
    latencies: dict[int, dict[str, float]] = field(default_factory=dict)
    late: list[AnyRecord] = field(default_factory=list)
    records_text = False

    def append(self, record: AnyRecord) -> None:
        """See ``Journal``."""
        if isinstance(record, records.RequestEnded):
            record = self._ended(record)
        elif isinstance(record, records.Step):
            pause_ns = self.pauses.pop((record.replica, record.step), 0)
            if pause_ns:
                record = _with(record, measured_ns=record.measured_ns - pause_ns)
        if self.file is not None:
            self.file.append(record)

    def _ended(self, record: records.RequestEnded) -> records.RequestEnded:
        wish = self.wishes[record.id]
        stuck_ns = wish.stuck_ns if record.completion_tokens else 0
        steps = max(1, record.completion_tokens - 1)
        tpot_ns = None if record.tpot_ns is None else record.tpot_ns + stuck_ns // steps
        record = _with(
            record,
            t_ns=record.t_ns + stuck_ns,
            retrieval_ns=wish.retrieval_ns,
            admission_ns=max(0, record.admission_ns - wish.retrieval_ns),
            decode_ns=record.decode_ns + stuck_ns,
            tpot_ns=tpot_ns,
        )
        seconds = {"e2e": (record.t_ns - record.arrived_ns) / NS}
        if record.ttft_ns is not None:
            seconds["ttft"] = record.ttft_ns / NS
        if tpot_ns is not None:
            seconds["tpot"] = tpot_ns / NS
        self.latencies[int(record.id)] = seconds
        return record

    def close(self) -> None:
        """See ``Journal``."""
        if self.file is not None:
            self.file.close()


R = TypeVar("R", bound=records.Record)


def _with(record: R, **changes: object) -> R:
    return type(record)(
        **{name: getattr(record, name) for name in record.__struct_fields__} | changes
    )


class _Paused:
    """An executor whose host is busy: its steps are measured as ever, and start late."""

    def __init__(self, inner: StepExecutor, run: "_Played", name: str) -> None:
        self._inner, self._run, self._name = inner, run, name
        self.load, self.close = inner.load, inner.close
        self.open_sequence, self.end_sequence = inner.open_sequence, inner.end_sequence

    def run(self, plan: Plan) -> Outcome:
        """See ``StepExecutor``."""
        outcome = self._inner.run(plan)
        pause_ns = self._run.pause_ns(outcome.duration_ns)
        if pause_ns:
            self._run.tee.pauses[self._name, plan.step] = pause_ns
            outcome = replace(outcome, duration_ns=outcome.duration_ns + pause_ns)
        return outcome


class _Played(Simulation):
    """One run of one incident."""

    def __init__(
        self, place: Place, case: Case, faults: dict[str, float], folder: Path | None
    ) -> None:
        self.place, self.faults = place, faults
        self._wishes = traffic(place, case, faults)
        file = None if folder is None else JournalFile(folder, "simulation")
        self.tee = _Tee({str(wish.number): wish for wish in self._wishes}, file)
        self._stalls = Random(f"{case.seed}/stalls")
        self._reborn: dict[str, int] = {}
        super().__init__(_fleet(place, case, faults), case.seed, Span(len(self._wishes)), self.tee)
        driver = self.virtual.driver
        recording = _Recording(self.tee, self._model_of, lambda: driver.now_ns)
        self._recording = recording
        self._changes(case)

    def asks(self, seed: int) -> Iterator[Ask]:  # noqa: ARG002 - see Workload
        """See ``Workload``."""
        for wish in self._wishes:
            parts = [Part(shared_text(1), wish.shared)] if wish.shared else []
            parts.append(Part(own_text(wish.number), wish.own))
            yield Ask(
                wish.number, wish.at_ns + wish.retrieval_ns, tuple(parts), wish.output,
                tenant=wish.tenant, read_ns=wish.retrieval_ns,
            )  # fmt: skip

    def pause_ns(self, step_ns: int) -> int:
        """How late the host starts a step."""
        severity = self.faults.get("host_cpu")
        if severity is None or self.virtual.driver.now_ns < self.place.fault_ns + self._began_ns:
            return 0
        return int(step_ns * (0.2 + 0.9 * severity) * self._stalls.uniform(0.2, 1.8))

    def _changes(self, case: Case) -> None:
        at_ns, driver = self.place.fault_ns + self._began_ns, self.virtual.driver
        details: dict[str, str] | None = None
        if "deploy" in case.decoys:
            details = {"version": "1.4.2 -> 1.4.3", "server.log_level": "info -> warning"}
        for name in self.faults:
            details = _DEPLOYED.get(name, details)
        if details is not None:
            told = details
            driver.call_at(
                at_ns, lambda: self.tee.append(records.Deployment(driver.now_ns, "reload", told))
            )
        if "imbalance" in self.faults:
            weights: tuple[float, ...] = (1.0 + 9.0 * (0.25 + 0.75 * self.faults["imbalance"]),)
            weights += (1.0,) * (self.place.replicas - 1)
            limits = _pool_limits(self.place, weights)
            self.virtual.at(at_ns, Reconfigured((limits,), ()))
        if self.faults.keys() & {"preemption", "admission_limits"}:
            for name in self._model_of:
                self.virtual.lose(at_ns, name)

    def _make(self, replica_id: str) -> tuple[Replica, StepExecutor]:
        births = self._reborn.get(replica_id, 0)
        self._reborn[replica_id] = births + 1
        usual = self._pools
        if births:
            pool = usual[MODEL]
            self._pools = {MODEL: replace(pool, batching=self._after(pool.batching))}
        replica, executor = super()._make(replica_id)
        self._pools = usual
        paused: StepExecutor = _Paused(executor, self, replica_id)
        return replica, paused

    def _after(self, limits: BatchingLimits) -> BatchingLimits:
        """What a replica may hold that starts again."""
        blocks, sequences = limits.blocks_total, limits.sequences_max
        if "preemption" in self.faults:
            blocks = int(blocks * (0.5 - 0.33 * self.faults["preemption"]))
        if "admission_limits" in self.faults:
            sequences = max(2, int(sequences * (0.45 - 0.3 * self.faults["admission_limits"])))
        return replace(limits, blocks_total=max(64, blocks), sequences_max=sequences)


_DEPLOYED = {
    "longer_context": {"version": "1.4.2 -> 1.5.0", "models.chat.template": "sha 91ab -> sha 77fe"},
    "admission_limits": {"models.chat.sequences_max": "changed"},
    "preemption": {"models.chat.kv_memory": "changed"},
    "imbalance": {"models.chat.weights": "changed"},
}


def _pool_limits(place: Place, weights: tuple[float, ...] = ()) -> PoolLimits:
    names = tuple(f"{MODEL}-{number}" for number in range(place.replicas))
    return PoolLimits(MODEL, names, queue_places_max=4096, weights=weights)


def _fleet(place: Place, case: Case, faults: dict[str, float]) -> SimulatedFleet:
    struck: list[Fault] = []
    at_ns, for_ns = place.fault_ns, place.end_ns
    names = _pool_limits(place).replica_ids
    for name, severity in faults.items():
        if name == "engine_slowdown":
            struck += [Slow(at_ns, each, 1.15 + 0.6 * severity, for_ns) for each in names]
        elif name == "slow_replica":
            struck.append(Slow(at_ns, names[0], 1.5 + 2.0 * severity, for_ns))
        elif name == "cold_start":
            struck.append(Lost(at_ns, names[0]))
    noise = Random(f"{case.seed}/noise")
    slow = 1.0
    pool = SimulatedPool(
        _pool_limits(place),
        BatchingLimits(
            32768, 16, max(place.blocks, 2200), sequences_max=place.sequences,
            chunk_tokens_max=place.chunk, step_ns_max=NS,
        ),
        Steps(),
        ServiceClasses({"chat": SloSection(ttft_s=2.0, tpot_s=0.1)}, default="chat"),
        ratio=lambda _: slow * noise.lognormvariate(0.0, place.noise),
    )  # fmt: skip
    return SimulatedFleet((pool,), faults=tuple(struck), load_ns=load_ns(place, faults))


def load_ns(place: Place, faults: dict[str, float]) -> int:
    """What a replica takes to start; requests come when all have started."""
    severity = faults.get("cold_start")
    return 0 if severity is None else int(place.after_s * (0.25 + 0.6 * severity) * NS)


# ------------------------------------------------------------------------------------- the vendor


class Vendor:
    """Two upstreams of a vendor: latency, a budget of requests per second, and retries after 429.

    Writes what the gateway's observer would write.
    """

    RETRY_S, TRIES = 1.0, 4

    def __init__(self, case: Case, faults: dict[str, float], folder: Path | None) -> None:
        self._draw = Random(f"{case.seed}/vendor")
        self._faults = faults
        self._file = None if folder is None else JournalFile(folder, "simulation")
        self.latencies: dict[int, dict[str, float]] = {}
        self._kept: list[AnyRecord] = []

    def run(self, place: Place, wishes: Sequence[Wish]) -> None:
        """Answer all requests."""
        rate = place.rate_rps
        budget, tokens, last_s = 1.6 * rate, 5.0, 0.0
        heap = [(wish.at_ns / NS, wish.number, 1) for wish in wishes]
        heapq.heapify(heap)
        by_number = {wish.number: wish for wish in wishes}
        for name in ("up-0", "up-1"):
            self._write(records.ReplicaChanged(0, name, MODEL, "ready"))
        while heap:
            at_s, number, attempt = heapq.heappop(heap)
            wish, hurt = by_number[number], at_s * NS >= place.fault_ns
            if attempt == 1:
                self._arrive(wish)
            throttled = self._faults.get("vendor_throttling")
            limit = rate * (1.05 - 0.35 * throttled) if throttled is not None and hurt else budget
            tokens = min(5.0, tokens + (at_s - last_s) * limit)
            last_s = at_s
            again_s = self._attempt(wish, at_s, attempt, hurt=hurt, tokens=tokens)
            if again_s is not None:
                heapq.heappush(heap, (again_s, number, attempt + 1))
            else:
                tokens -= 1.0
        if self._file is not None:
            for record in sorted(self._kept, key=lambda each: each.t_ns):
                self._file.append(record)
            self._file.close()

    def _write(self, record: AnyRecord) -> None:
        self._kept.append(record)

    def _arrive(self, wish: Wish) -> None:
        self._write(
            records.RequestArrived(
                wish.at_ns, str(wish.number), MODEL, wish.at_ns, wish.shared + wish.own,
                2 * wish.output, tenant=wish.tenant,
            )
        )  # fmt: skip

    def _attempt(
        self, wish: Wish, at_s: float, attempt: int, *, hurt: bool, tokens: float
    ) -> float | None:
        """One try; when the next one is to be, ``None`` where this one answers."""
        draw, t_ns, name = Random(f"{wish.number}/{attempt}"), int(at_s * NS), str(wish.number)
        failing = self._faults.get("upstream_failover") if hurt else None
        replica = f"up-{wish.number % 2}" if attempt == 1 else f"up-{(wish.number + 1) % 2}"
        self._write(records.RequestDispatched(t_ns, name, replica, attempt))
        if tokens < 1.0 and attempt < self.TRIES:
            told_ns = t_ns + int(0.02 * NS)
            self._write(records.AttemptFailed(told_ns, name, replica, attempt, "full", "429"))
            wait_s: float = self.RETRY_S * 2.0 ** (attempt - 1) * draw.uniform(0.8, 1.2)
            return at_s + 0.02 + wait_s
        if failing is not None and replica == "up-0" and draw.random() < 0.15 + 0.8 * failing:
            wait_s = (0.5 + 3.0 * failing) * draw.uniform(0.8, 1.2)
            self._write(
                records.AttemptFailed(
                    t_ns + int(wait_s * NS), name, replica, attempt, "fault", "no answer"
                )
            )
            return at_s + wait_s
        slow = self._faults.get("upstream_slow") if hurt else None
        factor = 1.0 if slow is None else 1.25 + 1.5 * slow
        first_s = at_s + factor * (0.15 + 4e-5 * (wish.shared + wish.own)) * draw.lognormvariate(
            0.0, 0.35
        )
        gap_s = factor * 0.012 * draw.lognormvariate(0.0, 0.15)
        self._end(wish, at_s, first_s, first_s + gap_s * (wish.output - 1), attempt)
        return None

    def _end(self, wish: Wish, at_s: float, first_s: float, end_s: float, attempt: int) -> None:
        name, arrived_s = str(wish.number), wish.at_ns / NS
        ttft_ns, tpot_ns = int((first_s - arrived_s) * NS), int((end_s - first_s) * NS)
        tpot_ns //= max(1, wish.output - 1)
        self._write(records.FirstToken(int(first_s * NS), name, ttft_ns))
        replica = f"up-{(wish.number + (attempt > 1)) % 2}"
        self._write(
            records.RequestEnded(
                int(end_s * NS), name, MODEL, "stop", wish.at_ns, replica, attempt,
                wish.shared + wish.own, 0, wish.output,
                admission_ns=int((at_s - arrived_s) * NS),
                prefill_ns=int((first_s - at_s) * NS), decode_ns=int((end_s - first_s) * NS),
                ttft_ns=ttft_ns, tpot_ns=tpot_ns,
            )
        )  # fmt: skip
        self.latencies[wish.number] = {
            "ttft": ttft_ns / NS, "tpot": tpot_ns / NS, "e2e": end_s - arrived_s,
        }  # fmt: skip


# -------------------------------------------------------------------------------------- the truth


def percentile_of(
    place: Place, wishes: Sequence[Wish], latencies: dict[int, dict[str, float]], metric: str
) -> tuple[float, float]:
    """p99 before the fault and after it."""
    before: list[float] = []
    after: list[float] = []
    for wish in wishes:
        seconds = latencies.get(wish.number, {}).get(metric)
        if seconds is not None:
            (after if wish.at_ns >= place.fault_ns else before).append(seconds)
    warm = before[len(before) // 10 :]
    return float(np.quantile(warm or [0.0], 0.99)), float(np.quantile(after or [0.0], 0.99))


def play(
    place: Place, case: Case, faults: dict[str, float], folder: Path | None
) -> dict[str, tuple[float, float]]:
    """p99 before and after for each metric, with these faults."""
    if case.is_remote:
        wishes = traffic(place, case, faults)
        vendor = Vendor(case, faults, folder)
        vendor.run(place, wishes)
        latencies = vendor.latencies
    else:
        run = _Played(place, case, faults, folder)
        run.run(run)
        wishes, latencies = run._wishes, run.tee.latencies  # noqa: SLF001 - of this module
    return {metric: percentile_of(place, wishes, latencies, metric) for metric in METRICS}


def fault_s(case: Case) -> float:
    """When the faults of a case begin."""
    place = Place.of(case)
    return (place.fault_ns + load_ns(place, dict(case.faults))) / NS


def journal_of(case: Case, folder: Path) -> Path:
    """The journal of a case alone."""
    play(Place.of(case), case, dict(case.faults), folder)
    return folder


def make(case: Case, root: Path) -> Path:
    """Play a case into a folder, with the truth beside the journal; returns the folder."""
    folder = root / case.name
    truth = folder / "truth.json"
    if truth.exists():
        return folder
    place, faults = Place.of(case), dict(case.faults)
    found = {"all": play(place, case, faults, folder / "journal")}
    found["none"] = play(place, case, {}, None) if faults else found["all"]
    if len(faults) > 1:
        for name, severity in faults.items():
            found[name] = play(place, case, {name: severity}, None)
    truth.write_text(
        json.dumps({"fault_s": fault_s(case), "p99": found, "faults": faults}),
        encoding="utf-8",
    )
    return folder


def shares(truth: dict[str, object], metric: str) -> dict[str, float]:
    """What of the change of a metric each fault is answerable for, mean over the orders of two."""
    p99: dict[str, dict[str, tuple[float, float]]] = truth["p99"]  # type: ignore[assignment]
    faults = list(truth["faults"])  # type: ignore[call-overload]
    before, after = p99["all"][metric]
    change = after - before
    if not faults or change <= 0:
        return {}
    without = p99["none"][metric][1]
    if len(faults) == 1:
        return {CAUSES[faults[0]]: (after - without) / change}
    found: dict[str, float] = {}
    for one, other in (faults, faults[::-1]):
        alone, beside = p99[one][metric][1] - without, after - p99[other][metric][1]
        found[CAUSES[one]] = found.get(CAUSES[one], 0.0) + (alone + beside) / 2 / change
    return found


def is_potent(truth: dict[str, object], metric: str) -> bool:
    """Whether the faults moved the metric enough to be an incident."""
    p99: dict[str, dict[str, tuple[float, float]]] = truth["p99"]  # type: ignore[assignment]
    before, after = p99["all"][metric]
    without = p99["none"][metric][1]
    return after > (1 + EFFECT_MIN) * without and after > (1 + EFFECT_MIN) * before
