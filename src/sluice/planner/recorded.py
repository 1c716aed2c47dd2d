"""Recorded traffic: what a journal says was asked for, when, and what came of it.

``read_recorded`` reads a journal of a live server or of a simulation. ``Recorded.asks`` is its
traffic as a workload. Token ids are not in a journal: prompts keep their lengths and, as far as
one replica saw them, their common beginnings. A request that was refused or left has no length
known, and gets one that others of its class had, longer than what it had already.
"""

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from sluice.config.sections import SloSection
from sluice.core.admission import NS_PER_S
from sluice.core.costmodel import CostState
from sluice.core.events import ReplicaLimits, Submitted
from sluice.core.request import COMPLETE, EndReason, Request, Rung
from sluice.core.roster import BatchingLimits
from sluice.planner.measured import Speed, StepLoads, speed_of
from sluice.runtime.recording import Entry, ReplicaStart, read_entry
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import (
    AnyRecord,
    PolicyRecord,
    ReplicaChanged,
    RequestArrived,
    RequestDegraded,
    RequestEnded,
    RequestRejected,
)
from sluice.workload.asks import Ask, BadWorkload, Part, own_text, shared_text

BLOCK_TOKENS = 32
ALL = "", ""
_REASONS = frozenset(EndReason)
# A simulation has memory for each block.
_BLOCKS_MAX = 1 << 24
DEGRADING = {Rung.SHORTEN, Rung.SMALLER}


@dataclass(frozen=True, slots=True)
class RecordedReplica:
    """What one replica was made of and how fast it was; ``speed`` None where that is not known."""

    model: str
    limits: ReplicaLimits
    batching: BatchingLimits | None
    cost: CostState | None
    speed: Speed | None


@dataclass(slots=True)
class RecordedRequest:
    """One request: as it came, and its one ending, as far as the journal has it."""

    arrived: RequestArrived
    ended: RequestEnded | None = None
    rejected: RequestRejected | None = None
    degraded: bool = False
    blocks: "array[int]" = field(default_factory=lambda: array("I"))


@dataclass(frozen=True, eq=False)
class Recorded:
    """All that a journal says about a fleet and its traffic. ``problems`` could not be read.

    ``classes`` are the targets that requests of each class had.
    """

    requests: tuple[RecordedRequest, ...]
    replicas: Mapping[str, RecordedReplica]
    classes: Mapping[str, SloSection]
    problems: tuple[str, ...]

    @property
    def models(self) -> dict[str, list[RecordedReplica]]:
        """Replicas by model, in the order in which they were first ready."""
        found: dict[str, list[RecordedReplica]] = defaultdict(list)
        for replica in self.replicas.values():
            found[replica.model].append(replica)
        return found

    @property
    def classes_named(self) -> frozenset[str]:
        """The classes of the requests; of some the targets may not be known."""
        return frozenset(one.arrived.slo_class for one in self.requests if one.arrived.slo_class)

    @property
    def began_ns(self) -> int:
        """When the first request came to the fleet, by the clock of the journal."""
        return self.requests[0].arrived.t_ns

    def mean_tokens(self) -> tuple[float, float]:
        """Prompt and output of the requests that tell them."""
        asks = list(self.asks(0))
        total = len(asks)
        return (
            sum(ask.prompt_tokens for ask in asks) / total,
            sum(ask.output_tokens for ask in asks) / total,
        )

    def asks(self, seed: int) -> Iterator[Ask]:
        """See ``Workload``. ``seed`` decides the lengths that are not known alone.

        All have a tier, a deadline and a ladder as they had, be it their own or their class's.
        """
        draw = Random(f"{seed}/lengths")
        seen = Counter(block for request in self.requests for block in request.blocks)
        prompts, outputs = self._known()
        for number, request in enumerate(self.requests):
            arrived = request.arrived
            output = _output_tokens(request)
            key = arrived.model, arrived.slo_class
            unknown_prompt = _drawn(prompts, key, draw)
            unknown_output = _drawn(outputs, key, draw, _tokens_produced(request))
            yield Ask(
                number,
                arrived.t_ns - self.began_ns,
                _parts(request, number, seen, arrived.prompt_tokens or unknown_prompt),
                unknown_output if output is None else output,
                arrived.output_tokens_max or None,
                arrived.model,
                arrived.slo_class,
                arrived.tenant,
                arrived.choices,
                arrived.tier,
                None if arrived.deadline_ns is None else arrived.deadline_ns - arrived.arrived_ns,
                may_degrade=bool(DEGRADING & set(arrived.overload)),
                leaves_ns=_left_after_ns(request),
                read_ns=arrived.t_ns - arrived.arrived_ns,
            )

    def _known(self) -> tuple[dict[tuple[str, str], list[int]], dict[tuple[str, str], list[int]]]:
        """Lengths of prompts and of answers by model and class, and of all, shortest first."""
        prompts: dict[tuple[str, str], list[int]] = defaultdict(list)
        outputs: dict[tuple[str, str], list[int]] = defaultdict(list)
        for request in self.requests:
            output = _output_tokens(request)
            for key in (request.arrived.model, request.arrived.slo_class), ALL:
                if request.arrived.prompt_tokens:
                    prompts[key].append(request.arrived.prompt_tokens)
                if output is not None:
                    outputs[key].append(output)
        for lengths in (*prompts.values(), *outputs.values()):
            lengths.sort()
        return prompts, outputs


