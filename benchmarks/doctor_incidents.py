"""Incidents whose true cause and share are known, for ``benchmarks/doctor.py``.

Each is played with its faults and without them, on the same requests at the same times, by
``planner.simulation``: the core in virtual time, on replicas whose steps do not follow the cost
model that the doctor fits. What differs between the two runs is the effect of the faults. A vendor
behind the gateway is played by a small model of its own, ``Vendor``.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np

from benchmarks.doctor_cases import (
    CAUSES,
    EFFECT_MIN,
    METRICS,
    MODEL,
    NS,
    Case,
)
from benchmarks.doctor_traffic import Place, Steps, Wish, traffic
from benchmarks.doctor_vendor import Vendor
from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import SloSection
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
