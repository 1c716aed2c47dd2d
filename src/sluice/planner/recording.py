"""A simulated fleet's journal: the records that a live gateway and its replicas would write.

The gateway's own observer and the replicas' own recorder make them, from the same events. Text is
empty, since there is none.
"""

from collections.abc import Callable, Mapping, Sequence

from sluice.cluster.observer import Observer
from sluice.core.costmodel import LinearCostModel
from sluice.core.events import (
    Abort,
    Arrived,
    Cancelled,
    Dispatch,
    Emit,
    End,
    Fail,
    FleetEffect,
    FleetEvent,
    Reject,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLost,
    ReplicaReady,
    Retarget,
    Scaled,
    Shorten,
)
from sluice.core.replica import Replica
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.runtime import messages
from sluice.runtime.generation import Call, Delta, TokenPrompt
from sluice.runtime.recorder import Recorder
from sluice.telemetry.journal_file import Journal
from sluice.telemetry.metrics import Metrics

# Hides token ids as live journals do. These are made up, so the key is no secret.
KEY = bytes(32)


class Recording:
    """Writes what happens in a fleet to ``journal``. ``models`` are those of the replicas."""

    def __init__(
        self, journal: Journal, models: Mapping[str, str], clock: Callable[[], int]
    ) -> None:
        self._journal = journal
        self._models = models
        self._clock = clock
        self._observer = Observer(Metrics(sorted(set(models.values()))), journal, clock)
        self._recorders: dict[str, Recorder] = {}
        self._requests: dict[str, Request] = {}
        self._observer.deployed("simulation")

    def started(self, replica_id: str, replica: Replica, cost: LinearCostModel) -> None:
        """A replica begins; comes before all that it does."""
        recorder = Recorder(self._journal, replica_id, KEY)
        recorder.start(replica.limits, cost.state(), self._clock())
        self._recorders[replica_id] = recorder

    def fleet_event(self, event: FleetEvent, now_ns: int, effects: Sequence[FleetEffect]) -> None:
        """See ``virtual_fleet.Watcher``."""
        observer = self._observer
        if isinstance(event, Arrived) and event.request.id not in self._requests:
            request = event.request
            self._requests[request.id] = request
            observer.arrived(_call_of(event.model, request), request, lambda _: "")
        elif isinstance(event, ReplicaReady):
            observer.ready(event.replica_id, self._models[event.replica_id], event.limits)
        elif isinstance(event, ReplicaLost):
            observer.lost(event.replica_id, self._models[event.replica_id], event.error)
        elif isinstance(event, Cancelled) and not any(isinstance(e, Abort) for e in effects):
            self._end_here(event.request_id, EndReason.CANCELLED, "the client left", now_ns)
        for effect in effects:
            match effect:
                case Reject():
                    observer.rejected(self._requests.pop(effect.request_id), effect)
                case Dispatch():
                    observer.dispatched(effect)
                case Shorten():
                    observer.shortened(effect)
                case Retarget():
                    observer.retargeted(effect)
                case Scaled():
                    observer.scaled(effect)
                case Fail():
                    self._end_here(effect.request_id, effect.reason, effect.error, now_ns)
                case _:
                    pass

    def replica_event(
        self, replica_id: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> None:
        """See ``virtual_fleet.Watcher``."""
        self._recorders[replica_id].record(event, now_ns, effects)
        for effect in effects:
            if isinstance(effect, Emit):
                for sampled in effect.sampled:
                    request_id, choice = sampled.sequence
                    if request_id in self._requests:
                        self._observer.text(self._requests[request_id], Delta(choice, "", 1))
            elif isinstance(effect, End) and effect.request_id in self._requests:
                self._ended(
                    messages.RequestEnded(
                        effect.request_id,
                        effect.reason,
                        effect.usage,
                        effect.phases,
                        effect.preemptions,
                        effect.error,
                    )
                )

    def close(self) -> None:
        """Write what is left."""
        self._observer.close()

    def _end_here(self, request_id: str, reason: EndReason, error: str, now_ns: int) -> None:
        """No replica tells its end: how far it was on one that is gone is not known."""
        request = self._requests.get(request_id)
        if request is not None:
            usage = Usage(request.prompt_tokens, 0, 0)
            phases = PhaseTimes(queue_ns=now_ns - request.arrived_ns)
            self._ended(messages.RequestEnded(request_id, reason, usage, phases, 0, error))

    def _ended(self, ended: messages.RequestEnded) -> None:
        self._observer.ended(self._requests.pop(ended.request_id), ended)


def _call_of(model: str, request: Request) -> Call:
    return Call(
        id=request.id,
        model=model,
        arrived_ns=request.arrived_ns,
        prompt=TokenPrompt(()),
        choices=request.choices,
        tenant=request.tenant,
        slo_class=request.slo_class,
    )
