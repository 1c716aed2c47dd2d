"""What a replica keeps about the requests it holds: mutable, owned by ``Replica`` and ``Batching``.

``Generation`` is a live request, ``Sequence`` one of its choices. Facts and counters only; what
happens to them is decided in ``core/batching.py`` and ``core/replica.py``.
"""

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


class Sequence:
    """One choice: its known tokens, how many of them have KV, and where that is.

    ``output_limit`` is the number of tokens it may generate; ``number`` orders by arrival;
    ``order`` is its place among the waiting, set by the policy when it begins to wait; ``passed``
    counts later sequences that went ahead of it while it did not fit.
    """

    __slots__ = (
        "computed",
        "generation",
        "id",
        "number",
        "order",
        "output_limit",
        "passed",
        "preemptions",
        "produced",
        "state",
        "table",
        "tokens",
    )

    def __init__(
        self, generation: "Generation", choice: int, number: int, output_limit: int
    ) -> None:
        self.id = SequenceId(generation.request.id, choice)
        self.generation = generation
        self.number = number
        self.order: tuple[int, int, int] = (0, 0, number)
        self.output_limit = output_limit
        self.state = SequenceState.WAITING
        self.tokens = list(generation.request.prompt)
        self.computed = 0
        self.produced = 0
        self.passed = 0
        self.preemptions = 0
        self.table = BlockTable()

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

    def due_ns(self) -> int | None:
        """When its next token is due, ``None`` without a target.

        The k-th token after the first is due k times ``tpot_ns`` after the first one came: late
        first tokens give no credit and early ones no debt, as mean TPOT is measured.
        """
        request = self.generation.request
        first_ns = self.generation.first_token_ns[self.id.choice]
        if first_ns is None:
            return request.ttft_due_ns
        if request.tpot_ns is None:
            return None
        return first_ns + self.produced * request.tpot_ns


class Generation:
    """A request on this replica, from submission to its one ending.

    ``ending`` is set when it must end but a running step still holds some of its blocks.
    """

    __slots__ = (
        "cached_tokens",
        "clock",
        "ending",
        "first_token_ns",
        "prompt_computed",
        "reasons",
        "request",
        "sequences",
        "submitted_ns",
    )

    def __init__(self, request: Request, submitted_ns: int) -> None:
        self.request = request
        self.submitted_ns = submitted_ns
        self.clock = PhaseClock(request.arrived_ns)
        self.clock.enter(Phase.QUEUE, submitted_ns)
        self.sequences: tuple[Sequence, ...] = ()
        self.first_token_ns: list[int | None] = [None] * request.choices
        self.reasons: dict[int, EndReason] = {}
        self.ending: tuple[EndReason, str] | None = None
        self.prompt_computed = False
        self.cached_tokens: int | None = None

    @property
    def preemptions(self) -> int:
        """How often a choice of the request lost its blocks."""
        return sum(sequence.preemptions for sequence in self.sequences)

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=sum(sequence.produced for sequence in self.sequences),
        )
