"""A fleet in virtual time: the fleet's policy over replicas that ``VirtualDriver`` runs.

It performs for ``Fleet`` what the gateway performs live: requests are dispatched at the instant of
the decision, endings, first tokens and reports go back at theirs, replicas take their time to start
and to wake. Nothing is decided here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, assert_never

from sluice.core.events import (
    Abort,
    Arrived,
    Cancelled,
    Dispatch,
    DrainReplica,
    Emit,
    End,
    Ended,
    Fail,
    FleetEffect,
    FleetEvent,
    Progress,
    Reject,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLimits,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    Report,
    Retarget,
    Scaled,
    Shorten,
    StartReplica,
    StopReplica,
    Submitted,
    Tick,
    WakeAt,
    WarmReplica,
)
from sluice.core.fleet import Fleet
from sluice.core.pool_view import PoolView
from sluice.core.replica import Replica
from sluice.core.request import Request, Rung
from sluice.executors.base import StepExecutor
from sluice.runtime.virtual import AT_ONCE, Stretching, VirtualDriver

MakeReplica = Callable[[str], tuple[Replica, StepExecutor]]


class Watcher(Protocol):
    """Sees all events and effects at their times."""

    def fleet_event(self, event: FleetEvent, now_ns: int, effects: Sequence[FleetEffect]) -> None:
        """The fleet took an event."""
        ...

    def replica_event(
        self, replica_id: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> None:
        """A replica took an event."""
        ...


class Starting(Protocol):
    """How long replicas take to be ready."""

    def load_ns(self, replica_id: str, now_ns: int) -> int:
        """A process that starts now takes so long."""
        ...

    def wake_ns(self, replica_id: str, now_ns: int) -> int:
        """One that is loaded and warm takes so long."""
        ...


@dataclass(frozen=True, slots=True)
class SameStart:
    """All take the same time to load, and none to wake."""

    duration_ns: int = 0

    def load_ns(self, replica_id: str, now_ns: int) -> int:  # noqa: ARG002
        """See ``Starting``."""
        return self.duration_ns

    def wake_ns(self, replica_id: str, now_ns: int) -> int:  # noqa: ARG002
        """See ``Starting``."""
        return 0


@dataclass(frozen=True, slots=True)
class LaterStart(SameStart):
    """Those that are started at the very beginning serve at once."""

    def load_ns(self, replica_id: str, now_ns: int) -> int:
        """See ``Starting``."""
        return 0 if now_ns == 0 else SameStart.load_ns(self, replica_id, now_ns)


class VirtualFleet:
    """Runs a fleet until nothing is left to happen.

    ``make`` gives a fresh replica with its executor whenever one has started, after ``starting``.
    ``stretching`` says how often the fleet hears of replicas that only decode; less often is much
    faster where there are many.
    """

    def __init__(
        self,
        fleet: Fleet,
        make: MakeReplica,
        *,
        starting: Starting | None = None,
        end_tokens: frozenset[int] = frozenset(),
        watcher: Watcher,
        stretching: Stretching = AT_ONCE,
    ) -> None:
        self.driver = VirtualDriver(
            end_tokens=end_tokens, observe=self._observe, stretching=stretching
        )
        self._fleet = fleet
        self._make = make
        self._starting = starting or SameStart()
        self._watcher = watcher
        self._requests: dict[str, Request] = {}
        self._replicas: dict[str, Replica] = {}
        self._told: dict[str, int] = {}
        self._silence_ns_max = stretching.silence_ns_max
        self._quiet_until_ns: dict[str, int] = {}
        self._up: dict[str, ReplicaLimits] = {}
        self._starts: dict[str, int] = {}
        self._begun = 0
        self._wishes = 0
        self.at(0, Tick())

    def at(self, at_ns: int, event: FleetEvent) -> None:
        """Let an event of the fleet happen."""
        self.driver.call_at(at_ns, partial(self._handle, event))

    def arrive(self, at_ns: int, model: str, request: Request) -> None:
        """Let a request arrive."""
        self.at(at_ns, Arrived(model, request))

    def feed(self, arrivals: Iterator[tuple[int, str, Request]]) -> None:
        """Let requests arrive at their times, each for its model; they come in order of time.

        Each is taken when the one before has arrived, so that only one is held.
        """
        self.driver.call_at(self.driver.now_ns, partial(self._take_next, arrivals))

    def lose(self, at_ns: int, replica_id: str, *, permanent: bool = False) -> None:
        """Let the process of a replica end unasked, if it runs then; see ``ReplicaLost``."""
        self.driver.call_at(at_ns, partial(self._lose, replica_id, permanent=permanent))

    def pools(self) -> tuple[PoolView, ...]:
        """The models and replicas as the fleet sees them at this moment."""
        return self._fleet.pools(self.driver.now_ns)

    def halt(self) -> None:
        """Let nothing more happen."""
        self.driver.halt()

    def run(self, until_ns: int | None = None) -> None:
        """See ``VirtualDriver.run``."""
        self.driver.run(until_ns)

    def _take_next(self, arrivals: Iterator[tuple[int, str, Request]]) -> None:
        found = next(arrivals, None)
        if found is not None:
            at_ns, model, request = found
            self.driver.call_at(at_ns, partial(self._fed, Arrived(model, request), arrivals))

    def _fed(self, arrived: Arrived, arrivals: Iterator[tuple[int, str, Request]]) -> None:
        self._handle(arrived)
        self._take_next(arrivals)

    def _handle(self, event: FleetEvent) -> None:
        if isinstance(event, Arrived):
            self._requests[event.request.id] = event.request
        now_ns = self.driver.now_ns
        effects = self._fleet.handle(event, now_ns)
        if isinstance(event, Cancelled) and not any(isinstance(e, Abort) for e in effects):
            self._requests.pop(event.request_id, None)  # else it ends on its replica
        self._watcher.fleet_event(event, now_ns, effects)
        for effect in effects:
            self._perform(effect, now_ns)

    def _perform(self, effect: FleetEffect, now_ns: int) -> None:
        match effect:
            case Dispatch():
                self.driver.at(
                    now_ns, effect.replica_id, Submitted(self._requests[effect.request_id])
                )
            case Abort():
                if effect.replica_id in self._up:
                    self.driver.at(now_ns, effect.replica_id, Cancelled(effect.request_id))
            case StartReplica() | WarmReplica():
                self._bring_up(effect, now_ns)
            case StopReplica():
                self._starts.pop(effect.replica_id, None)
                if self._up.pop(effect.replica_id, None) is not None:
                    self.driver.remove(effect.replica_id)
            case DrainReplica() | Scaled():
                pass
            case WakeAt():
                self._wishes += 1
                self.driver.call_at(effect.at_ns, partial(self._tick, self._wishes))
            case Reject() | Fail():
                del self._requests[effect.request_id]
            case Shorten():
                request = self._requests[effect.request_id]
                self._requests[effect.request_id] = replace(
                    request,
                    output_tokens_max=effect.output_tokens_max,
                    degraded=(*request.degraded, Rung.SHORTEN),
                )
            case Retarget():
                request = self._requests.pop(effect.request_id)
                request = replace(request, degraded=(*request.degraded, effect.rung))
                self.arrive(now_ns, effect.model, request)
            case _:
                assert_never(effect)

    def _tick(self, wish: int) -> None:
        if wish == self._wishes:  # else a later wish replaced this one
            self._handle(Tick())

    def _bring_up(self, effect: StartReplica | WarmReplica, now_ns: int) -> None:
        replica_id = effect.replica_id
        if replica_id in self._up:
            if isinstance(effect, StartReplica):
                wake_ns = self._starting.wake_ns(replica_id, now_ns)
                woken = partial(self._woken, replica_id, self._starts[replica_id])
                self.driver.call_at(now_ns + wake_ns, woken)
        elif replica_id not in self._starts:
            self._begun += 1
            self._starts[replica_id] = self._begun
            start = partial(self._start, replica_id, self._begun)
            self.driver.call_at(now_ns + self._starting.load_ns(replica_id, now_ns), start)

    def _woken(self, replica_id: str, start: int) -> None:
        if self._starts.get(replica_id) == start:
            self._handle(ReplicaReady(replica_id, self._up[replica_id]))

    def _start(self, replica_id: str, start: int) -> None:
        if self._starts.get(replica_id) != start:
            return  # it was stopped while it loaded
        replica, executor = self._make(replica_id)
        limits = executor.load()
        self._replicas[replica_id] = replica
        self.driver.add(replica_id, replica, executor)
        self._up[replica_id] = limits
        self._handle(ReplicaReady(replica_id, limits))

    def _lose(self, replica_id: str, *, permanent: bool) -> None:
        if replica_id in self._up:
            del self._up[replica_id], self._starts[replica_id]
            self.driver.remove(replica_id)
            self._handle(ReplicaLost(replica_id, "the process ended", permanent=permanent))

    def _observe(
        self,
        replica_id: str,
        event: ReplicaEvent,
        now_ns: int,
        effects: Sequence[ReplicaEffect],
    ) -> None:
        """Pass on to the fleet what it is told about its replicas."""
        self._watcher.replica_event(replica_id, event, now_ns, effects)
        for effect in effects:
            if isinstance(effect, Emit):
                for request_id, tokens in self._progress(replica_id, effect, now_ns).items():
                    self._handle(Progress(request_id, tokens))
            elif isinstance(effect, End):
                self._requests.pop(effect.request_id, None)
                self._told.pop(effect.request_id, None)
                ended = Ended(effect.request_id, effect.reason, effect.usage, effect.phases)
                self._handle(ended)
            elif isinstance(effect, Report):
                self._handle(ReplicaReported(replica_id, effect))

    def _progress(self, replica_id: str, emitted: Emit, now_ns: int) -> dict[str, int]:
        """Tokens of each request that are told to the fleet now.

        Those of a stretch are not emitted; where the fleet need not hear of every step, later
        tokens than the first wait for their time.
        """
        told, stretched = self._told, self.driver.stretched
        fresh: dict[str, int] = {}
        if now_ns < self._quiet_until_ns.get(replica_id, 0):
            for request_id in [s[0][0] for s in emitted.sampled if s[0][0] not in told]:
                fresh[request_id] = fresh.get(request_id, 0) + 1
            told.update(fresh)
            stretched.add(replica_id)
            return fresh
        if self._silence_ns_max is not None:
            self._quiet_until_ns[replica_id] = now_ns + self._silence_ns_max
        for (request_id, _), _, _ in emitted.sampled:
            fresh[request_id] = fresh.get(request_id, 0) + 1
        if replica_id not in stretched:
            for request_id, tokens in fresh.items():
                told[request_id] = told.get(request_id, 0) + tokens
            return fresh
        stretched.remove(replica_id)
        produced: dict[str, int] = {}
        for sequence in self._replicas[replica_id].roster.residents:
            request_id = sequence.id.request_id
            produced[request_id] = produced.get(request_id, 0) + sequence.produced
        for request_id, tokens in fresh.items():
            before = told.get(request_id, 0)
            fresh[request_id] = max(tokens, produced.get(request_id, 0) - before)
            told[request_id] = before + fresh[request_id]
        return fresh
