"""The driver in virtual time: replicas run from an event heap on one thread, without waiting.

It performs what ``runtime/realtime.py`` performs, at the instant at which it would have happened.
The same events in give the same effects out. Where an executor can say what several decode steps in
a row will give (``Foreseeing``), they are taken at once, as far as ``Stretching`` says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import Protocol, assert_never, runtime_checkable

from sluice.core.batch import Stretch
from sluice.core.events import (
    Drained,
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
from sluice.core.request import Request, SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Sampled, StopReason
from sluice.executors.base import StepError, StepExecutor

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Stretching:
    """How decode steps are taken at once: at most ``steps_max`` of them, 0 for one by one.

    Without ``silence_ns_max`` a stretch is over before anything else happens. With it, it goes on
    whatever happens elsewhere; then observers hear of a replica that computes at least as often as
    that, up to a step. What happens to a replica itself is at the same nanosecond in all three.
    """

    steps_max: int = 256
    silence_ns_max: int | None = None


STEP_BY_STEP = Stretching(steps_max=0)
AT_ONCE = Stretching()


@runtime_checkable
class Foreseeing(Protocol):
    """The further ability of an executor whose steps are known in advance."""

    def foresee(self, plan: Plan, steps: int) -> Stretch:
        """What up to that many steps of a decode-only plan give, before any sequence stops."""
        ...


Observer = Callable[[str, ReplicaEvent, int, Sequence[ReplicaEffect]], None]


def ignore(
    replica_id: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
) -> None:
    """Observe nothing."""


@dataclass(slots=True)
class _Seat:
    """One replica in the driver. ``wakes`` counts wishes: only the latest one is fulfilled.

    ``held`` is a stretch that goes on, from its start; ``holds`` counts them. Once it is not
    ``present`` nothing more happens to it.
    """

    id: str
    replica: Replica
    executor: StepExecutor
    foreseeing: Foreseeing | None
    present: bool = True
    wakes: int = 0
    held: tuple[Stretch, int] | None = None
    holds: int = 0
    choices: dict[str, int] = field(default_factory=dict)


class VirtualDriver:
    """Runs replicas until nothing is left to happen.

    ``end_tokens`` are the token ids at which a sequence stops. ``observe`` sees every event with
    its time and effects; of a stretch only what follows it. ``stretched`` are the replicas of whose
    last stretch an observer may not know yet. ``now_ns`` is the time of the event in hand;
    observers may call ``at`` and ``submit`` for then or later.
    """

    def __init__(
        self,
        *,
        end_tokens: frozenset[int] = frozenset(),
        observe: Observer = ignore,
        stretching: Stretching = AT_ONCE,
    ) -> None:
        self.now_ns = 0
        self.stretched: set[str] = set()
        self.events = 0
        self.steps = 0
        self._end_tokens = end_tokens
        self._observe = observe
        self._stretching = stretching
        self._seats: dict[str, _Seat] = {}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._pushed = 0
        self._halted = False
        self._sampling: dict[str, Sampling] = {}

    def add(self, replica_id: str, replica: Replica, executor: StepExecutor) -> None:
        """Add a replica; its executor is loaded."""
        foreseeing = executor if isinstance(executor, Foreseeing) else None
        self._seats[replica_id] = _Seat(replica_id, replica, executor, foreseeing)

    def remove(self, replica_id: str) -> None:
        """Take a replica away, as if its process had ended: what it was doing never happens."""
        self._seats.pop(replica_id).present = False

    def at(self, at_ns: int, replica_id: str, event: ReplicaEvent) -> None:
        """Let an event happen."""
        self.call_at(at_ns, partial(self._handle, self._seats[replica_id], event))

    def call_at(self, at_ns: int, action: Callable[[], None]) -> None:
        """Let something else happen, in order with the events."""
        self._pushed += 1
        heappush(self._heap, (at_ns, self._pushed, action))

    def submit(
        self, at_ns: int, replica_id: str, request: Request, sampling: Sampling = GREEDY
    ) -> None:
        """Let a request arrive at a replica."""
        self._sampling[request.id] = sampling
        self.at(at_ns, replica_id, Submitted(request))

    def run(self, until_ns: int | None = None) -> None:
        """Let everything happen that is due, up to and including ``until_ns``."""
        while (
            self._heap and not self._halted and (until_ns is None or self._heap[0][0] <= until_ns)
        ):
            self.now_ns, _, action = heappop(self._heap)
            action()

    def halt(self) -> None:
        """Let nothing more happen once the event in hand is over."""
        self._halted = True

    def _wake(self, seat: _Seat, wish: int) -> None:
        if wish == seat.wakes:  # else a later wish replaced this one
            self._handle(seat, Woken())

    def _handle(self, seat: _Seat, event: ReplicaEvent) -> None:
        if not seat.present:
            return
        if seat.held is not None:
            self._cut(seat)
        if isinstance(event, Submitted):
            self._open(seat, event.request)
        self.events += 1
        effects = seat.replica.handle(event, self.now_ns)
        self._observe(seat.id, event, self.now_ns, effects)
        plan = None
        for effect in effects:
            match effect:
                case RunStep():
                    plan = effect.plan
                case SequenceEnded():
                    seat.executor.end_sequence(effect.sequence)
                case End():
                    self._close(seat, effect.request_id)
                case WakeAt():
                    seat.wakes += 1
                    self.call_at(effect.at_ns, partial(self._wake, seat, seat.wakes))
                case Emit() | Report() | Drained():
                    pass
                case _:
                    assert_never(effect)
        if plan is not None:
            self._step(seat, plan)

    def _open(self, seat: _Seat, request: Request) -> None:
        sampling = self._sampling.pop(request.id, GREEDY)
        seat.choices[request.id] = request.choices
        for choice in range(request.choices):
            own = sampling
            if sampling.seed is not None:
                own = replace(sampling, seed=sampling.seed + choice)
            seat.executor.open_sequence(SequenceId(request.id, choice), own, request.prompt)

    def _close(self, seat: _Seat, request_id: str) -> None:
        for choice in range(seat.choices.pop(request_id, 0)):
            seat.executor.end_sequence(SequenceId(request_id, choice))

    def _step(self, seat: _Seat, plan: Plan) -> None:
        """Run a plan that starts now; its result happens when its duration is over."""
        stretch = self._foreseen(seat, plan)
        if stretch is None:
            self._run(seat, plan, self.now_ns)
        elif self._stretching.silence_ns_max is None:
            until_ns = self._heap[0][0] if self._heap else None
            self._run(seat, *self._take(seat, stretch, self.now_ns, until_ns))
        else:
            seat.held = (stretch, self.now_ns)
            seat.holds += 1
            over_ns = self.now_ns + sum(stretch.durations_ns)
            self.call_at(over_ns, partial(self._over, seat, seat.holds))

    def _run(self, seat: _Seat, plan: Plan, start_ns: int) -> None:
        self.steps += 1
        try:
            outcome = seat.executor.run(plan)
        except StepError as error:
            failed = StepFailed(plan.step, error.blamed, str(error))
            self.call_at(start_ns, partial(self._handle, seat, failed))
            return
        sampled, ends = outcome.sampled, self._end_tokens
        if ends and not ends.isdisjoint([token[1] for token in sampled]):
            sampled = tuple(self._stopped(token) for token in sampled)
        done = StepDone(plan.step, sampled, outcome.duration_ns)
        self.call_at(start_ns + outcome.duration_ns, partial(self._handle, seat, done))

    def _foreseen(self, seat: _Seat, plan: Plan) -> Stretch | None:
        """The steps that follow if nothing happens to the replica, ``None`` where that is one."""
        steps_max, silence_ns_max = self._stretching.steps_max, self._stretching.silence_ns_max
        if seat.foreseeing is None or not steps_max:
            return None
        if silence_ns_max is not None:
            steps_max = min(steps_max, silence_ns_max // max(1, plan.predicted_ns))
        horizon = seat.replica.horizon(steps_max)
        if horizon < 1:
            return None
        stretch = seat.foreseeing.foresee(plan, horizon)
        return stretch if stretch.durations_ns else None

    def _take(
        self, seat: _Seat, stretch: Stretch, start_ns: int, until_ns: int | None
    ) -> tuple[Plan, int]:
        """Take the steps of a stretch at once that are over before ``until_ns``.

        Returns the plan that runs after them and when it starts.
        """
        steps, running = 0, seat.replica.running
        assert running is not None
        for duration_ns in stretch.durations_ns:
            if until_ns is not None and start_ns + duration_ns >= until_ns:
                break
            start_ns += duration_ns
            steps += 1
        if steps == 0:
            return running, start_ns
        self.steps += steps
        self.stretched.add(seat.id)
        if steps < len(stretch.durations_ns):
            tokens = tuple(row[:steps] for row in stretch.tokens)
            stretch = Stretch(tokens, stretch.durations_ns[:steps])
        return seat.replica.skip(stretch).plan, start_ns

    def _cut(self, seat: _Seat) -> None:
        """Something happens to a replica in a stretch: the step that is on its way now runs."""
        assert seat.held is not None
        (stretch, start_ns), seat.held = seat.held, None
        self._run(seat, *self._take(seat, stretch, start_ns, self.now_ns))

    def _over(self, seat: _Seat, hold: int) -> None:
        """A stretch was not cut: the step after it runs."""
        if seat.present and seat.held is not None and hold == seat.holds:
            (stretch, start_ns), seat.held = seat.held, None
            self._run(seat, *self._take(seat, stretch, start_ns, None))

    def _stopped(self, sampled: Sampled) -> Sampled:
        if sampled.token in self._end_tokens:
            return Sampled(sampled.sequence, sampled.token, StopReason.END_TOKEN)
        return sampled
