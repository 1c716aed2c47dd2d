"""A journal as columns: one row per request, per step and per chunk of prefill.

Read once, front to back; ``diagnosis`` works on what comes out. Times are nanoseconds of the wall
clock of the machine that wrote them. A missing number is NaN, a missing name the empty one.
Nothing is judged here.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sluice.core.costmodel import CostState
from sluice.core.events import Submitted
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits
from sluice.doctor.facts import (
    ArrivedFact,
    AttemptFact,
    DegradedFact,
    DeploymentFact,
    DispatchedFact,
    EndedFact,
    Fact,
    FactReader,
    FirstFact,
    GapFact,
    PolicyFact,
    RejectedFact,
    ReplicaFact,
    StepFact,
)
from sluice.runtime.recording import ReplicaStart
from sluice.telemetry.journal import JournalReader

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Kind = TypeVar("Kind")

# Columns of requests: name, and what stands there until a record tells.
_TIMES = ("seen_ns", "dispatched_ns", "failed_ns")
_SPANS = ("retrieval", "admission", "queue", "prefill", "decode", "preempted")
_NUMBERS = (
    "arrived_ns", "prompt", "output_max", "ttft_ns", "tpot_ns", "ended_ns", "cached", "completion",
    "preemptions", "attempts", "full", "faults", "rejected", "degraded", "cancelled", "tier",
    *_TIMES,
    *(f"{span}_ns" for span in _SPANS),
)  # fmt: skip
_ZERO_AT_FIRST = {"full", "faults", "rejected", "degraded", "cancelled"}
_NAMES = ("model", "tenant", "slo_class", "replica")
_CLASS_SAMPLES = 200
_TENANTS_NAMED = 10_000
OTHERS = "(others)"


class NoRequests(Exception):
    """A journal in which there is nothing to diagnose; the message says what it holds."""


class Names:
    """Numbers for names, in the order in which they were first seen."""

    def __init__(self, most: int | None = None) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._most = most

    def number(self, name: str) -> int:
        """The number of a name; beyond the most that are told apart, that of all others."""
        found = self._numbers.get(name)
        if found is None:
            if self._most is not None and len(self.names) >= self._most:
                name = OTHERS
                if name in self._numbers:
                    return self._numbers[name]
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
        return found


@dataclass(frozen=True, eq=False)
class Requests:
    """One row per request, in order of arrival: ``numbers`` and the numbers of ``names``."""

    ids: list[str]
    numbers: dict[str, Floats]
    names: dict[str, Ints]
    of: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, column: str) -> Floats:
        return self.numbers[column]


@dataclass(frozen=True, eq=False)
class Steps:
    """One row per step that was computed, in order of time, and one per chunk.

    ``start_ns`` is its end less its measured time, ``pause_ns`` how long before that the replica
    computed nothing though it had work, ``kv_blocks`` how many of ``kv_total`` blocks were held.
    """

    replica: Ints
    end_ns: Floats
    measured_ns: Floats
    predicted_ns: Floats
    pause_ns: Floats
    rows: Floats
    prefill: Floats
    chunk_context: Floats
    kv_blocks: Floats
    kv_total: Floats
    running: Floats
    waiting: Floats
    chunk_step: Ints
    chunk_request: Ints
    chunk_tokens: Floats

    def __len__(self) -> int:
        return len(self.end_ns)

    @property
    def start_ns(self) -> Floats:
        """When each step began."""
        return self.end_ns - self.measured_ns


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """A replica became ready with these limits, or was lost."""

    t_ns: float
    replica: str
    model: str
    state: str
    block_size: int
    blocks_total: int
    sequences_max: int
    context_tokens_max: int


@dataclass(frozen=True, slots=True)
class Change:
    """Something that was deployed, and in which settings it differs."""

    t_ns: float
    what: str
    version: str
    details: dict[str, str]


@dataclass(frozen=True, eq=False)
class Journal:
    """All that diagnosis looks at. ``classes`` are the targets that requests of each class had."""

    requests: Requests
    steps: Steps
    replicas: tuple[ReplicaChange, ...]
    changes: tuple[Change, ...]
    gaps: tuple[tuple[float, int], ...]
    starts: dict[str, list[tuple[float, BatchingLimits, CostState]]]
    classes: dict[str, Request]
    duplicates: int
    problems: tuple[str, ...]


def read_journal(folder: Path, told: Callable[[int], None] = lambda _: None) -> Journal:
    """Read a journal folder; ``told`` hears how many records were read, now and then.

    Raises ``NoRequests``.
    """
    if not folder.is_dir():
        raise NoRequests(f"there is no journal folder {folder}")
    reader, facts, reading = JournalReader(folder), FactReader(), _Reading()
    count = 0
    for offset_ns, body in reader.bodies():
        reading.offset_ns = offset_ns
        found = facts.facts(body)
        for fact in found:
            take = reading.takes.get(type(fact))
            if take is not None:
                take(fact)
        count += len(found)
        told(count)
    if not reading.ids:
        raise NoRequests(
            f"the journal in {folder} has no requests ({count:,} records); is this the folder that "
            f"the server writes to?"
        )
    problems = list(reader.problems)
    if facts.skipped:
        problems.append(f"{facts.skipped:,} records of unknown kinds or shapes were left out")
    return reading.journal(tuple(problems))


@dataclass(slots=True)
class _StepRows:
    """Columns of steps while they grow. What records tell may be any number of 64 bits."""

    replica: "array[int]" = field(default_factory=lambda: array("q"))
    end_ns: "array[float]" = field(default_factory=lambda: array("d"))
    measured_ns: "array[float]" = field(default_factory=lambda: array("d"))
    predicted_ns: "array[float]" = field(default_factory=lambda: array("d"))
    rows: "array[float]" = field(default_factory=lambda: array("d"))
    prefill: "array[float]" = field(default_factory=lambda: array("d"))
    chunk_context: "array[float]" = field(default_factory=lambda: array("d"))
    blocks_free: "array[float]" = field(default_factory=lambda: array("d"))
    running: "array[float]" = field(default_factory=lambda: array("d"))
    waiting: "array[float]" = field(default_factory=lambda: array("d"))
    chunk_step: "array[int]" = field(default_factory=lambda: array("q"))
    chunk_request: "array[int]" = field(default_factory=lambda: array("q"))
    chunk_tokens: "array[float]" = field(default_factory=lambda: array("d"))


class _Reading:
    """One pass over a journal. Segments come one after the other, so that a replica's records can
    come before or after those of the gateway that belong to them."""

    def __init__(self) -> None:
        self.offset_ns = 0
        self.ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._numbers = {name: array("d") for name in _NUMBERS}
        self._names = {name: array("q") for name in _NAMES}
        self._of = {name: Names() for name in _NAMES}
        self._of["tenant"] = Names(_TENANTS_NAMED)
        self._steps = _StepRows()
        self._replicas: list[ReplicaChange] = []
        self._changes: list[Change] = []
        self._gaps: list[tuple[float, int]] = []
        self._starts: dict[str, list[tuple[float, BatchingLimits, CostState]]] = defaultdict(list)
        self._classes: dict[str, Request] = {}
        self._submitted = 0
        self._seen_twice: Counter[str] = Counter()
        self.takes: dict[type[Fact], Callable[..., None]] = {
            ArrivedFact: self._arrived,
            DispatchedFact: self._dispatched,
            AttemptFact: self._attempt,
            DegradedFact: self._degraded,
            RejectedFact: self._rejected,
            FirstFact: self._first,
            EndedFact: self._ended,
            ReplicaFact: self._replica,
            StepFact: self._step,
            PolicyFact: self._policy,
            DeploymentFact: self._deployment,
            GapFact: self._gap,
        }

    # ---------------------------------------------------------------------------------- requests

    def _row(self, name: str) -> int:
        """The row of a request, a fresh one where it is not known."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self._fresh(name)
        return row

    def _fresh(self, name: str) -> int:
        self.ids.append(name)
        for column, values in self._numbers.items():
            values.append(0.0 if column in _ZERO_AT_FIRST else np.nan)
        for column, numbers in self._names.items():
            numbers.append(self._of[column].number(""))
        return len(self.ids) - 1

    def _arrived(self, fact: ArrivedFact) -> None:
        row, numbers = self._row(fact.id), self._numbers
        if not np.isnan(numbers["seen_ns"][row]):  # the same id again: another request
            self._seen_twice[fact.id] += 1
            row = self._rows[fact.id] = self._fresh(fact.id)
        numbers["seen_ns"][row] = fact.t_ns + self.offset_ns
        numbers["arrived_ns"][row] = fact.arrived_ns + self.offset_ns
        numbers["prompt"][row] = fact.prompt_tokens
        numbers["output_max"][row] = fact.output_tokens_max
        numbers["tier"][row] = fact.tier
        for column in ("model", "tenant", "slo_class"):
            self._names[column][row] = self._of[column].number(getattr(fact, column))

    def _dispatched(self, fact: DispatchedFact) -> None:
        row = self._row(fact.id)
        if np.isnan(self._numbers["dispatched_ns"][row]):
            self._numbers["dispatched_ns"][row] = fact.t_ns + self.offset_ns
        self._names["replica"][row] = self._of["replica"].number(fact.replica)

    def _attempt(self, fact: AttemptFact) -> None:
        row = self._row(fact.id)
        self._numbers["full" if fact.outcome == "full" else "faults"][row] += 1
        self._numbers["failed_ns"][row] = fact.t_ns + self.offset_ns

    def _degraded(self, fact: DegradedFact) -> None:
        self._numbers["degraded"][self._row(fact.id)] = 1.0

    def _rejected(self, fact: RejectedFact) -> None:
        self._numbers["rejected"][self._row(fact.id)] = fact.status

    def _first(self, fact: FirstFact) -> None:
        self._numbers["ttft_ns"][self._row(fact.id)] = fact.ttft_ns

    def _ended(self, fact: EndedFact) -> None:
        row, numbers = self._row(fact.id), self._numbers
        numbers["ended_ns"][row] = fact.t_ns + self.offset_ns
        numbers["arrived_ns"][row] = fact.arrived_ns + self.offset_ns
        numbers["cached"][row] = fact.cached_tokens
        numbers["completion"][row] = fact.completion_tokens
        numbers["preemptions"][row] = fact.preemptions
        numbers["attempts"][row] = fact.attempts
        numbers["cancelled"][row] = float(fact.reason not in ("stop", "length"))
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
                fact.t_ns + self.offset_ns,
                fact.replica,
                fact.model,
                fact.state,
                fact.block_size,
                fact.blocks_total,
                fact.sequences_max,
                fact.context_tokens_max,
            )
        )

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
        steps.end_ns.append(fact.t_ns + self.offset_ns)
        steps.measured_ns.append(fact.measured_ns)
        steps.predicted_ns.append(fact.predicted_ns)
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
                at = (float(fact.t_ns + self.offset_ns), started.limits, started.cost)
                self._starts[fact.owner].append(at)
        elif fact.name == "Submitted" and self._submitted < _CLASS_SAMPLES:
            self._submitted += 1
            submitted = _decoded(fact.payload, Submitted)
            if submitted is not None:
                self._classes.setdefault(submitted.request.slo_class, submitted.request)

    def _deployment(self, fact: DeploymentFact) -> None:
        different = {name: f"{each.before} → {each.after}" for name, each in fact.changed.items()}
        told = fact.details | different
        self._changes.append(Change(fact.t_ns + self.offset_ns, fact.what, fact.version, told))

    def _gap(self, fact: GapFact) -> None:
        self._gaps.append((float(fact.t_ns + self.offset_ns), fact.dropped))

    # -------------------------------------------------------------------------------- the result

    def journal(self, problems: tuple[str, ...]) -> Journal:
        """What was read, in order of time."""
        numbers = {name: np.array(values) for name, values in self._numbers.items()}
        seen_ns, arrived_ns = numbers["seen_ns"], numbers["arrived_ns"]
        # Of a request that came before the journal begins nothing is known but its end.
        known = np.flatnonzero(~np.isnan(seen_ns))
        order = known[np.argsort(arrived_ns[known], kind="stable")]
        place = np.full(len(self.ids), -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        requests = Requests(
            [self.ids[row] for row in order],
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
            dict(self._starts),
            self._classes,
            sum(self._seen_twice.values()),
            problems,
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
        predicted_ns=sorted_(rows.predicted_ns),
        pause_ns=pause_ns[order],
        rows=sorted_(rows.rows),
        prefill=sorted_(rows.prefill),
        chunk_context=sorted_(rows.chunk_context),
        kv_blocks=held[order],
        kv_total=total[order],
        running=running[order],
        waiting=waiting[order],
        chunk_step=moved[chunk_step] if len(chunk_step) else chunk_step,
        chunk_request=place[chunk_request] if len(chunk_request) else chunk_request,
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
