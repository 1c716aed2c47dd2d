"""Replica processes that are none: a real ``core.Replica`` over a fake executor.

``FakeProcess`` stands where ``cluster.placement.replica.PlacedReplica`` does, on the event loop.
Steps take the time that the executor says, by timers of the loop, so that with ``VirtualTimeLoop``
hours pass in an instant and the times that come out are exact. What the process says and when it is
lost is the test's choice.
"""

import asyncio
import selectors
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.events import (
    Cancelled,
    Drained,
    Draining,
    Emit,
    End,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLimits,
    Report,
    RunStep,
    SequenceEnded,
    StepDone,
    Submitted,
    WakeAt,
    Woken,
)
from sluice.core.replica import Replica
from sluice.core.request import SequenceId
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan
from sluice.executors.base import StepExecutor
from sluice.runtime.generation import Delta
from sluice.runtime.messages import (
    Cancel,
    ChoiceDone,
    Drain,
    DrainDone,
    FromReplica,
    Load,
    Ready,
    RequestEnded,
    Submit,
    Text,
    ToReplica,
)
from sluice.testing.executors import FakeExecutor
from sluice.testing.replicas import executor_limits


class _VirtualSelector(selectors.SelectSelector):
    """Lets time jump to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, wait_s: float | None = None) -> Any:
        """Return what is ready; with nothing ready the wait is over at once."""
        ready = super().select(0)
        if not ready and wait_s:
            self.now_s += wait_s
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while anything can run and jumps when nothing can."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds of the virtual clock."""
        return self._virtual.now_s

    def now_ns(self) -> int:
        """Nanoseconds of the virtual clock."""
        return round(self._virtual.now_s * 1e9)


class Listener(Protocol):
    """Whom the process tells; see ``cluster.placement.replica.ReplicaListener``."""

    def received(self, replica_id: str, messages: Sequence[FromReplica]) -> None:
        """Messages came from the replica, in order."""
        ...

    def lost(self, replica_id: str, error: str, *, silent: bool = False) -> None:
        """The process ended without having been asked to stop."""
        ...


class FakeProcess:
    """One replica id over its incarnations.

    ``executor`` makes the executor of each incarnation, ``load_s`` is its loading time. Each token
    is told as the text ``<N>``. ``replica`` is the policy of the current incarnation.
    """

    def __init__(
        self,
        replica_id: str,
        listener: Listener,
        limits: BatchingLimits,
        clock: Callable[[], int],
        *,
        executor: Callable[[ReplicaLimits], StepExecutor] = FakeExecutor,
        load_s: float = 0.0,
    ) -> None:
        self.replica_id = replica_id
        self.starts = 0
        self.replica: Replica | None = None
        self.deaf = False
        self._listener = listener
        self._limits = limits
        self._clock = clock
        self._make_executor = executor
        self._load_s = load_s
        self._executor: StepExecutor | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._stopping = False
        self._runs = False

    @property
    def pid(self) -> int | None:
        """The number of the incarnation, ``None`` before the first."""
        return self.starts or None

    def start(self) -> None:
        """Start an incarnation, which is ready after ``load_s``; one that is loaded is so again."""
        if self.replica is not None:
            self._later(0.0, self._tell_ready)
        self.warm()

    def warm(self) -> None:
        """Start an incarnation where none runs."""
        if not self._stopping and not self._runs:
            self._runs = True
            self.starts += 1
            self._later(self._load_s, self._loaded)

    def send(self, message: ToReplica) -> None:
        """Take a message; dropped where no incarnation is ready, or it is ``deaf``."""
        if self.replica is None or self.deaf:
            return
        match message:
            case Submit():
                assert self._executor is not None
                for choice in range(message.request.choices):
                    sequence = SequenceId(message.request.id, choice)
                    self._executor.open_sequence(sequence, message.sampling, message.request.prompt)
                self._handle(Submitted(message.request))
            case Cancel():
                self._handle(Cancelled(message.request_id))
            case Drain():
                self._handle(Draining(message.deadline_ns))

    async def stop(self) -> None:
        """End it; no loss is reported."""
        self._stopping = True
        self._end()

    def crash(self, error: str = "crashed", *, silent: bool = False) -> None:
        """End the incarnation as a native crash would, or as one that hangs is ended."""
        self._end()
        self._listener.lost(self.replica_id, error, silent=silent)

    def tell(self, *messages: FromReplica) -> None:
        """Say something to the gateway."""
        self._listener.received(self.replica_id, messages)

    # --------------------------------------------------------------------------------- internals

    def _end(self) -> None:
        self.replica = self._executor = None
        self._runs = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _loaded(self) -> None:
        told = executor_limits(self._limits)
        self._executor = self._make_executor(told)
        self._executor.load()
        self.replica = Replica(self._limits, FixedCostModel(Coefficients()))
        self._tell_ready()

    def _tell_ready(self) -> None:
        self.tell(Ready(executor_limits(self._limits), round(self._load_s * 1e9)))

    def _later(self, delay_s: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            work()

        timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), run)
        self._timers.add(timer)

    def _handle(self, event: ReplicaEvent) -> None:
        if self.replica is None:
            return
        messages: list[FromReplica] = []
        for effect in self.replica.handle(event, self._clock()):
            messages += self._perform(effect)
        if messages:
            self.tell(*messages)

    def _perform(self, effect: ReplicaEffect) -> list[FromReplica]:
        match effect:
            case RunStep(plan):
                self._run(plan)
            case WakeAt(at_ns):
                self._later((at_ns - self._clock()) / 1e9, lambda: self._handle(Woken()))
            case Emit(sampled):
                return [
                    Text(one.sequence.request_id, Delta(one.sequence.choice, f"<{one.token}>", 1))
                    for one in sampled
                ]
            case SequenceEnded(sequence, reason):
                assert self._executor is not None
                self._executor.end_sequence(sequence)
                return [ChoiceDone(sequence.request_id, sequence.choice, reason)]
            case End():
                return [
                    RequestEnded(
                        effect.request_id, effect.reason, effect.usage, effect.phases,
                        effect.preemptions, effect.error,
                    )
                ]  # fmt: skip
            case Report():
                return [Load(effect)]
            case Drained():
                return [DrainDone()]
        return []

    def _run(self, plan: Plan) -> None:
        assert self._executor is not None
        outcome = self._executor.run(plan)
        done = StepDone(plan.step, outcome.sampled, outcome.duration_ns)
        self._later(outcome.duration_ns / 1e9, lambda: self._handle(done))