def read_recorded(folder: Path) -> Recorded:
    """Read a journal. Raises ``BadWorkload`` where it has no two requests and no replica."""
    reader, reading = JournalReader(folder), _Reading()
    for entry in reader.entries():
        reading.take(entry.record)
    if not folder.is_dir():
        raise BadWorkload(f"there is no journal folder {folder}")
    if len(reading.requests) < 2 or not reading.limits:
        raise BadWorkload(
            f"the journal in {folder} has {len(reading.requests)} requests and "
            f"{len(reading.limits)} replicas; a replay needs two requests and the start of a "
            f"replica: take a journal that begins with the start of the server"
        )
    requests = sorted(reading.requests.values(), key=lambda one: one.arrived.t_ns)
    replicas = {name: reading.replica(name) for name in reading.limits}
    problems = list(reader.problems)
    if reading.unread:
        problems.append(
            f"entries of replicas that another version of sluice wrote were left out "
            f"({reading.unread}): common beginnings of prompts are not known from them"
        )
    if reading.senseless:
        problems.append(f"{reading.senseless} records that make no sense were left out")
    return Recorded(tuple(requests), replicas, reading.classes, tuple(problems))


class _Reading:
    """One pass over a journal."""

    def __init__(self) -> None:
        self.requests: dict[str, RecordedRequest] = {}
        self.limits: dict[str, tuple[str, ReplicaLimits]] = {}
        self.classes: dict[str, SloSection] = {}
        self.unread = self.senseless = 0
        self._starts: dict[str, ReplicaStart] = {}
        self._loads = StepLoads()

    def take(self, record: AnyRecord) -> None:
        """Look at one record."""
        if not _makes_sense(record):
            self.senseless += 1
            return
        self._loads.take(record)
        match record:
            case RequestArrived():
                self.requests[record.id] = RecordedRequest(record)
            case RequestEnded() if record.id in self.requests:
                self.requests[record.id].ended = record
            case RequestRejected() if record.id in self.requests:
                self.requests[record.id].rejected = record
            case RequestDegraded() if record.id in self.requests:
                self.requests[record.id].degraded = True
            case ReplicaChanged() if record.block_size:
                limits = ReplicaLimits(
                    record.context_tokens_max,
                    record.block_size,
                    record.blocks_total,
                    record.sequences_max,
                )
                self.limits[record.replica] = record.model, limits
            case PolicyRecord() if record.name in ("ReplicaStart", "Submitted"):
                self._policy(record)
            case _:
                pass

    def _policy(self, record: PolicyRecord) -> None:
        try:
            value = read_entry(Entry(record.t_ns, record.role, record.name, record.payload))
        except ValueError:
            self.unread += 1
            return
        if isinstance(value, ReplicaStart):
            self._starts.setdefault(record.owner, value)
        elif isinstance(value, Submitted) and value.request.id in self.requests:
            name = value.request.slo_class
            if name and name not in self.classes:
                self.classes[name] = _class_of(value.request)
            # A pseudonym stands for all tokens up to it.
            ends = value.request.prompt[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]
            self.requests[value.request.id].blocks = array("I", ends)

    def replica(self, name: str) -> RecordedReplica:
        """What is known of a replica."""
        model, limits = self.limits[name]
        start = self._starts.get(name)
        samples = self._loads.replicas.get(name)
        return RecordedReplica(
            model,
            limits,
            None if start is None else start.limits,
            None if start is None else start.cost,
            None if samples is None else speed_of(samples.samples),
        )


