"""The policy of one replica: one event in, the effects it calls for out.

``Replica.handle`` is called by a driver (``runtime/realtime.py`` or ``runtime/virtual.py``) for
every event, with the time; it performs nothing itself. Batching is in ``core/batching.py``; here
requests come, tokens are credited, requests end. At most one step is outstanding. A request that
ends while a step holds its blocks leaves when that step is over, and its tokens of that step are
not emitted.

Text, sampling and stop conditions are the runtime's: it says so in ``Sampled.stop``.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, repeat
from typing import assert_never

from sluice.core.batching import Batch, Batching
from sluice.core.costmodel import CostModel
from sluice.core.errors import InternalError
from sluice.core.events import (
    Cancelled,
    Drained,
    Draining,
    Emit,
    End,
    ReplicaEffect,
    ReplicaEvent,
    Report,
    RunStep,
    SequenceEnded,
    StepDone,
    StepFailed,
    Submitted,
    WakeAt,
    Woken,
)
from sluice.core.lifecycle import SequenceState
from sluice.core.request import EndReason, Phase, Request
from sluice.core.roster import BatchingLimits
from sluice.core.sequence import Generation, Sequence, generation_of
from sluice.core.step import Plan, Row, Sampled

Effects = list[ReplicaEffect]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps of one and the same decode-only plan, computed in one go.

    ``tokens`` holds, per row of the plan, the token sampled in each of the steps; ``durations_ns``
    how long each step took.
    """

    tokens: tuple[tuple[int, ...], ...]
    durations_ns: tuple[int, ...]


