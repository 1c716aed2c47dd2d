"""The parts of journal records that diagnosis reads, as lean structs that decode quickly.

Each has the tag of a kind in ``telemetry.records`` and some of its fields; what is left out is
passed over undecoded. Kinds that say nothing here are known by their time alone.
"""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from sluice.telemetry.records import AnyRecord, Change

_EMPTY_ARRAY = msgspec.Raw(b"\x90")
_NIL = msgspec.Raw(b"\xc0")
_UNDECODABLE = (msgspec.MsgspecError, RecursionError)


class Fact(msgspec.Struct, frozen=True, tag_field="kind", gc=False):
    """Something that happened at ``t_ns``."""

    t_ns: int


class ArrivedFact(Fact, frozen=True, tag="RequestArrived"):
    """See ``records.RequestArrived``."""

    id: str
    model: str
    arrived_ns: int
    prompt_tokens: int
    output_tokens_max: int
    tenant: str = ""
    slo_class: str = ""


class DispatchedFact(Fact, frozen=True, tag="RequestDispatched"):
    """See ``records.RequestDispatched``."""

    id: str
    replica: str
    attempt: int


class AttemptFact(Fact, frozen=True, tag="AttemptFailed"):
    """See ``records.AttemptFailed``."""

    id: str
    replica: str
    outcome: str


class RejectedFact(Fact, frozen=True, tag="RequestRejected"):
    """See ``records.RequestRejected``."""

    id: str
    status: int
    reason: str
    threshold: float = 0.0


class FirstFact(Fact, frozen=True, tag="FirstToken"):
    """See ``records.FirstToken``."""

    id: str
    ttft_ns: int


class EndedFact(Fact, frozen=True, tag="RequestEnded"):
    """See ``records.RequestEnded``."""

    id: str
    reason: str
    arrived_ns: int
    replica: str = ""
    attempts: int = 1
    cached_tokens: int = 0
    completion_tokens: int = 0
    retrieval_ns: int = 0
    admission_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    preempted_ns: int = 0
    preemptions: int = 0
    ttft_ns: int | None = None
    tpot_ns: int | None = None


class ReplicaFact(Fact, frozen=True, tag="ReplicaChanged"):
    """See ``records.ReplicaChanged``."""

    replica: str
    model: str
    state: str
    context_tokens_max: int = 0
    block_size: int = 0
    blocks_total: int = 0
    sequences_max: int = 0


class EngineFact(Fact, frozen=True, tag="EngineSampled"):
    """See ``records.EngineSampled``."""

    replica: str
    waiting: float | None = None
    running: float | None = None
    kv_use: float | None = None
    counters: dict[str, float] = {}


class HostFact(Fact, frozen=True, tag="HostSampled"):
    """See ``records.HostSampled``."""

    replica: str
    used_ns: int
    waited_ns: int


class ChunkFact(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """See ``records.Chunk``."""

    id: str
    choice: int
    tokens: int
    past_tokens: int


class StepFact(Fact, frozen=True, tag="Step"):
    """See ``records.Step``. Of decode rows only the number is read."""

    replica: str
    measured_ns: int
    decode: msgspec.Raw = _EMPTY_ARRAY
    prefill: tuple[ChunkFact, ...] = ()
    blocks_free: int = 0
    running: int = 0
    waiting: int = 0
    error: str = ""

    @property
    def rows(self) -> int:
        """How many decode rows there were."""
        return _array_length(bytes(self.decode))


class PolicyFact(Fact, frozen=True, tag="PolicyRecord"):
    """See ``records.PolicyRecord``; ``payload`` is still msgpack of bytes."""

    owner: str
    name: str
    payload: msgspec.Raw = _NIL


class DeploymentFact(Fact, frozen=True, tag="Deployment"):
    """See ``records.Deployment``."""

    what: str
    details: dict[str, str] = {}
    version: str = ""
    changed: dict[str, Change] = {}


class GapFact(Fact, frozen=True, tag="Gap"):
    """See ``records.Gap``."""

    dropped: int
    reason: str


KINDS: dict[str, type[Fact]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        ArrivedFact,
        DispatchedFact,
        AttemptFact,
        RejectedFact,
        FirstFact,
        EndedFact,
        ReplicaFact,
        EngineFact,
        HostFact,
        StepFact,
        PolicyFact,
        DeploymentFact,
        GapFact,
    )
}
_OTHERS = tuple(
    msgspec.defstruct(f"{kind.__name__}Fact", [], bases=(Fact,), tag=kind.__name__, frozen=True)
    for kind in get_args(AnyRecord)
    if kind.__name__ not in KINDS
)


class FactReader:
    """Decodes frames. ``skipped`` counts records of kinds and shapes that are not known."""

    def __init__(self) -> None:
        kinds: Any = KINDS["Gap"]
        for kind in (*KINDS.values(), *_OTHERS):
            kinds |= kind
        self._whole: msgspec.msgpack.Decoder[list[Fact]] = msgspec.msgpack.Decoder(list[kinds])
        self._raw = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._one: msgspec.msgpack.Decoder[Fact] = msgspec.msgpack.Decoder(kinds)
        self.skipped = 0

    def facts(self, body: bytes) -> list[Fact]:
        """What stands in one frame."""
        try:
            return self._whole.decode(body)
        except _UNDECODABLE:
            pass  # one of them at least
        try:
            return list(self._known(self._raw.decode(body)))
        except _UNDECODABLE:
            self.skipped += 1
            return []

    def _known(self, records: list[msgspec.Raw]) -> Iterator[Fact]:
        for raw in records:
            try:
                yield self._one.decode(raw)
            except _UNDECODABLE:
                self.skipped += 1


def _array_length(plain: bytes) -> int:
    """Items of a msgpack array, from its first bytes."""
    first = plain[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    return int.from_bytes(plain[1:3] if first == 0xDC else plain[1:5])