def _makes_sense(record: AnyRecord) -> bool:
    """Whether a record tells what can be: another version, or nobody of ours, may have written
    it."""
    match record:
        case RequestArrived():
            return record.choices > 0 and min(record.prompt_tokens, record.output_tokens_max) >= 0
        case RequestEnded():
            counts = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
            return record.reason in _REASONS and min(counts) >= 0
        case ReplicaChanged():
            limits = (record.context_tokens_max, record.block_size, record.sequences_max)
            return 0 <= record.blocks_total <= _BLOCKS_MAX and min(limits) >= 0
        case _:
            return True


def _class_of(request: Request) -> SloSection:
    """The targets of a request's class."""
    ladder: Any = tuple(rung.value for rung in request.overload)
    ttft_ns = None if request.ttft_due_ns is None else request.ttft_due_ns - request.arrived_ns
    return SloSection(
        ttft_s=None if ttft_ns is None else ttft_ns / NS_PER_S,
        tpot_s=None if request.tpot_ns is None else request.tpot_ns / NS_PER_S,
        percentile=request.quantile * 100,
        tier=request.tier,
        overload=ladder,
        shorten_tokens=request.shorten_tokens or SloSection().shorten_tokens,
    )


def _output_tokens(request: RecordedRequest) -> int | None:
    """Tokens of one choice of a whole answer; ``None`` where it was cut off."""
    ended = request.ended
    if ended is None or ended.reason not in COMPLETE or not ended.completion_tokens:
        return None
    return _tokens_produced(request)


def _tokens_produced(request: RecordedRequest) -> int:
    """Tokens of one choice that there were at its end."""
    produced = 0 if request.ended is None else request.ended.completion_tokens
    return -(-produced // request.arrived.choices)


def _left_after_ns(request: RecordedRequest) -> int | None:
    ended = request.ended
    if ended is None or ended.reason != EndReason.CANCELLED:
        return None
    return ended.t_ns - request.arrived.t_ns


def _drawn(
    known: Mapping[tuple[str, str], list[int]], key: tuple[str, str], draw: Random, above: int = 0
) -> int:
    """A length ``above`` what is known of it that another request had, of the same class if there
    is one; the next length where none was longer."""
    at = draw.random()
    for lengths in (known.get(key, ()), known.get(ALL, ())):
        first = bisect_right(lengths, above)
        if first < len(lengths):
            return lengths[first + int(at * (len(lengths) - first))]
    return above + 1


def _parts(
    request: RecordedRequest, number: int, seen: Counter[int], prompt_tokens: int
) -> tuple[Part, ...]:
    """The prompt's leading blocks that others have too, and the rest."""
    shared: list[Part] = []
    for block in request.blocks:
        if seen[block] < 2:
            break
        shared.append(Part(shared_text(block), BLOCK_TOKENS))
    left = prompt_tokens - BLOCK_TOKENS * len(shared)
    return (*shared, Part(own_text(number), left)) if left > 0 else tuple(shared)
