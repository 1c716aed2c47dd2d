"""Records of a journal to columns: a whole folder at once, or piece by piece as it grows.

``read_journal`` is for one diagnosis; ``tail`` feeds a ``Reading`` for as long as somebody watches
and lets it forget what is old. Nothing is judged here.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from sluice.core.events import Submitted
from sluice.core.request import COMPLETE, EndReason, Request
from sluice.core.roster import BatchingLimits
from sluice.doctor.columns import (
    Change,
    Floats,
    HostSample,
    Ints,
    Journal,
    Names,
    NoRequests,
    ReplicaChange,
    Requests,
    Sample,
    Steps,
)
from sluice.doctor.facts import (
    ArrivedFact,
    AttemptFact,
    DeploymentFact,
    DispatchedFact,
    EndedFact,
    EngineFact,
    Fact,
    FactReader,
    FirstFact,
    GapFact,
    HostFact,
    PolicyFact,
    RejectedFact,
    ReplicaFact,
    StepFact,
)
from sluice.runtime.recording import ReplicaStart
from sluice.telemetry.journal import JournalReader

Kind = TypeVar("Kind")
Number = TypeVar("Number", int, float)

# Columns of requests: name, and what stands there until a record tells.
_TIMES = ("seen_ns", "dispatched_ns", "failed_ns")
_SPANS = ("retrieval", "admission", "queue", "prefill", "decode", "preempted")
_NUMBERS = (
    "arrived_ns", "prompt", "output_max", "ttft_ns", "tpot_ns", "ended_ns", "cached", "completion",
    "preemptions", "attempts", "full", "faults", "rejected", "places_max", "limited", "cancelled",
    "left",
    *_TIMES,
    *(f"{span}_ns" for span in _SPANS),
)  # fmt: skip
_ZERO_AT_FIRST = {"full", "faults", "rejected", "limited", "cancelled", "left"}
# Reasons for which a tenant's own limits refuse a request.
_TENANT_LIMITS = frozenset({"requests_per_minute", "tokens_per_minute", "concurrency"})
_NAMES = ("model", "tenant", "slo_class", "replica")
_OF_CHUNKS = ("chunk_step", "chunk_request", "chunk_tokens")
_CLASS_SAMPLES = 200
_TENANTS_NAMED = 10_000


def read_journal(folder: Path, told: Callable[[int], None] = lambda _: None) -> Journal:
    """Read a journal folder; ``told`` hears how many records were read, now and then.

    Raises ``NoRequests``.
    """
    if not folder.is_dir():
        raise NoRequests(f"there is no journal folder {folder}")
    reader, reading = JournalReader(folder), Reading()
    for offset_ns, body in reader.bodies():
        reading.take(offset_ns, body)
        told(reading.records)
    if not reading.has_requests:
        raise NoRequests(
            f"the journal in {folder} has no requests ({reading.records:,} records); is this the "
            f"folder that the server writes to?"
        )
    return reading.journal(reader.problems)


@dataclass(slots=True)
class _StepRows:
    """Columns of steps while they grow. What records tell may be any number of 64 bits."""

    replica: "array[int]" = field(default_factory=lambda: array("q"))
    end_ns: "array[float]" = field(default_factory=lambda: array("d"))
    measured_ns: "array[float]" = field(default_factory=lambda: array("d"))
    rows: "array[float]" = field(default_factory=lambda: array("d"))
    prefill: "array[float]" = field(default_factory=lambda: array("d"))
    chunk_context: "array[float]" = field(default_factory=lambda: array("d"))
    blocks_free: "array[float]" = field(default_factory=lambda: array("d"))
    running: "array[float]" = field(default_factory=lambda: array("d"))
    waiting: "array[float]" = field(default_factory=lambda: array("d"))
    chunk_step: "array[int]" = field(default_factory=lambda: array("q"))
    chunk_request: "array[int]" = field(default_factory=lambda: array("q"))
    chunk_tokens: "array[float]" = field(default_factory=lambda: array("d"))

    def since(self, horizon_ns: float, place: Ints) -> "_StepRows":
        """Those that ended from a time on; ``place`` is where each request stands now, or -1."""
        end_ns = np.array(self.end_ns)
        kept = np.flatnonzero(end_ns >= horizon_ns)
        step = np.full(len(end_ns), -1, dtype=np.int64)
        step[kept] = np.arange(len(kept))
        steps = step[np.array(self.chunk_step, dtype=np.int64)]
        chunks = np.flatnonzero(steps >= 0)
        requests = np.array(self.chunk_request, dtype=np.int64)
        found = _StepRows(
            chunk_step=array("q", steps[chunks].tobytes()),
            chunk_request=array(
                "q", np.where(requests >= 0, place[requests], -1)[chunks].tobytes()
            ),
            chunk_tokens=_kept(self.chunk_tokens, chunks),
        )
        for each in fields(self):
            if each.name not in _OF_CHUNKS:
                setattr(found, each.name, _kept(getattr(self, each.name), kept))
        return found


class Reading:
    """What was read so far. Segments come one after the other, so that a replica's records can
    come before or after those of the gateway that belong to them. ``records`` counts all."""

    def __init__(self) -> None:
        self.records = 0
        self._facts = FactReader()
        self._offset_ns = 0
        self._ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._numbers = {name: array("d") for name in _NUMBERS}
        self._names = {name: array("q") for name in _NAMES}
        self._of = {name: Names() for name in _NAMES}
        self._of["tenant"] = Names(_TENANTS_NAMED)
        self._steps = _StepRows()
        self._replicas: list[ReplicaChange] = []
        self._changes: list[Change] = []
        self._gaps: list[tuple[float, int]] = []
        self._samples: list[Sample] = []
        self._hosts: list[HostSample] = []
        self._starts: dict[str, list[tuple[float, BatchingLimits]]] = defaultdict(list)
        self._classes: dict[str, Request] = {}
        self._submitted = 0
        self._seen_twice: Counter[str] = Counter()
        self._takes: dict[type[Fact], Callable[..., None]] = {
            ArrivedFact: self._arrived,
            DispatchedFact: self._dispatched,
            AttemptFact: self._attempt,
            RejectedFact: self._rejected,
            FirstFact: self._first,
            EndedFact: self._ended,
            ReplicaFact: self._replica,
            EngineFact: self._engine,
            HostFact: self._host,
            StepFact: self._step,
            PolicyFact: self._policy,
            DeploymentFact: self._deployment,
            GapFact: self._gap,
        }

    @property
    def has_requests(self) -> bool:
        """Whether any request was named."""
        return bool(self._ids)

    def take(self, offset_ns: int, body: bytes) -> None:
        """Take a frame in; ``offset_ns`` makes wall-clock times of its own."""
        self._offset_ns = offset_ns
        found = self._facts.facts(body)
        for fact in found:
            take = self._takes.get(type(fact))
            if take is not None:
                take(fact)
        self.records += len(found)

    # -------------------------------------------------------------------------------- forgetting

    def oldest_ns(self) -> float:
        """When the first request was seen that is remembered; infinite where there is none."""
        seen_ns = np.array(self._numbers["seen_ns"])
        return float(np.min(seen_ns, where=~np.isnan(seen_ns), initial=np.inf))

    def latest_ns(self) -> float:
        """When the last request was seen; minus infinity where there is none."""
        seen_ns = np.array(self._numbers["seen_ns"])
        return float(np.max(seen_ns, where=~np.isnan(seen_ns), initial=-np.inf))

    def forget_before(self, horizon_ns: float) -> None:
        """Forget requests that came, and steps that ended, before a time."""
        arrived_ns = np.array(self._numbers["arrived_ns"])
        late = np.flatnonzero(arrived_ns >= horizon_ns)
        first = late[0] if len(late) else len(arrived_ns)
        # One whose arrival was not read yet, as its replica was quicker to write, is kept.
        kept = np.flatnonzero(
            (arrived_ns >= horizon_ns)
            | (np.isnan(arrived_ns) & (np.arange(len(arrived_ns)) > first))
        )
        place = np.full(len(arrived_ns), -1, dtype=np.int64)
        place[kept] = np.arange(len(kept))
        self._numbers = {name: _kept(values, kept) for name, values in self._numbers.items()}
        self._names = {name: _kept(values, kept) for name, values in self._names.items()}
        self._ids = [self._ids[row] for row in kept]
        self._rows = {name: int(place[row]) for name, row in self._rows.items() if place[row] >= 0}
        self._steps = self._steps.since(horizon_ns, place)
        self._samples = [each for each in self._samples if each.t_ns >= horizon_ns]
        self._hosts = [each for each in self._hosts if each.t_ns >= horizon_ns]

    # ---------------------------------------------------------------------------------- requests

    def _row(self, name: str) -> int:
        """The row of a request, a fresh one where it is not known."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self._fresh(name)
        return row

    def _fresh(self, name: str) -> int:
        self._ids.append(name)
        for column, values in self._numbers.items():
            values.append(0.0 if column in _ZERO_AT_FIRST else np.nan)
        for column, numbers in self._names.items():
            numbers.append(self._of[column].number(""))
        return len(self._ids) - 1

    def _arrived(self, fact: ArrivedFact) -> None:
        row, numbers = self._row(fact.id), self._numbers
        if not np.isnan(numbers["seen_ns"][row]):  # the same id again: another request
            self._seen_twice[fact.id] += 1
            row = self._rows[fact.id] = self._fresh(fact.id)
        numbers["seen_ns"][row] = fact.t_ns + self._offset_ns
        numbers["arrived_ns"][row] = fact.arrived_ns + self._offset_ns
        numbers["prompt"][row] = fact.prompt_tokens
        numbers["output_max"][row] = fact.output_tokens_max
        for column in ("model", "tenant", "slo_class"):
            self._names[column][row] = self._of[column].number(getattr(fact, column))

    def _dispatched(self, fact: DispatchedFact) -> None:
        row = self._row(fact.id)
        if np.isnan(self._numbers["dispatched_ns"][row]):
            self._numbers["dispatched_ns"][row] = fact.t_ns + self._offset_ns
        self._names["replica"][row] = self._of["replica"].number(fact.replica)

    def _attempt(self, fact: AttemptFact) -> None:
        row = self._row(fact.id)
        self._numbers["full" if fact.outcome == "full" else "faults"][row] += 1
        self._numbers["failed_ns"][row] = fact.t_ns + self._offset_ns

    def _rejected(self, fact: RejectedFact) -> None:
        row, numbers = self._row(fact.id), self._numbers
        numbers["rejected"][row] = fact.status
        if fact.reason == "queue_full":
            numbers["places_max"][row] = fact.threshold
        elif fact.reason in _TENANT_LIMITS:
            numbers["limited"][row] = 1.0

    def _first(self, fact: FirstFact) -> None:
        self._numbers["ttft_ns"][self._row(fact.id)] = fact.ttft_ns

    def _ended(self, fact: EndedFact) -> None:
        row, numbers = self._row(fact.id), self._numbers
        numbers["ended_ns"][row] = fact.t_ns + self._offset_ns
        numbers["arrived_ns"][row] = fact.arrived_ns + self._offset_ns
        numbers["cached"][row] = fact.cached_tokens
        numbers["completion"][row] = fact.completion_tokens
        numbers["preemptions"][row] = fact.preemptions
        numbers["attempts"][row] = fact.attempts
        numbers["cancelled"][row] = float(fact.reason not in COMPLETE)
        numbers["left"][row] = float(fact.reason == EndReason.CANCELLED)
        for span in _SPANS:
            numbers[f"{span}_ns"][row] = getattr(fact, f"{span}_ns")
        if fact.ttft_ns is not None:
            numbers["ttft_ns"][row] = fact.ttft_ns
        if fact.tpot_ns is not None:
            numbers["tpot_ns"][row] = fact.tpot_ns
        if fact.replica:
            self._names["replica"][row] = self._of["replica"].number(fact.replica)

    # ------------------------------------------------------------------------ replicas and steps

    def _replica(self, fact: ReplicaFact) -> None:
        self._replicas.append(
            ReplicaChange(
                fact.t_ns + self._offset_ns,
                fact.replica,
                fact.model,
                fact.state,
                fact.block_size,
                fact.blocks_total,
                fact.sequences_max,
                fact.context_tokens_max,
            )
        )

    def _engine(self, fact: EngineFact) -> None:
        self._samples.append(
            Sample(
                float(fact.t_ns + self._offset_ns),
                fact.replica,
                fact.waiting,
                fact.running,
                fact.kv_use,
                fact.counters,
            )
        )

    def _host(self, fact: HostFact) -> None:
        t_ns = float(fact.t_ns + self._offset_ns)
        self._hosts.append(HostSample(t_ns, fact.replica, fact.used_ns, fact.waited_ns))

    def _step(self, fact: StepFact) -> None:
        if fact.error or fact.measured_ns <= 0:
            return
        steps, prefill, context = self._steps, 0, 0
        number = len(steps.end_ns)
        for chunk in fact.prefill:
            prefill += chunk.tokens
            context += chunk.tokens * chunk.past_tokens + chunk.tokens * (chunk.tokens + 1) // 2
            steps.chunk_step.append(number)
            steps.chunk_request.append(self._row(chunk.id))
            steps.chunk_tokens.append(chunk.tokens)
        steps.replica.append(self._of["replica"].number(fact.replica))
        steps.end_ns.append(fact.t_ns + self._offset_ns)
        steps.measured_ns.append(fact.measured_ns)
        steps.rows.append(fact.rows)
        steps.prefill.append(prefill)
        steps.chunk_context.append(context)
        steps.blocks_free.append(fact.blocks_free)
        steps.running.append(fact.running)
        steps.waiting.append(fact.waiting)

    def _policy(self, fact: PolicyFact) -> None:
        if fact.name == "ReplicaStart":
            started = _decoded(fact.payload, ReplicaStart)
            if started is not None:
                at = (float(fact.t_ns + self._offset_ns), started.limits)
                self._starts[fact.owner].append(at)
        elif fact.name == "Submitted" and self._submitted < _CLASS_SAMPLES:
            self._submitted += 1
            submitted = _decoded(fact.payload, Submitted)
            if submitted is not None:
                self._classes.setdefault(submitted.request.slo_class, submitted.request)

    def _deployment(self, fact: DeploymentFact) -> None:
        different = {name: f"{each.before} → {each.after}" for name, each in fact.changed.items()}
        # What a start tells beside its differences is the same at each.
        told = different if fact.what == "start" else fact.details | different
        self._changes.append(Change(fact.t_ns + self._offset_ns, fact.what, fact.version, told))

    def _gap(self, fact: GapFact) -> None:
        self._gaps.append((float(fact.t_ns + self._offset_ns), fact.dropped))

    # -------------------------------------------------------------------------------- the result

    def journal(self, problems: Sequence[str] = ()) -> Journal:
        """What was read, in order of time. Raises ``NoRequests``."""
        told = list(problems)
        if self._facts.skipped:
            told.append(f"{self._facts.skipped:,} records of unknown kinds or shapes were left out")
        numbers = {name: np.array(values) for name, values in self._numbers.items()}
        seen_ns, arrived_ns = numbers["seen_ns"], numbers["arrived_ns"]
        # Of a request that came before the journal begins nothing is known but its end.
        known = np.flatnonzero(~np.isnan(seen_ns))
        order = known[np.argsort(arrived_ns[known], kind="stable")]
        place = np.full(len(self._ids), -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        requests = Requests(
            [self._ids[row] for row in order],
            {name: values[order] for name, values in numbers.items()},
            {name: np.array(values, dtype=np.int64)[order] for name, values in self._names.items()},
            {name: of.names for name, of in self._of.items()},
        )
        if not len(requests):
            raise NoRequests("the journal has endings of requests but no arrivals")
        return Journal(
            requests,
            _steps_of(self._steps, place, self._blocks_total()),
            tuple(sorted(self._replicas, key=lambda change: change.t_ns)),
            tuple(sorted(self._changes, key=lambda change: change.t_ns)),
            tuple(sorted(self._gaps)),
            tuple(sorted(self._samples, key=lambda sample: sample.t_ns)),
            tuple(sorted(self._hosts, key=lambda sample: sample.t_ns)),
            dict(self._starts),
            self._classes,
            sum(self._seen_twice.values()),
            tuple(told),
        )

    def _blocks_total(self) -> dict[int, list[tuple[float, int]]]:
        """From which time on each replica had how many blocks, in order of time."""
        found: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for change in self._replicas:
            if change.blocks_total:
                number = self._of["replica"].number(change.replica)
                found[number].append((change.t_ns, change.blocks_total))
        return {number: sorted(starts) for number, starts in found.items()}


def _steps_of(
    rows: _StepRows, place: Ints, blocks_total: Mapping[int, Sequence[tuple[float, int]]]
) -> Steps:
    """Steps by time, with their pauses."""
    end_ns = np.array(rows.end_ns, dtype=np.float64)
    replica = np.array(rows.replica, dtype=np.int64)
    order = np.argsort(end_ns, kind="stable")
    moved = np.empty_like(order)
    moved[order] = np.arange(len(order))
    measured_ns = np.array(rows.measured_ns, dtype=np.float64)
    chunk_step = np.array(rows.chunk_step, dtype=np.int64)
    chunk_request = np.array(rows.chunk_request, dtype=np.int64)
    running = np.array(rows.running, dtype=np.float64)
    waiting = np.array(rows.waiting, dtype=np.float64)
    pause_ns = _pauses(replica, end_ns, measured_ns, running + waiting)
    total = np.zeros(len(end_ns))
    for number, starts in blocks_total.items():
        mine = np.flatnonzero(replica == number)
        mine = mine[np.argsort(end_ns[mine], kind="stable")]
        since_ns, blocks = np.array(starts, dtype=np.float64).T
        latest = np.searchsorted(since_ns, end_ns[mine], side="right") - 1
        total[mine] = np.where(latest >= 0, blocks[latest], 0)
        # A replica that started did not pause before.
        first = np.searchsorted(end_ns[mine], since_ns)
        pause_ns[mine[first[first < len(mine)]]] = 0.0
    held = np.maximum(0.0, total - np.array(rows.blocks_free, dtype=np.float64))

    def sorted_(values: "array[float]") -> Floats:
        return np.array(values, dtype=np.float64)[order]

    return Steps(
        replica=replica[order],
        end_ns=end_ns[order],
        measured_ns=measured_ns[order],
        pause_ns=pause_ns[order],
        rows=sorted_(rows.rows),
        prefill=sorted_(rows.prefill),
        chunk_context=sorted_(rows.chunk_context),
        kv_blocks=held[order],
        kv_total=total[order],
        running=running[order],
        waiting=waiting[order],
        chunk_step=moved[chunk_step] if len(chunk_step) else chunk_step,
        chunk_request=np.where(chunk_request >= 0, place[chunk_request], -1)
        if len(chunk_request)
        else chunk_request,
        chunk_tokens=np.array(rows.chunk_tokens, dtype=np.float64),
    )


def _pauses(replica: Ints, end_ns: Floats, measured_ns: Floats, left: Floats) -> Floats:
    """Time before each step in which its replica had work and computed nothing."""
    pauses = np.zeros(len(end_ns))
    for number in np.unique(replica):
        mine = np.flatnonzero(replica == number)
        mine = mine[np.argsort(end_ns[mine], kind="stable")]
        idle = end_ns[mine][1:] - measured_ns[mine][1:] - end_ns[mine][:-1]
        pauses[mine[1:]] = np.where(left[mine][:-1] > 0, np.maximum(0.0, idle), 0.0)
    return pauses


def _decoded(payload: msgspec.Raw, kind: type[Kind]) -> Kind | None:
    """What a policy record holds, ``None`` where another version wrote it."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.decode(payload, type=bytes), type=kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _kept(values: "array[Number]", rows: Ints) -> "array[Number]":
    """Some rows of a column."""
    return array(values.typecode, np.array(values)[rows].tobytes())
