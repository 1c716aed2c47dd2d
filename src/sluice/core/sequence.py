"""What a replica keeps about the requests it holds: mutable, owned by ``Replica`` and ``Batching``.

``Generation`` is a live request, ``Sequence`` one of its choices. Facts and counters only; what
happens to them is decided in ``core/batching.py`` and ``core/replica.py``.
"""

from dataclasses import dataclass, field

from sluice.core.events import End
from sluice.core.kv import BlockTable
from sluice.core.lifecycle import SEQUENCE_MOVES, SequenceState, moved
from sluice.core.request import EndReason, Phase, PhaseTimes, Request, SequenceId, Usage


class PhaseClock:
    """Splits the life of a request into phases that follow each other without a gap."""

    __slots__ = ("_since_ns", "_spent_ns", "phase")

    def __init__(self, arrived_ns: int) -> None:
        self.phase = Phase.ADMISSION
        self._since_ns = arrived_ns
        self._spent_ns: dict[Phase, int] = {}

    def enter(self, phase: Phase, now_ns: int) -> None:
        """The current phase ends and this one begins."""
        self._spent_ns[self.phase] = self._spent_ns.get(self.phase, 0) + now_ns - self._since_ns
        self.phase = phase
        self._since_ns = now_ns

    def times(self, now_ns: int) -> PhaseTimes:
        """Nanoseconds per phase until now; they sum to the time since arrival."""
        self.enter(self.phase, now_ns)
        return PhaseTimes(**{f"{phase}_ns": spent for phase, spent in self._spent_ns.items()})


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: its known tokens, how many of them have KV, and where that is.

    ``output_limit`` is the number of tokens it may generate; ``number`` orders by arrival. ``late``
    says that its first token was late or cannot be on time any more, as far as was seen when
    somebody last asked for prefill. ``passed`` counts later sequences that went ahead of it while
    it did not fit; ``charged`` is the number of its tokens that its tenant was charged for,
    ``claim`` of those that it could take when it became resident.
    ``rested`` counts the last steps in a row that it was left out of for others.
    """

    id: SequenceId
    generation: "Generation"
    number: int
    output_limit: int
    tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    late: bool = False
    computed: int = 0
    produced: int = 0
    charged: int = 0
    claim: int = 0
    passed: int = 0
    preemptions: int = 0
    rested: int = 0
    first_token_ns: int | None = None
    table: BlockTable = field(default_factory=BlockTable)

    def move(self, state: SequenceState) -> None:
        """Change the state; raises ``InternalError`` where the table forbids it."""
        self.state = moved(SEQUENCE_MOVES, self.state, state)

    @property
    def pending(self) -> int:
        """Known tokens without KV: 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.output_limit - self.produced

    def begin_decode(self, now_ns: int) -> None:
        """The token after its known ones came."""
        self.move(SequenceState.DECODE)
        if self.first_token_ns is None:
            self.late = self.late_after(now_ns)
            self.first_token_ns = now_ns
        self.generation.prompt_computed = True
        self.generation.clock.enter(Phase.DECODE, now_ns)

    def due_ns(self) -> int | None:
        """When its next token is due, ``None`` without a target.

        The k-th token after the first is due k times ``tpot_ns`` after the first one came: late
        first tokens give no credit and early ones no debt, as mean TPOT is measured.
        """
        request = self.generation.request
        if self.first_token_ns is None:
            return request.ttft_due_ns
        if request.tpot_ns is None:
            return None
        return self.first_token_ns + self.produced * request.tpot_ns

    def late_after(self, at_ns: int) -> bool:
        """Whether a first token that has not come before ``at_ns`` is late; keeps what is known."""
        if self.first_token_ns is not None:
            return self.late
        due_ns = self.generation.request.ttft_due_ns
        return due_ns is not None and due_ns < at_ns

    def tpot_kept_ns(self, least_ns: int, now_ns: int) -> int | None:
        """Its time per token if steps of ``least_ns`` still keep it by its end, else ``None``."""
        tpot_ns = self.generation.request.tpot_ns
        if tpot_ns is None:
            return None
        caught_up_ns = self.remaining * max(0, tpot_ns - least_ns)
        due_ns = self.due_ns()
        if self.first_token_ns is None or due_ns is None:
            return tpot_ns if caught_up_ns > 0 else None
        return tpot_ns if now_ns + least_ns - due_ns <= caught_up_ns else None


@dataclass(slots=True, eq=False)
class Generation:
    """A request on this replica, from submission to its one ending.

    ``leaving`` is set when it must end but a running step still holds some of its blocks.
    ``reasons`` holds why choices ended, ``cached_tokens`` what the first one found in the prefix
    cache when it became resident.
    """

    request: Request
    submitted_ns: int
    clock: PhaseClock
    sequences: tuple[Sequence, ...] = ()
    reasons: dict[int, EndReason] = field(default_factory=dict)
    leaving: bool = False
    prompt_computed: bool = False
    cached_tokens: int | None = None

    @property
    def preemptions(self) -> int:
        """How often a choice of the request lost its blocks."""
        return sum(sequence.preemptions for sequence in self.sequences)

    def usage(self) -> Usage:
        """Token counts so far; nothing of the prompt counts before a choice became resident."""
        if self.cached_tokens is None:
            return Usage(0, 0, 0)
        completion_tokens = sum(sequence.produced for sequence in self.sequences)
        return Usage(len(self.request.prompt), self.cached_tokens, completion_tokens)

    def ending(self, reason: EndReason, error: str, now_ns: int) -> End:
        """Its one ending."""
        usage, phases = self.usage(), self.clock.times(now_ns)
        return End(self.request.id, reason, usage, phases, self.preemptions, error)


def generation_of(request: Request, submitted_ns: int, number: int) -> Generation:
    """A request that begins to wait; its choices are numbered from ``number``."""
    generation = Generation(request, submitted_ns, PhaseClock(request.arrived_ns))
    generation.clock.enter(Phase.QUEUE, submitted_ns)
    limit = request.output_tokens_max
    generation.sequences = tuple(
        Sequence(SequenceId(request.id, n), generation, number + n, limit, list(request.prompt))
        for n in range(request.choices)
    )
    return generation