class Replica:
    """Batches the requests of one replica. Not thread-safe; owns all its state.

    ``roster`` may be looked at, by tests and reports; only the replica changes it.
    """

    def __init__(self, limits: BatchingLimits, cost: CostModel) -> None:
        self.limits = limits
        self.cost = cost
        self._batching = Batching(limits, cost)
        self.roster = self._batching.roster
        self._generations: dict[str, Generation] = {}
        self._running: tuple[Plan, Batch] | None = None
        self._steps = 0
        self._step_ns = 0
        self._sequences_seen = 0
        self._expiries: list[tuple[int, int, str]] = []
        self._woken_at_ns: int | None = None
        self._drain_ns: int | None = None
        self._drained = False
        self._leaving: list[tuple[Generation, EndReason, str]] = []

    def handle(self, event: ReplicaEvent, now_ns: int) -> Effects:
        """Take one event at the time ``now_ns``; raises ``InternalError`` on a driver's mistake."""
        effects: Effects = []
        match event:
            case StepDone():
                self._step_done(event, now_ns, effects)
            case Submitted(request):
                self._submit(request, now_ns, effects)
            case Cancelled(request_id):
                self._end_request(request_id, EndReason.CANCELLED, "", now_ns, effects)
            case StepFailed():
                self._step_failed(event, now_ns, effects)
            case Draining(deadline_ns):
                self._drain_ns = deadline_ns
            case Woken():
                self._woken_at_ns = None
            case _:
                assert_never(event)
        self._expire(now_ns, effects)
        if self._running is None:
            batch = self._batching.plan(now_ns)
            if batch is not None:
                effects.append(self._run(batch))
        effects.append(self._report())
        self._wish_to_wake(now_ns, effects)
        if self._drain_ns is not None and not self._generations and not self._drained:
            self._drained = True
            effects.append(Drained())
        return effects

    @property
    def running(self) -> Plan | None:
        """The plan whose result is awaited."""
        return self._running[0] if self._running is not None else None

    def horizon(self) -> int:
        """For how many steps beyond the running one the plan stays the same decode-only plan.

        Provided that no event but their results arrives and the runtime stops none of the rows.
        """
        if self._running is None or self._leaving:
            return 0
        batch = self._running[1]
        return 0 if batch.chunks else self._batching.decode_steps_max(batch.decodes)

    def skip(self, stretch: Stretch) -> RunStep:
        """Apply the steps of a stretch at once; the running plan is then the one after them.

        Equal to that many ``StepDone`` events, except that the tokens are not emitted (the caller
        has them) and nothing is reported. The stretch is no longer than ``horizon()``.
        """
        steps = len(stretch.durations_ns)
        if self._running is None or not 0 < steps <= self.horizon():
            raise InternalError(f"a stretch of {steps} steps is beyond the horizon")
        batch = self._running[1]
        load = batch.load
        for duration_ns in stretch.durations_ns:
            self.cost.observe(load, duration_ns)
            load = load.one_step_later()
        for sequence, tokens in zip(batch.decodes, stretch.tokens, strict=True):
            sequence.tokens.extend(tokens)
        self._batching.skip(batch.decodes, steps)
        self._steps += steps - 1
        self._step_ns = stretch.durations_ns[-1]
        return self._run(Batch(batch.decodes, [], load))

    # ------------------------------------------------------------------------------- submission

    def _submit(self, request: Request, now_ns: int, effects: Effects) -> None:
        if request.id in self._generations:
            raise InternalError(f"request {request.id} was submitted twice")
        limits, prompt_tokens = self.limits, len(request.prompt)
        output_limit = min(
            request.output_tokens_max,
            limits.context_tokens_max - prompt_tokens,
            limits.pool_tokens - prompt_tokens + 1,  # the last token sampled needs no cell
        )
        first = self._sequences_seen
        generation = generation_of(request, now_ns, first, output_limit)
        error = self._refusal(request)
        if error:
            reason = EndReason.FAILED if self._drain_ns is None else EndReason.SHUTDOWN
            effects.append(self._ending(generation, reason, error, now_ns))
            return
        self._generations[request.id] = generation
        self._sequences_seen += request.choices
        for sequence in generation.sequences:
            self._batching.submit(sequence)
        if request.deadline_ns is not None:
            heappush(self._expiries, (request.deadline_ns, first, request.id))
        if limits.queue_wait_ns_max is not None:
            heappush(self._expiries, (now_ns + limits.queue_wait_ns_max, first, request.id))

    def _refusal(self, request: Request) -> str:
        """Why the request cannot be served here, empty if it can. The fleet checks this first."""
        limits, prompt_tokens = self.limits, len(request.prompt)
        if self._drain_ns is not None:
            return "the replica is draining and takes no further request"
        if not prompt_tokens or request.choices < 1 or request.output_tokens_max < 1:
            return "a request needs a prompt token, a choice and an output token at least"
        if prompt_tokens + 1 > limits.context_tokens_max:
            return (
                f"the prompt has {prompt_tokens} tokens and the context holds "
                f"{limits.context_tokens_max} with the output; shorten the prompt"
            )
        if prompt_tokens > limits.pool_tokens:
            return (
                f"the prompt has {prompt_tokens} tokens and the KV pool holds "
                f"{limits.pool_tokens}; shorten the prompt or raise kv_bytes"
            )
        places = limits.sequences_max + limits.queue_places
        held = len(self.roster.waiting) + len(self.roster.residents)
        if held + request.choices > places:
            return f"{request.choices} places asked for, {held} of {places} are taken; try later"
        return ""

    # ------------------------------------------------------------------------------------ steps

    def _run(self, batch: Batch) -> RunStep:
        self._steps += 1
        rows = [
            Row(s.id, (s.tokens[-1],), s.computed, s.table.ids, sample=True) for s in batch.decodes
        ]
        for s, count in batch.chunks:
            end = s.computed + count
            tokens = tuple(s.tokens[s.computed : end])
            rows.append(Row(s.id, tokens, s.computed, s.table.ids, sample=end == len(s.tokens)))
        plan = Plan(self._steps, tuple(rows), self.cost.step_ns(batch.load))
        self._running = (plan, batch)
        return RunStep(plan)

    def _finished_step(self, step: int) -> tuple[Plan, Batch]:
        running = self._running
        if running is None or running[0].step != step:
            raise InternalError(f"step {step} was answered and is not running")
        return running

    def _step_done(self, event: StepDone, now_ns: int, effects: Effects) -> None:
        plan, batch = self._finished_step(event.step)
        expected = [row.sequence for row in plan.rows if row.sample]
        if [sampled.sequence for sampled in event.sampled] != expected:
            raise InternalError(f"step {event.step} was answered with tokens of other sequences")
        self._running = None
        self._step_ns = event.duration_ns
        self.cost.observe(batch.load, event.duration_ns)
        emitted: list[Sampled] = []
        ended: list[tuple[Sequence, EndReason]] = []
        tokens = iter(event.sampled)
        for sequence, count in chain(zip(batch.decodes, repeat(1)), batch.chunks):
            sampled = next(tokens) if count == sequence.pending else None
            reason = self._credit(sequence, count, now_ns, sampled, emitted)
            if reason is not None:
                ended.append((sequence, reason))
        if emitted:
            effects.append(Emit(tuple(emitted)))
        for sequence, reason in ended:
            self._end_sequence(sequence, reason, now_ns, effects)
        self._settle(now_ns, effects)

    def _credit(
        self,
        sequence: Sequence,
        count: int,
        now_ns: int,
        sampled: Sampled | None,
        emitted: list[Sampled],
    ) -> EndReason | None:
        """Enter a step's result for one row; returns why the sequence is complete, if it is."""
        sequence.computed += count
        if sequence.computed % self.limits.block_size < count:
            self.roster.ledger.publish(sequence.table, sequence.tokens, sequence.computed)
        generation = sequence.generation
        if sampled is None or generation.leaving:
            return None
        sequence.tokens.append(sampled.token)
        sequence.produced += 1
        emitted.append(sampled)
        if sequence.state is SequenceState.PREFILL:
            self._begin_decode(sequence, now_ns)
        if sampled.stop is not None:
            return EndReason.STOP
        return EndReason.LENGTH if sequence.produced >= sequence.output_limit else None

    def _begin_decode(self, sequence: Sequence, now_ns: int) -> None:
        generation = sequence.generation
        sequence.move(SequenceState.DECODE)
        generation.prompt_computed = True
        if sequence.first_token_ns is None:
            sequence.first_token_ns = now_ns
        generation.clock.enter(Phase.DECODE, now_ns)

    def _step_failed(self, event: StepFailed, now_ns: int, effects: Effects) -> None:
        """End the requests at fault. The others keep their state: their rows are planned again."""
        plan, _ = self._finished_step(event.step)
        self._running = None
        in_plan = {row.sequence for row in plan.rows}
        blamed = [sequence for sequence in event.blamed if sequence in in_plan]
        # Somebody must go, or the same step would be planned and fail for ever.
        blamed = blamed or [row.sequence for row in plan.rows]
        for sequence in blamed:
            self._end_request(sequence.request_id, EndReason.FAILED, event.error, now_ns, effects)
        self._settle(now_ns, effects)

    # ---------------------------------------------------------------------------------- endings

    def _end_sequence(
        self, sequence: Sequence, reason: EndReason, now_ns: int, effects: Effects
    ) -> None:
        """One choice is complete; the request too if it was the last."""
        self.roster.end(sequence)
        self.roster.lengths.observe(sequence.produced)
        effects.append(SequenceEnded(sequence.id, reason))
        generation = sequence.generation
        generation.reasons[sequence.id.choice] = reason
        if len(generation.reasons) == generation.request.choices:
            cut = EndReason.LENGTH in generation.reasons.values()
            self._close(
                generation, EndReason.LENGTH if cut else EndReason.STOP, "", now_ns, effects
            )

    def _end_request(
        self, request_id: str, reason: EndReason, error: str, now_ns: int, effects: Effects
    ) -> None:
        """End a request before its time: at once, or after the running step where that holds it."""
        generation = self._generations.get(request_id)
        if generation is None or generation.leaving:
            return
        if self._running is not None and self._running[1].holds(generation):
            generation.leaving = True
            self._leaving.append((generation, reason, error))
        else:
            self._close(generation, reason, error, now_ns, effects)

    def _settle(self, now_ns: int, effects: Effects) -> None:
        """End the requests that waited for a step to be over."""
        leaving, self._leaving = self._leaving, []
        for generation, reason, error in leaving:
            self._close(generation, reason, error, now_ns, effects)

    def _close(
        self, generation: Generation, reason: EndReason, error: str, now_ns: int, effects: Effects
    ) -> None:
        for sequence in generation.sequences:
            if sequence.state is not SequenceState.ENDED:
                self.roster.end(sequence)
        del self._generations[generation.request.id]
        effects.append(self._ending(generation, reason, error, now_ns))

    @staticmethod
    def _ending(generation: Generation, reason: EndReason, error: str, now_ns: int) -> End:
        return End(
            generation.request.id,
            reason,
            generation.usage(),
            generation.clock.times(now_ns),
            generation.preemptions,
            error,
        )

    # ------------------------------------------------------------------------- time and reports

    def _expire(self, now_ns: int, effects: Effects) -> None:
        """End what is past its deadline."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            request_id = heappop(self._expiries)[2]
            generation = self._generations.get(request_id)
            if generation is None:
                continue
            error = self._lateness(generation, now_ns)
            if error:
                self._end_request(request_id, EndReason.EXPIRED, error, now_ns, effects)
        if self._drain_ns is not None and self._drain_ns <= now_ns:
            error = "the server shut down before the answer was complete"
            for request_id in list(self._generations):
                self._end_request(request_id, EndReason.SHUTDOWN, error, now_ns, effects)

    def _lateness(self, generation: Generation, now_ns: int) -> str:
        deadline_ns = generation.request.deadline_ns
        if deadline_ns is not None and deadline_ns <= now_ns:
            return "the deadline of the request passed"
        wait_ns_max = self.limits.queue_wait_ns_max
        waited_ns = now_ns - generation.submitted_ns
        if (
            generation.clock.phase is Phase.QUEUE
            and wait_ns_max is not None
            and waited_ns >= wait_ns_max
        ):
            waited_s, limit_s = waited_ns / 1e9, wait_ns_max / 1e9
            return f"waited {waited_s:.1f} s in the queue; the limit is {limit_s:.1f} s"
        return ""

    def _wish_to_wake(self, now_ns: int, effects: Effects) -> None:
        expiries = self._expiries
        if len(expiries) > 64 + 4 * len(self._generations):
            expiries[:] = [entry for entry in expiries if entry[2] in self._generations]
            heapify(expiries)
        while expiries and expiries[0][2] not in self._generations:
            heappop(expiries)
        wishes = [expiries[0][0]] if expiries else []
        if self._drain_ns is not None and self._generations:
            wishes.append(self._drain_ns)
        batch_ns = self._batching.wake_ns()
        if batch_ns is not None:
            wishes.append(batch_ns)
        at_ns = min((wish for wish in wishes if wish > now_ns), default=None)
        if at_ns is not None and at_ns != self._woken_at_ns:
            effects.append(WakeAt(at_ns))
        self._woken_at_ns = at_ns

    def _report(self) -> Report:
        roster, ledger = self.roster, self.roster.ledger
        prefill = sum(len(s.tokens) for s in roster.waiting)
        prefill += sum(s.pending for s in roster.residents if s.state is SequenceState.PREFILL)
        return Report(
            waiting=len(roster.waiting),
            running=len(roster.residents),
            blocks_free=ledger.available,
            blocks_total=ledger.blocks_total,
            blocks_cached=ledger.cached,
            waiting_prefill_tokens=prefill,
            preemptions=roster.preemptions,
            prefix_query_tokens=self._batching.prefix_query_tokens,
            prefix_hit_tokens=self._batching.prefix_hit_tokens,
            prefill_tokens_per_s=self.cost.prefill_tokens_per_s,
            step_ns=self._step_ns,
        )
