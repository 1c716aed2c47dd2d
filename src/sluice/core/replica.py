"""The policy of one replica: one event in, the effects it calls for out.

``Replica.handle`` is called by a driver (``runtime/realtime.py`` or ``runtime/virtual.py``) for
every event, with the time; it performs nothing itself. Here requests come and end; steps are filled
in ``core/batching.py`` and their results entered in ``core/batch.py``. At most one step is
outstanding. A request that ends while a step holds its blocks leaves when that step is over, and
its tokens of that step are not emitted.

How many may wait here is the fleet's business, and how long. Text, sampling and stop conditions are
the runtime's: it says so in ``Sampled.stop``.
"""

from collections.abc import Iterable
from typing import assert_never

from sluice.core.admission import unservable
from sluice.core.batch import Batch, Stretch
from sluice.core.batching import Batching
from sluice.core.costmodel import RATIO_MAX, CostModel
from sluice.core.errors import InternalError
from sluice.core.events import (
    Cancelled,
    Drained,
    Draining,
    Emit,
    ReplicaEffect,
    ReplicaEvent,
    RunStep,
    SequenceEnded,
    StepDone,
    StepFailed,
    Submitted,
    Woken,
)
from sluice.core.expiries import Expiries
from sluice.core.lifecycle import SequenceState
from sluice.core.request import EndReason, Request
from sluice.core.roster import BatchingLimits
from sluice.core.sequence import Generation, Sequence, generation_of
from sluice.core.step import Plan

Effects = list[ReplicaEffect]

_DRAINING = "the replica is draining and takes no further request"
STEPS_KEPT = 8  # memory of the mean duration of a step


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
        self._expiries = Expiries()
        self._running: tuple[Plan, Batch] | None = None
        self._steps = 0
        self._step_ns = 0
        self._sequences_seen = 0
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
                pass  # the time is looked at below, whatever the event
            case _:
                assert_never(event)
        self._expire(now_ns, effects)
        if self._running is None:
            batch = self._batching.plan(now_ns)
            if batch is not None:
                effects.append(self._run(batch))
        effects.append(self._batching.report(self._step_ns, new=isinstance(event, Submitted)))
        drain_ns = self._drain_ns if self._generations else None
        effects += self._expiries.wish(now_ns, drain_ns, self._batching.wake_ns())
        if self._drain_ns is not None and not self._generations and not self._drained:
            self._drained = True
            effects.append(Drained())
        return effects

    @property
    def running(self) -> Plan | None:
        """The plan whose result is awaited."""
        return self._running[0] if self._running is not None else None

    def horizon(self, steps_max: int = 1 << 20) -> int:
        """For how many steps beyond the running one the plan stays the same decode-only plan.

        Provided that no event but their results arrives and the runtime stops none of the rows.
        No more than ``steps_max`` are asked about.
        """
        if self._running is None or self._leaving:
            return 0
        return self._batching.horizon(self._running[1], steps_max)

    def skip(self, stretch: Stretch) -> RunStep:
        """Apply the steps of a stretch at once; the running plan is then the one after them.

        Equal to that many ``StepDone`` events, except that the tokens are not emitted (the caller
        has them) and nothing is reported. The stretch is no longer than ``horizon()``.
        """
        steps = len(stretch.durations_ns)
        if self._running is None or not 0 < steps <= self.horizon(steps):
            raise InternalError(f"a stretch of {steps} steps is beyond the horizon")
        self._steps += steps - 1
        self._steps_took(stretch.durations_ns, self._running[0].predicted_ns)
        return self._run(self._batching.skip(self._running[1], stretch))

    # ------------------------------------------------------------------------------- submission

    def _submit(self, request: Request, now_ns: int, effects: Effects) -> None:
        limits = self.limits.replica
        if request.id in self._generations:
            raise InternalError(f"request {request.id} was submitted twice")
        generation = generation_of(request, now_ns, self._sequences_seen)
        error = _DRAINING if self._drain_ns is not None else unservable(request, limits)
        if error:
            reason = EndReason.FAILED if self._drain_ns is None else EndReason.SHUTDOWN
            effects.append(generation.ending(reason, error, now_ns))
            return
        self._generations[request.id] = generation
        self._sequences_seen += request.choices
        self._expiries.add(request)
        for sequence in generation.sequences:
            self.roster.enter(sequence)

    # ------------------------------------------------------------------------------------ steps

    def _run(self, batch: Batch) -> RunStep:
        self._steps += 1
        plan = batch.plan(self._steps, self.cost.step_ns(batch.load))
        self._running = (plan, batch)
        return RunStep(plan)

    def _steps_took(self, durations_ns: Iterable[int], predicted_ns: int) -> None:
        """Enter steps into their running mean; a stalled machine's counts with a bound."""
        mean_ns = self._step_ns
        for duration_ns in durations_ns:
            bounded_ns = min(duration_ns, int(RATIO_MAX * (mean_ns or predicted_ns)))
            mean_ns = mean_ns + (bounded_ns - mean_ns) // STEPS_KEPT if mean_ns else bounded_ns
        self._step_ns = mean_ns

    def _finished_step(self, step: int) -> tuple[Plan, Batch]:
        running = self._running
        if running is None or running[0].step != step:
            raise InternalError(f"step {step} was answered and is not running")
        return running

    def _step_done(self, event: StepDone, now_ns: int, effects: Effects) -> None:
        plan, batch = self._finished_step(event.step)
        expected = [row[0] for row in plan.rows if row[4]]  # by place: names take longer
        if [sampled[0] for sampled in event.sampled] != expected:
            raise InternalError(f"step {event.step} was answered with tokens of other sequences")
        self._running = None
        self._steps_took((event.duration_ns,), plan.predicted_ns)
        self.cost.observe(batch.load, event.duration_ns)
        emitted, complete = batch.credit(event.sampled, self.roster.ledger, now_ns)
        if emitted:
            effects.append(Emit(tuple(emitted)))
        for sequence, reason in complete:
            self._end_sequence(sequence, reason, now_ns, effects)
        self._settle(now_ns, effects)

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
        generation = sequence.generation
        cut = reason is EndReason.LENGTH
        self.roster.lengths.observe(sequence.produced, generation.request.slo_class, cut=cut)
        effects.append(SequenceEnded(sequence.id, reason))
        generation.reasons[sequence.id.choice] = reason
        if len(generation.reasons) == generation.request.choices:
            cut = EndReason.LENGTH in generation.reasons.values()
            whole = EndReason.LENGTH if cut else EndReason.STOP
            self._close(generation, whole, "", now_ns, effects)

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
        request_id = generation.request.id
        del self._generations[request_id]
        self._expiries.remove(request_id)
        effects.append(generation.ending(reason, error, now_ns))

    def _expire(self, now_ns: int, effects: Effects) -> None:
        for request_id in self._expiries.take_overdue(now_ns):
            error = "the deadline of the request passed"
            self._end_request(request_id, EndReason.EXPIRED, error, now_ns, effects)
        if self._drain_ns is not None and self._drain_ns <= now_ns:
            error = "the server shut down before the answer was complete"
            for request_id in list(self._generations):
                self._end_request(request_id, EndReason.SHUTDOWN, error, now_ns, effects)
