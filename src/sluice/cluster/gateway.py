"""The live driver of the fleet: calls in, pieces out, one event loop.

It turns calls, messages of replicas and timers into events, hands them to ``Fleet.handle`` and
performs the effects. Which call is admitted, where it runs and when a process is started again is
decided there. What a call's text means is ``served``'s business, what is measured ``observer``'s.

Implements ``server.ports.Gateway``.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from msgspec import structs

from sluice.cluster.local import ReplicaProcess
from sluice.cluster.observer import Observer
from sluice.cluster.served import ServedModel, ToolCalls
from sluice.core.errors import ModelLoadError, ModelNotFound, RequestError
from sluice.core.events import (
    Abort,
    Arrived,
    Cancelled,
    Dispatch,
    Ended,
    Fail,
    FleetDraining,
    FleetEffect,
    FleetEvent,
    Progress,
    Reject,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    StartReplica,
    Tick,
    WakeAt,
)
from sluice.core.fleet import Fleet
from sluice.core.lifecycle import ReplicaState
from sluice.core.pools import PoolView
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.runtime.generation import (
    Call,
    ChoiceEnded,
    Finish,
    Finished,
    ModelCard,
    Readiness,
    ReplicaStatus,
)
from sluice.runtime.messages import (
    Cancel,
    ChoiceDone,
    DrainDone,
    FromReplica,
    Load,
    LoadFailed,
    Ready,
    RequestEnded,
    Submit,
    Text,
)
from sluice.runtime.refusals import refusal_error
from sluice.runtime.streams import PieceStream

Launch = Callable[[str, "LocalGateway"], ReplicaProcess]

_CLIENT_LEFT = "the client left"
# After a drain's grace period its calls are ended; replicas may take this long to say so.
_ENDINGS_S_MAX = 1.0
_WHOLE = (EndReason.STOP, EndReason.LENGTH)


@dataclass(slots=True)
class _Live:
    """A call between its arrival and its one ending."""

    submit: Submit
    stream: PieceStream
    tools: ToolCalls | None
    admitted_ns: int
    replica: str = ""
    tokens: int = 0
    cancelled: bool = False

    @property
    def request(self) -> Request:
        return self.submit.request

    def waited(self, phases: PhaseTimes) -> PhaseTimes:
        """The phases with the wait for a replica, which takes it for admission, as queueing."""
        admission_ns = min(phases.admission_ns, self.admitted_ns - self.request.arrived_ns)
        queue_ns = phases.queue_ns + phases.admission_ns - admission_ns
        return replace(phases, admission_ns=admission_ns, queue_ns=queue_ns)


class LocalGateway:
    """Serves calls with replica processes on this machine.

    ``replicas`` maps replica ids to their model. ``clock`` gives monotonic nanoseconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, ServedModel],
        replicas: Mapping[str, str],
        launch: Launch,
        observer: Observer,
        clock: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._models = dict(models)
        self._model_of = dict(replicas)
        self._observer = observer
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._serial = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._load_errors: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._draining = False
        self._processes = {replica_id: launch(replica_id, self) for replica_id in replicas}

    # ------------------------------------------------------------------------------------ server

    async def generate(self, call: Call) -> PieceStream:
        """Admit a call; see ``server.ports.Gateway``."""
        try:
            served = self._served(call.model)
            submit = await served.submit(call)
        except RequestError as error:
            self.refused(call.model, error.code)
            raise
        if submit.request.id in self._live:
            unique = f"{submit.request.id}~{next(self._serial)}"
            submit = Submit(
                replace(submit.request, id=unique), submit.sampling, submit.rules, submit.grammar
            )
        request = submit.request
        stream = PieceStream(call.model, lambda: self._cancel(request.id))
        self._live[request.id] = _Live(submit, stream, served.tool_calls(call), self._clock())
        self._observer.arrived(call, request)
        self._handle(Arrived(call.model, request))
        stream.raise_refusal()
        return stream

    def _served(self, model: str) -> ServedModel:
        served = self._models.get(model)
        if served is None:
            names = ", ".join(sorted(self._models))
            raise ModelNotFound(
                f"The model '{model}' does not exist here; available: {names}.", param="model"
            )
        return served

    def models(self) -> Sequence[ModelCard]:
        """The models that clients can ask for."""
        return [served.card for served in self._models.values()]

    def readiness(self) -> Readiness:
        """Whether calls are admitted and every model has a replica that serves."""
        pools = self.pools()
        statuses = tuple(
            ReplicaStatus(replica.id, replica.model, replica.state, replica.error)
            for pool in pools
            for replica in pool.replicas
        )
        waiting = [_why_not(pool, self._clock()) for pool in pools if not _serves(pool)]
        reason = "the server is draining" if self._draining else "; ".join(waiting)
        return Readiness(not reason, reason, statuses)

    def pools(self) -> Sequence[PoolView]:
        """The models and replicas as the fleet sees them at this moment."""
        return self._fleet.pools(self._clock())

    def metrics(self) -> tuple[bytes, str]:
        """Prometheus exposition of all metrics, and its content type."""
        return self._observer.exposition(self.pools())

    def refused(self, model: str, code: str) -> None:
        """Count a request that the server refused before it became a call."""
        self._observer.refused_early(model if model in self._models else None, code)

    # ---------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Start the replicas and wait until each model can be served.

        Raises ``ModelLoadError`` where a model cannot be loaded; the processes are stopped then.
        """
        self._handle(Tick())
        while not self.readiness().ready:
            await self._changed.wait()
            self._changed.clear()
            errors = [*self._load_errors.values(), *self._crash_loops()]
            if errors:
                await self.close()
                raise ModelLoadError("; ".join(errors))

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more and wait until every call has ended, at most about ``grace_s``."""
        self._draining = True
        self._handle(FleetDraining(self._clock() + int(grace_s * 1e9)))
        # The fleet ends calls at the deadline; a cancelled call, which it has forgotten, may be
        # held by a replica that hangs.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + _ENDINGS_S_MAX):
                while self._live:
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self) -> None:
        """Stop the processes. Calls that still live end with ``SHUTDOWN``."""
        self._draining = True
        self._handle(FleetDraining(self._clock()))
        self._handle(Tick())
        for request_id in list(self._live):  # cancelled, and not yet told to be over
            self._finish_here(request_id, EndReason.CANCELLED, _CLIENT_LEFT)
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        self._observer.close()

    def _crash_loops(self) -> list[str]:
        return [
            f"{replica.id} cannot be started: {replica.error}"
            for pool in self.pools()
            for replica in pool.replicas
            if replica.state is ReplicaState.CRASH_LOOP
        ]

    # ---------------------------------------------------------------------------------- replicas

    def busy(self, replica_id: str) -> bool:
        """Whether the replica holds work, so that silence is a fault."""
        return any(live.replica == replica_id for live in self._live.values())

    def received(self, replica_id: str, messages: Sequence[FromReplica]) -> None:
        """Messages came from the replica."""
        for message in messages:
            match message:
                case Text():
                    self._deliver(message)
                case ChoiceDone():
                    self._end_choice(message)
                case RequestEnded():
                    self._ended(message)
                case Load():
                    self._handle(ReplicaReported(replica_id, message.report))
                    self._observer.reported(replica_id, self._model_of[replica_id], message.report)
                case Ready():
                    self._load_errors.pop(replica_id, None)
                    model = self._model_of[replica_id]
                    self._observer.ready(replica_id, model, message.limits)
                    self._models[model].limits = message.limits
                    self._handle(ReplicaReady(replica_id, model, message.limits))
                    self._changed.set()
                case LoadFailed():
                    self._load_errors[replica_id] = message.error
                case DrainDone():
                    pass
                case _:
                    assert_never(message)

    def lost(self, replica_id: str, error: str) -> None:
        """The process of the replica is gone."""
        error = self._load_errors.get(replica_id, error)
        self._observer.lost(replica_id, self._model_of[replica_id], error)
        for live in [x for x in self._live.values() if x.replica == replica_id]:
            live.replica = ""
            if live.cancelled:
                # The fleet has forgotten it, and the replica will not report its ending.
                self._finish_here(live.request.id, EndReason.CANCELLED, _CLIENT_LEFT)
        self._handle(ReplicaLost(replica_id, error))
        self._changed.set()

    # ------------------------------------------------------------------------------------- calls

    def _cancel(self, request_id: str) -> None:
        """The client left: the fleet forgets the call, its replica drops it."""
        live = self._live.get(request_id)
        if live is None:
            return
        live.cancelled = True
        self._handle(Cancelled(request_id))
        if not live.replica:
            # Nothing will answer for a request that was never dispatched.
            self._finish_here(request_id, EndReason.CANCELLED, _CLIENT_LEFT)

    def _deliver(self, message: Text) -> None:
        live = self._live.get(message.request_id)
        if live is None:
            return
        delta = message.delta if live.tools is None else live.tools.read(message.delta)
        self._observer.text(live.request, delta)
        live.tokens += delta.tokens
        self._handle(Progress(message.request_id, max(1, delta.tokens)))
        live.stream.put(delta)

    def _end_choice(self, message: ChoiceDone) -> None:
        live = self._live.get(message.request_id)
        if live is None or message.reason not in _WHOLE:
            return
        finish: Finish = "length" if message.reason is EndReason.LENGTH else "stop"
        if live.tools is not None:
            rest, called = live.tools.finish(message.choice)
            if rest is not None:
                live.stream.put(rest)
            if called and finish == "stop":
                finish = "tool_calls"
        live.stream.put(ChoiceEnded(message.choice, finish))

    def _ended(self, message: RequestEnded) -> None:
        self._handle(Ended(message.request_id, message.reason, message.usage, message.phases))
        live = self._live.pop(message.request_id, None)
        if live is None:
            return
        self._finish(live, structs.replace(message, phases=live.waited(message.phases)))

    def _finish_here(self, request_id: str, reason: EndReason, error: str) -> None:
        """End a call whose replica will not report its ending."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        request = live.request
        # The prompt of a call that never reached a replica was not processed.
        prompt_tokens = len(request.prompt) if live.stream.replica else 0
        usage = Usage(prompt_tokens, 0, live.tokens)
        admission_ns = live.admitted_ns - request.arrived_ns
        rest_ns = self._clock() - live.admitted_ns
        queue_ns, decode_ns = (0, rest_ns) if live.tokens else (rest_ns, 0)
        phases = PhaseTimes(admission_ns=admission_ns, queue_ns=queue_ns, decode_ns=decode_ns)
        self._finish(live, RequestEnded(request_id, reason, usage, phases, 0, error))

    def _finish(self, live: _Live, ended: RequestEnded) -> None:
        self._observer.ended(live.request, ended)
        live.stream.put(Finished(ended.reason, ended.usage, ended.phases, ended.error))
        self._changed.set()

    # ------------------------------------------------------------------------------------- fleet

    def _handle(self, event: FleetEvent) -> None:
        for effect in self._fleet.handle(event, self._clock()):
            self._perform(effect)

    def _perform(self, effect: FleetEffect) -> None:
        match effect:
            case Dispatch():
                self._dispatch(effect)
            case Reject():
                self._reject(effect)
            case Abort():
                self._processes[effect.replica_id].send(Cancel(effect.request_id))
            case Fail():
                self._finish_here(effect.request_id, effect.reason, effect.error)
            case StartReplica():
                self._processes[effect.replica_id].start()
            case WakeAt():
                self._wake_at(effect.at_ns)
            case _:
                assert_never(effect)

    def _dispatch(self, effect: Dispatch) -> None:
        live = self._live[effect.request_id]
        live.replica = effect.replica_id
        live.stream.dispatched(effect.replica_id)
        self._observer.dispatched(effect)
        self._processes[effect.replica_id].send(live.submit)

    def _reject(self, effect: Reject) -> None:
        live = self._live.pop(effect.request_id)
        self._observer.rejected(live.request, effect)
        live.stream.refuse(refusal_error(effect, live.request, live.stream.model))
        self._changed.set()

    def _wake_at(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, at_ns - self._clock()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, Tick())


def _serves(pool: PoolView) -> bool:
    return any(replica.state is ReplicaState.READY for replica in pool.replicas)


def _why_not(pool: PoolView, now_ns: int) -> str:
    """Why no replica of the model serves, in words."""
    states = []
    for replica in pool.replicas:
        words = f"{replica.id} is {replica.state}"
        if replica.error:
            words += f" ({replica.error})"
        if replica.start_ns is not None:
            words += f", starts again in {max(0, replica.start_ns - now_ns) / 1e9:.0f} s"
        states.append(words)
    return f"no replica serves {pool.model}: {', '.join(states)}"
