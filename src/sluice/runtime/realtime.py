"""The live driver of one replica: a plain loop on one thread, in a process of its own.

It turns messages and finished steps into events, hands them to ``Replica.handle`` and performs the
effects: steps on the executor, text and endings on the channel. It decides nothing; the text of
tokens is ``sequence_texts``'s. What has arrived is handed over before the next plan is made.
"""

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

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
from sluice.core.replica import Replica
from sluice.core.request import EndReason, PhaseTimes, SequenceId, Usage
from sluice.core.step import Plan
from sluice.executors.base import StepError, StepExecutor
from sluice.runtime.generation import Fault
from sluice.runtime.messages import (
    Cancel,
    ChoiceDone,
    Drain,
    DrainDone,
    FromReplica,
    Load,
    RequestEnded,
    Submit,
    ToReplica,
)
from sluice.runtime.sequence_texts import Outputs, SequenceTexts
from sluice.runtime.surroundings import Channel, Record

_log = logging.getLogger(__name__)

# With nothing to do the loop still looks up this often, so that no wait is without an end.
_IDLE_WAIT_S = 30.0


class ReplicaDriver:
    """Runs one replica until its channel closes or it is drained.

    ``clock`` gives monotonic nanoseconds. ``record`` sees every event with its time and effects.
    """

    def __init__(
        self,
        replica: Replica,
        executor: StepExecutor,
        outputs: Outputs,
        channel: Channel,
        clock: Callable[[], int],
        record: Record,
    ) -> None:
        self._replica = replica
        self._executor = executor
        self._texts = SequenceTexts(outputs)
        self._channel = channel
        self._clock = clock
        self._record = record
        self._plan: Plan | None = None
        self._wake_at_ns: int | None = None
        self._drained = False
        self._choices: dict[str, int] = {}
        self._outgoing: list[FromReplica] = []
        self._report: Report | None = None
        self._unrecorded: list[tuple[ReplicaEvent, int, Sequence[ReplicaEffect]]] = []

    def run(self) -> None:
        """Serve until drained. Raises what the channel raises when the gateway is gone."""
        while not self._drained:
            self._take(self._channel.receive(self._wait_s()))
            if self._plan is not None:
                self._step(self._plan)
            elif self._wake_at_ns is not None and self._clock() >= self._wake_at_ns:
                self._wake_at_ns = None
                self._handle(Woken())
            self._flush()
            while self._unrecorded:  # nobody waits for the record
                self._record(*self._unrecorded.pop(0))

    def abandon(self) -> None:
        """Let the executor hold nothing of what is unfinished: nobody will hear of it."""
        for request_id, choices in self._choices.items():
            for choice in range(choices):
                self._executor.end_sequence(SequenceId(request_id, choice))

    def _wait_s(self) -> float:
        if self._plan is not None:
            return 0.0
        if self._wake_at_ns is None:
            return _IDLE_WAIT_S
        return min(_IDLE_WAIT_S, max(0, self._wake_at_ns - self._clock()) / 1e9)

    # ------------------------------------------------------------------------------------ inward

    def _take(self, messages: Sequence[ToReplica]) -> None:
        for message in messages:
            match message:
                case Submit():
                    self._submit(message)
                case Cancel():
                    self._handle(Cancelled(message.request_id))
                case Drain():
                    self._handle(Draining(message.deadline_ns))
                case _:
                    assert_never(message)

    def _submit(self, message: Submit) -> None:
        request = message.request
        self._choices[request.id] = request.choices
        with self._texts.alone(request.id):
            for choice in range(request.choices):
                sequence = SequenceId(request.id, choice)
                mask = self._texts.open(sequence, message.rules, message.grammar)
                self._executor.open_sequence(sequence, message.sampling, request.prompt, mask)
        if request.id in self._texts.broken:
            phases = PhaseTimes(queue_ns=self._clock() - request.arrived_ns)
            self._end(End(request.id, EndReason.FAILED, Usage(0, 0, 0), phases, preemptions=0))
        else:
            self._handle(Submitted(request))

    def _step(self, plan: Plan) -> None:
        self._plan = None
        self._flush()
        try:
            outcome = self._executor.run(plan)
        except StepError as error:
            _log.error("step %d failed: %s", plan.step, error)
            self._take(self._channel.receive(0.0))
            self._handle(StepFailed(plan.step, error.blamed, str(error)))
            return
        looked = self._texts.look(outcome.sampled, outcome.logprobs)
        self._take(self._channel.receive(0.0))
        self._handle(StepDone(plan.step, looked, outcome.duration_ns))
        for request_id in self._texts.broken:
            self._handle(Cancelled(request_id))

    def _handle(self, event: ReplicaEvent) -> None:
        now_ns = self._clock()
        effects = self._replica.handle(event, now_ns)
        self._unrecorded.append((event, now_ns, effects))
        for effect in effects:
            self._perform(effect)

    # ----------------------------------------------------------------------------------- outward

    def _perform(self, effect: ReplicaEffect) -> None:
        match effect:
            case RunStep():
                self._plan = effect.plan
            case Emit():
                self._outgoing += self._texts.take(effect.sampled)
            case SequenceEnded():
                self._end_sequence(effect)
            case End():
                self._end(effect)
            case Report():
                self._report = effect
            case WakeAt():
                self._wake_at_ns = effect.at_ns
            case Drained():
                self._drained = True
                self._outgoing.append(DrainDone())
            case _:
                assert_never(effect)

    def _end_sequence(self, effect: SequenceEnded) -> None:
        sequence, reason = effect.sequence, effect.reason
        self._executor.end_sequence(sequence)
        self._outgoing += self._texts.finish(sequence, reason)
        self._outgoing.append(ChoiceDone(sequence.request_id, sequence.choice, reason))

    def _end(self, effect: End) -> None:
        request_id, reason, error = effect.request_id, effect.reason, effect.error
        for choice in range(self._choices.pop(request_id, 0)):
            sequence = SequenceId(request_id, choice)
            self._executor.end_sequence(sequence)
            self._texts.forget(sequence)
        fault = Fault.ENGINE if reason is EndReason.FAILED else None
        breakage = self._texts.breakage(request_id)
        if breakage is not None:
            reason, (error, fault) = EndReason.FAILED, breakage
        ended = RequestEnded(
            request_id, reason, effect.usage, effect.phases, effect.preemptions, error, fault
        )
        self._outgoing.append(ended)

    def _flush(self) -> None:
        if self._report is not None:
            self._outgoing.append(Load(self._report))
            self._report = None
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._channel.send(outgoing)
