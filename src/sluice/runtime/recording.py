"""What a replica decided, as plain entries from which it can be replayed without any text.

``ReplicaRecording`` turns events and effects into entries (msgpack payloads) for the journal, which
is written by ``runtime/recorder.py`` and read back by ``runtime/replay.py``. Token ids leave this
module as keyed pseudonyms only: ``p(i) = H(key, p(i-1), token(i))``, 64 bits in memory and the
lower 24 in entries. Two sequences have equal pseudonyms exactly as far as they have equal tokens,
which is all that the prefix cache looks at; without the key, which is never stored, tokens cannot
be recovered.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal
from zlib import crc32

import msgspec

from sluice.core.costmodel import CostState
from sluice.core.events import (
    Cancelled,
    Draining,
    End,
    ReplicaEffect,
    ReplicaEvent,
    RunStep,
    SequenceEnded,
    StepDone,
    StepFailed,
    Submitted,
    Woken,
)
from sluice.core.request import Request, SequenceId
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan, Sampled

PSEUDONYM_BYTES = 8
# A byte less than fits: pseudonyms do not compress, and they are most of a journal.
ENTRY_MASK = 0xFFFFFF


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """What a replica was made of: the first entry of its recording."""

    limits: BatchingLimits
    cost: CostState


@dataclass(frozen=True, slots=True)
class RowShape:
    """A row without its tokens; the block table as length and CRC-32."""

    sequence: SequenceId
    tokens: int
    past_tokens: int
    blocks: int
    blocks_crc32: int
    sample: bool


@dataclass(frozen=True, slots=True)
class PlanShape:
    """A plan without its tokens."""

    step: int
    predicted_ns: int
    rows: tuple[RowShape, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One event or effect at ``t_ns``. ``payload`` is msgpack of the value that ``name`` says."""

    t_ns: int
    role: Literal["event", "effect"]
    name: str
    payload: bytes


Recorded = ReplicaStart | ReplicaEvent | PlanShape | End

KINDS: Mapping[str, type[Recorded]] = {
    kind.__name__: kind
    for kind in (
        ReplicaStart,
        Submitted,
        Cancelled,
        StepDone,
        StepFailed,
        Draining,
        Woken,
        PlanShape,
        End,
    )
}


class ReplicaRecording:
    """Makes the entries of one replica. ``key`` is random, of this process, and stays in memory."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._chains: dict[SequenceId, bytes] = {}
        self._choices: dict[str, int] = {}

    def start(self, limits: BatchingLimits, cost: CostState, now_ns: int) -> Entry:
        """The entry that comes before all others of a replica."""
        return _entry(now_ns, "event", ReplicaStart(limits, cost))

    def record(
        self, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> list[Entry]:
        """The entries of one event and of those effects that replay compares."""
        if isinstance(event, Submitted):
            event = Submitted(self._hide_prompt(event.request))
        elif isinstance(event, StepDone):
            sampled = tuple(self._hide_sampled(each) for each in event.sampled)
            event = replace(event, sampled=sampled)
        entries = [_entry(now_ns, "event", event)]
        for effect in effects:
            if isinstance(effect, RunStep):
                entries.append(_entry(now_ns, "effect", shape_of(effect.plan)))
            elif isinstance(effect, End):
                entries.append(_entry(now_ns, "effect", effect))
                self._forget(effect.request_id)
            elif isinstance(effect, SequenceEnded):
                self._chains.pop(effect.sequence, None)
        return entries

    def _hide_prompt(self, request: Request) -> Request:
        last = bytes(PSEUDONYM_BYTES)
        hidden = []
        for token in request.prompt:
            last = self._next(last, token)
            hidden.append(_visible(last))
        self._choices[request.id] = request.choices
        for choice in range(request.choices):
            self._chains[SequenceId(request.id, choice)] = last
        return replace(request, prompt=tuple(hidden))

    def _hide_sampled(self, sampled: Sampled) -> Sampled:
        known = self._chains.get(sampled.sequence)
        last = self._next(known or bytes(PSEUDONYM_BYTES), sampled.token)
        if known is not None:  # else it has ended while its step ran
            self._chains[sampled.sequence] = last
        return sampled._replace(token=_visible(last))

    def _next(self, last: bytes, token: int) -> bytes:
        message = last + token.to_bytes(4, "little")
        return blake2b(message, key=self._key, digest_size=PSEUDONYM_BYTES).digest()

    def _forget(self, request_id: str) -> None:
        for choice in range(self._choices.pop(request_id, 0)):
            self._chains.pop(SequenceId(request_id, choice), None)


def shape_of(plan: Plan) -> PlanShape:
    """The plan as entries carry it."""
    rows = tuple(
        RowShape(
            row.sequence,
            len(row.tokens),
            row.past_tokens,
            len(row.blocks),
            crc32(array("q", row.blocks).tobytes()),
            row.sample,
        )
        for row in plan.rows
    )
    return PlanShape(plan.step, plan.predicted_ns, rows)


def read_entry(entry: Entry) -> Recorded:
    """The value in an entry. Raises ``ValueError`` for one that cannot be read."""
    kind = KINDS.get(entry.name)
    if kind is None:
        raise ValueError(f"an entry of the unknown kind {entry.name}")
    try:
        return msgspec.msgpack.decode(entry.payload, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"an entry of kind {entry.name} cannot be read: {error}") from None


def _entry(t_ns: int, role: Literal["event", "effect"], value: Recorded) -> Entry:
    return Entry(t_ns, role, type(value).__name__, msgspec.msgpack.encode(value))


def _visible(pseudonym: bytes) -> int:
    return int.from_bytes(pseudonym, "little") & ENTRY_MASK
