"""Plans one step: decode rows first, prefill chunks in what is left, blocks for both.

Called by ``core/replica.py`` whenever no step is running. Planning changes the roster and the
ledger (admissions, preemptions, blocks), never the tokens of a sequence: those change when the
step's result is applied. Choices that depend on the policy are in ``core/policies.py``.

Progress is guaranteed by: a sequence that is alone always fits; time that prefill is owed adds up
until it suffices for a chunk, however little the decode rows leave; those that are late get their
share beside those that are not; and a sequence that was preempted ``PREEMPTIONS_MAX`` times becomes
resident only with everything it can need reserved, after which it is never a victim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.core.batch import Batch, Stretch
from sluice.core.costmodel import CostModel, Load, chunk_tokens_max
from sluice.core.events import Report
from sluice.core.lifecycle import SequenceState
from sluice.core.policies import (
    Admission,
    Budget,
    FcfsPolicy,
    Policy,
    SloPolicy,
    StaticPolicy,
)
from sluice.core.request import Phase
from sluice.core.residency import PASSED_MAX, PREEMPTIONS_MAX, Reservation
from sluice.core.roster import BatchingLimits, BatchingPolicy, Roster
from sluice.core.seats import Seats
from sluice.core.sequence import Sequence

LEAN_TOKENS = 16  # a chunk of fewer costs a step more than it gives, unless it is all there is
ALONE_TOKENS = 64  # without decode rows a step may take longer for a chunk of this size
CHUNK_ROUND = 16  # few different sizes of steps: kernels are prepared for each
OPEN_PREFILLS_MAX = 2  # half-computed prompts hold blocks and give nothing
OPEN_LATE_MAX = 1  # beside those
LATE_DIVISOR = 16  # those that are late get one token for so many of those that are not
LATE_TOKENS_MAX = 512  # a late prompt need not wait for the share of more than this to start
BACKFILL_DEPTH = 8
AHEAD_STEP_SHARE = 0.6  # of the longest step: prompts of tenants ahead of their share fill no more
STEPS_AHEAD = 16  # a preemption frees enough for so many steps
RECHECK_STEPS = 16  # what did not fit is tried again after these: predictions change slowly

POLICIES: Mapping[BatchingPolicy, type[FcfsPolicy] | type[StaticPolicy] | type[SloPolicy]] = {
    BatchingPolicy.STATIC: StaticPolicy,
    BatchingPolicy.FCFS: FcfsPolicy,
    BatchingPolicy.SLO: SloPolicy,
}


class Batching:
    """Fills steps for one replica."""

    def __init__(self, limits: BatchingLimits, cost: CostModel) -> None:
        self.roster = Roster(limits, cost)
        self._seats = Seats(self.roster)
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._policy: Policy = POLICIES[limits.policy]()
        self._owed_ns = 0  # time of prefill that the decode rows took
        self._late_credit = 0  # tokens computed for others while somebody late wanted some
        self._unfit: list[Sequence] = []  # beside the residents, when the waiting were last tried
        self._blocked = (0, 0)  # roster version, steps left before a recheck

    def wake_ns(self) -> int | None:
        """When the policy wants to be asked again although nothing happens."""
        policy, roster = self._policy, self.roster
        if isinstance(policy, StaticPolicy) and roster.waiting and not roster.residents:
            return policy.batch_ready_ns(roster)
        return None

    def plan(self, now_ns: int) -> Batch | None:
        """The next step, ``None`` if there is nothing to compute."""
        decodes = [s for s in self.roster.residents if s.state is SequenceState.DECODE]
        decodes = self._secure_blocks(decodes, now_ns)
        count = len(decodes)
        load = Load(count, count, count + sum([s.computed for s in decodes]))
        batch = Batch(decodes, [], load)
        self._fill(batch, now_ns)
        return batch if batch.decodes or batch.chunks else None

    def horizon(self, batch: Batch, steps_max: int) -> int:
        """How many further steps, at most so many, will have exactly the rows of this one: nobody
        ends or joins."""
        roster = self.roster
        if batch.chunks or len(batch.decodes) != len(roster.residents):
            return 0
        steps = batch.steps_ahead(steps_max, roster.ledger)
        if roster.waiting and len(roster.residents) < roster.limits.sequences_max:
            steps = min(steps, self._steps_blocked())
        return steps

    def skip(self, batch: Batch, stretch: Stretch) -> Batch:
        """Enter the results of a stretch of this step; returns the step that follows."""
        load, cost = batch.load, self.roster.cost
        if cost.learns:
            for steps, duration_ns in enumerate(stretch.durations_ns):
                cost.observe(load.steps_later(steps), duration_ns)
        load = load.steps_later(len(stretch.durations_ns))
        batch.skip(stretch, self.roster.ledger)
        for sequence in batch.decodes:
            sequence.rested = 0
        self._seats.count()
        version, steps = self._blocked
        self._blocked = (version, steps - len(stretch.durations_ns))
        return Batch(batch.decodes, [], load)

    def report(self, step_ns: int, *, new: bool = False) -> Report:
        """The load at this moment; ``step_ns`` is how long steps take of late.

        With a ``new`` request, whose step waits for this, seats are those of the report before.
        """
        roster, ledger = self.roster, self.roster.ledger
        waiting = blocked = len(roster.waiting)
        if len(roster.residents) < roster.limits.sequences_max:
            blocked = min(waiting, len(self._unfit))
        return Report(
            waiting=waiting,
            running=len(roster.residents),
            blocks_free=ledger.available,
            blocks_total=ledger.blocks_total,
            blocks_cached=ledger.cached,
            preemptions=roster.preemptions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prefill_tokens_per_s=roster.cost.prefill_tokens_per_s,
            step_ns=step_ns,
            blocked=blocked,
            seats=self._seats.known if new else self._seats.count(),
            decode_tokens_per_s=self._seats.decode_tokens_per_s,
        )

    # ------------------------------------------------------------------------------ decode blocks

    def _secure_blocks(self, decodes: list[Sequence], now_ns: int) -> list[Sequence]:
        """Give each decode row its next cell, preempting where blocks lack; returns who is left."""
        ledger = self.roster.ledger
        size = ledger.block_size
        growing = [s for s in decodes if s.computed >= len(s.table.blocks) * size]
        if len(growing) > ledger.available:
            self._preempt(now_ns)
            self._blocked = (self.roster.version, 1)  # who was preempted must not come back at once
            decodes = [s for s in decodes if s.state is SequenceState.DECODE]
            growing = [s for s in growing if s.state is SequenceState.DECODE]
        for sequence in growing:
            ledger.grow(sequence.table, sequence.computed + 1)
        return decodes

    def _preempt(self, now_ns: int) -> None:
        roster = self.roster
        while (
            len(roster.residents) > 1 and self._blocks_ahead(STEPS_AHEAD) > roster.ledger.available
        ):
            candidates = [s for s in roster.residents if s.preemptions < PREEMPTIONS_MAX]
            lasting = [s for s in candidates if s.remaining > STEPS_AHEAD]
            if not candidates:
                break  # all have their full need reserved
            if not lasting and self._blocks_ahead(1) <= roster.ledger.available:
                break
            victim = self._policy.victim(lasting or candidates, roster, now_ns)
            roster.preempt(victim)
            if not any(s.table.blocks for s in victim.generation.sequences):
                victim.generation.clock.enter(Phase.PREEMPTED, now_ns)

    def _blocks_ahead(self, steps: int) -> int:
        """Blocks that the residents in decode will take in so many steps, at most."""
        ledger = self.roster.ledger
        return sum(
            ledger.blocks_for(s.computed + min(steps, s.remaining)) - len(s.table.blocks)
            for s in self.roster.residents
            if s.state is SequenceState.DECODE
        )

    # ------------------------------------------------------------------------------------ prefill

    def _fill(self, batch: Batch, now_ns: int) -> None:
        """Add prefill chunks to the batch, making waiting sequences resident on the way."""
        roster, policy = self.roster, self._policy
        wanting = [s for s in roster.residents if s.state is SequenceState.PREFILL]
        joining = self._joining()
        if not wanting and not joining:
            self._owed_ns = 0
            for sequence in batch.decodes:
                sequence.rested = 0
            return
        budget = policy.budget(batch.decodes, batch.load, roster, now_ns)
        if budget.admission is not Admission.NONE:
            wanting += joining
        if joining or len(wanting) > 1:
            wanting = policy.arrange(wanting, roster, now_ns)
        rows, load = batch.decodes, batch.load
        if self._rest(batch, wanting, now_ns):
            budget = policy.budget(batch.decodes, batch.load, roster, now_ns)
        filling = self._filling(batch, budget, wanting)
        if filling.turn is not None:
            wanting.remove(filling.turn)
            wanting.insert(0, filling.turn)
        self._walk(wanting, filling, now_ns)
        if joining:
            self._unfit = filling.unfit
        if not batch.chunks:
            batch.decodes, batch.load = rows, load  # there is nobody to make way for
        self._remember(filling)

    def _walk(self, wanting: list[Sequence], filling: "_Filling", now_ns: int) -> None:
        """Give those that want prefill their chunks, one after another, until the step is full.

        Where somebody on time rests, nobody late gets what that leaves, but for their share.
        """
        rests = any(sequence.rested for sequence in wanting)
        for sequence in wanting:
            waits = sequence.rested or (rests and sequence.late and sequence is not filling.turn)
            if waits and filling.batch.chunks:
                continue
            if sequence.state is SequenceState.PREFILL:
                filling.add(sequence, self._chunk_tokens(sequence, filling))
            elif self._may_join(sequence, filling):
                self._join(sequence, filling, now_ns)
            if filling.full and filling.budget.admission is not Admission.WHOLE_BATCH:
                break

    def _rest(self, batch: Batch, wanting: list[Sequence], now_ns: int) -> bool:
        """Take the rows that make way for the next prompt out of the step; whether there were any.

        Prompts that make way are marked as resting; they do if the next one gets a chunk.
        """
        others = [*batch.decodes, *wanting]
        resting = self._policy.resting(others, wanting, self.roster, now_ns)
        for sequence in others:
            sequence.rested = sequence.rested + 1 if sequence in resting else 0
        return batch.leave_out([sequence for sequence in batch.decodes if sequence.rested])

    def _remember(self, filling: "_Filling") -> None:
        roster, batch = self.roster, filling.batch
        self._owed_ns = 0
        if filling.full:
            given_ns = roster.cost.step_ns(batch.load) - filling.decodes_ns
            self._owed_ns = max(0, filling.owed_ns - given_ns)
        late_tokens = sum(tokens for sequence, tokens in batch.chunks if sequence.late)
        tokens = sum(tokens for _, tokens in batch.chunks)
        credit = self._late_credit + tokens - (1 + LATE_DIVISOR) * late_tokens
        wanted = filling.late is not None
        most = LATE_DIVISOR * LATE_TOKENS_MAX
        self._late_credit = min(most, max(0, credit)) if wanted else 0
        nobody_joins = filling.head is not None or filling.budget.admission is Admission.NONE
        if nobody_joins and not filling.full and not filling.joined and roster.residents:
            self._blocked = (roster.version, RECHECK_STEPS)

    def _joining(self) -> list[Sequence]:
        """The waiting, unless it is known that none of them can become resident."""
        roster = self.roster
        if len(roster.residents) >= roster.limits.sequences_max:
            return []
        steps = self._steps_blocked()
        if steps > 0:
            self._blocked = (roster.version, steps - 1)
            return []
        return list(roster.waiting)

    def _steps_blocked(self) -> int:
        version, steps = self._blocked
        return steps if version == self.roster.version else 0

    def _filling(self, batch: Batch, budget: Budget, wanting: list[Sequence]) -> "_Filling":
        """The start of filling a step: prefill gets what is owed to it however little is left."""
        filling = _Filling(batch, budget, budget.tokens, budget.step_ns)
        filling.ahead_step_ns = int(self.roster.limits.step_ns_max * AHEAD_STEP_SHARE)
        for sequence in wanting:
            if sequence.state is SequenceState.PREFILL:
                filling.open[sequence.late] += 1
        late = [sequence for sequence in wanting if sequence.late]
        if late:
            filling.late = next((s for s in late if s.state is SequenceState.PREFILL), late[0])
            if len(late) < len(wanting):
                self._turn(filling, filling.late)
        if not batch.decodes:
            filling.minimum = min(LEAN_TOKENS, budget.tokens)
        elif budget.step_ns is not None:
            cost, share = self.roster.cost, self.roster.limits.prefill_share
            filling.decodes_ns = cost.step_ns(batch.load)
            filling.owed_ns = self._owed_ns + int(filling.decodes_ns * share / (1.0 - share))
            owed_ns = int((filling.decodes_ns + filling.owed_ns) * cost.margin)
            filling.step_ns = max(budget.step_ns, owed_ns)
            filling.ahead_step_ns = max(filling.ahead_step_ns, owed_ns)
        return filling

    def _turn(self, filling: "_Filling", late: Sequence) -> None:
        """Let one that is late go first, for as many tokens as its share has come to."""
        tokens = self._late_credit // LATE_DIVISOR
        resident = late.state is SequenceState.PREFILL
        if tokens >= min(late.pending, LEAN_TOKENS if resident else LATE_TOKENS_MAX):
            filling.turn, filling.turn_tokens = late, tokens

    def _may_join(self, sequence: Sequence, filling: "_Filling") -> bool:
        limits = self.roster.limits
        if filling.tried > BACKFILL_DEPTH or len(self.roster.residents) >= limits.sequences_max:
            return False
        if filling.head is not None and filling.ahead is None:
            return False
        generation = sequence.generation
        # Further choices find the prompt in the prefix cache once the first one has computed it.
        return (
            sequence.id.choice == 0
            or generation.prompt_computed
            or not limits.prefix_cache
            or filling.budget.admission is Admission.WHOLE_BATCH
        )

    def _join(self, sequence: Sequence, filling: "_Filling", now_ns: int) -> None:
        """Make a waiting sequence resident if its whole prompt and its future fit."""
        roster, ledger = self.roster, self.roster.ledger
        known = len(sequence.tokens)
        sequence.computed = ledger.attach(sequence.table, sequence.tokens)
        tokens = self._chunk_tokens(sequence, filling)
        whole_batch = filling.budget.admission is Admission.WHOLE_BATCH
        partial = tokens < sequence.pending
        if whole_batch or not partial or (tokens and not filling.many_open(sequence)):
            if self._policy.fits(sequence, roster, now_ns, filling.ahead) and ledger.grow(
                sequence.table, known
            ):
                self._enter(sequence, filling, now_ns)
                if tokens:
                    filling.add(sequence, tokens)
                return
            self._does_not_fit(sequence, filling, now_ns)
        elif tokens == 0:
            filling.full = True
        else:
            filling.tried += 1
        ledger.release(sequence.table)
        sequence.computed = 0

    def _does_not_fit(self, sequence: Sequence, filling: "_Filling", now_ns: int) -> None:
        filling.tried += 1
        filling.unfit.append(sequence)
        # One that is late is not waited for before it was passed as often as anyone may be.
        if filling.head is None and (sequence is not filling.turn or sequence.passed >= PASSED_MAX):
            filling.head = sequence
            filling.ahead = self._policy.reserve(sequence, self.roster, now_ns)

    def _enter(self, sequence: Sequence, filling: "_Filling", now_ns: int) -> None:
        self.roster.admit(sequence)
        filling.joined = True
        filling.open[sequence.late] += 1
        for passed in filling.unfit:
            passed.passed += 1
        generation = sequence.generation
        if generation.clock.phase is Phase.QUEUE:
            generation.clock.enter(Phase.PREFILL, now_ns)
        if generation.cached_tokens is None:
            generation.cached_tokens = sequence.computed
        if self.roster.limits.prefix_cache:
            self._prefix_query_tokens += len(sequence.tokens)
            self._prefix_hit_tokens += sequence.computed

    def _chunk_tokens(self, sequence: Sequence, filling: "_Filling") -> int:
        """How many of the sequence's pending tokens this step computes."""
        pending = sequence.pending
        wanted = min(pending, filling.room)
        if sequence is filling.turn:
            wanted = min(wanted, filling.turn_tokens)
        step_ns = filling.step_ns
        if step_ns is None or wanted == 0:
            return wanted
        batch, cost = filling.batch, self.roster.cost
        if self.roster.shares.ahead(sequence.generation.request.tenant):
            step_ns = min(step_ns, filling.ahead_step_ns)
        tokens = chunk_tokens_max(cost, batch.load, sequence.computed, step_ns, wanted)
        if tokens < ALONE_TOKENS and not batch.decodes and not batch.chunks:
            # Nobody's next token waits for this step, only a cancel would: the fixed part of a
            # step must not be most of it on a machine that is slow or has other work.
            room = min(wanted, ALONE_TOKENS)
            tokens = chunk_tokens_max(cost, batch.load, sequence.computed, 2 * step_ns, room)
        if 4 * CHUNK_ROUND <= tokens < pending:
            tokens -= tokens % CHUNK_ROUND
        if tokens < min(LEAN_TOKENS, wanted):
            tokens = 0
        return max(tokens, min(filling.minimum, pending))


@dataclass(slots=True, eq=False)
class _Filling:
    """What is left of a step's budget while candidates are looked at.

    ``step_ns`` bounds the step, with the time that prefill is owed; ``minimum`` is due to the next
    chunk whatever that bound says. ``ahead_step_ns`` is the bound for prompts of tenants ahead of
    their share: the next prompt of another tenant waits for the end of this step. ``open`` counts
    prompts that are not computed to their end: on time, and late. ``late`` is the first late one;
    when it is its ``turn`` it goes first, for ``turn_tokens`` at most. ``tried`` counts those that
    could not join, ``unfit`` holds those of them that did not fit beside the residents. ``head`` is
    the first that did not fit and is waited for, ``ahead`` what is reserved for it.
    """

    batch: Batch
    budget: Budget
    room: int
    step_ns: int | None
    decodes_ns: int = 0
    owed_ns: int = 0
    ahead_step_ns: int = 0
    minimum: int = 0
    open: list[int] = field(default_factory=lambda: [0, 0])
    late: Sequence | None = None
    turn: Sequence | None = None
    turn_tokens: int = 0
    full: bool = False
    joined: bool = False
    tried: int = 0
    unfit: list[Sequence] = field(default_factory=list)
    head: Sequence | None = None
    ahead: Reservation | None = None

    def many_open(self, sequence: Sequence) -> bool:
        """Whether another prompt like this must not be left half computed."""
        return self.open[sequence.late] >= (OPEN_LATE_MAX if sequence.late else OPEN_PREFILLS_MAX)

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Put a chunk into the batch, which is full where there was not time for all of it."""
        batch = self.batch
        share = sequence is self.turn and tokens == min(sequence.pending, self.turn_tokens)
        if tokens:
            batch.chunks.append((sequence, tokens))
            batch.load = batch.load.with_chunk(sequence.computed, tokens)
            self.room -= tokens
            self.minimum = 0
        if tokens == sequence.pending:
            self.open[sequence.late] -= 1
        elif not share:
            self.full = True
