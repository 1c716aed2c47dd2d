"""The live driver of the fleet: calls and replicas' messages in, effects performed.

It turns calls, messages of replicas and timers into events, hands them to ``Fleet.handle`` and
performs the effects. Which call is admitted, where it runs and when a process is started again is
decided there. The calls themselves are kept in ``calls``.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from sluice.cluster.calls import LiveCalls
from sluice.cluster.local import ReplicaListener, ReplicaProcess
from sluice.cluster.observer import Observer
from sluice.cluster.readiness import crash_loops, is_whole, readiness
from sluice.cluster.served import ServedModel
from sluice.core.errors import ModelLoadError, Overloaded, RequestError
from sluice.core.events import (
    Abort,
    Arrived,
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
    Retarget,
    Shorten,
    StartReplica,
    Tick,
    WakeAt,
)
from sluice.core.fleet import Fleet
from sluice.core.pools import PoolView
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.core.tenants import Allowance
from sluice.runtime.generation import Call, Fault, Readiness
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
from sluice.runtime.refusals import overload_error, too_many_prompts
from sluice.runtime.streams import PieceStream

_log = logging.getLogger(__name__)

Launch = Callable[[str, ReplicaListener], ReplicaProcess]

# After a drain's grace period its calls are ended; replicas may take this long to say so.
_ENDINGS_S_MAX = 1.0


class FleetDriver:
    """Drives a fleet whose replicas are processes on this machine.

    ``models`` are told the limits of their replicas. ``replicas`` maps replica ids to their model.
    ``clock`` gives monotonic nanoseconds.
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
        self._models = models
        self._model_of = dict(replicas)
        self._observer = observer
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._load_failures: dict[str, LoadFailed] = {}
        self._changed = asyncio.Event()
        self._calls = LiveCalls(observer, clock, self._changed.set)
        self._retargets: set[asyncio.Task[None]] = set()
        self._unsent: list[str] = []
        self._processes = {replica_id: launch(replica_id, self) for replica_id in replicas}

    # ------------------------------------------------------------------------------------- calls

    def check_together(self, calls: Sequence[Call]) -> None:
        """Check that the model has places for so many calls. Raises ``InvalidRequest``."""
        model, places = calls[0].model, sum(call.choices for call in calls)
        (pool,) = [pool for pool in self.pools() if pool.model == model]
        if places > pool.places_max and is_whole(pool):
            limit = f"they take {places} places, and {model} has {pool.places_max}"
            raise too_many_prompts(len(calls), limit)

    def refuse_before_work(self, call: Call, least: Request) -> None:
        """Spare the work of tokenising where the fleet would refuse whatever the prompt holds.

        ``least`` is all that is known without it. Raises ``Overloaded``.
        """
        reject = self._fleet.refusal_before(call.model, least, self._clock())
        if reject is not None:
            self._observer.turned_away(call, least, reject)
            raise overload_error(reject, call.choices, call.model)

    def admit(self, call: Call, submit: Submit) -> PieceStream:
        """Hand a call to the fleet. Raises what its refusal is towards the client."""
        stream = self._calls.add(call, submit, self._models[call.model], self._cancel)
        self._handle(Arrived(call.model, submit.request))
        stream.raise_refusal()
        return stream

    def allowance(self, tenant: str) -> Allowance | None:
        """What a tenant may still use, ``None`` where it has no limit per minute."""
        return self._fleet.allowance(tenant, self._clock())

    def _cancel(self, request_id: str) -> None:
        """The client left: the fleet forgets the call, its replica drops it."""
        cancelled = self._calls.cancelled(request_id)
        if cancelled is not None:
            self._handle(cancelled)
            self._calls.end_if_left(request_id)

    def pools(self) -> Sequence[PoolView]:
        """The models and replicas as the fleet sees them at this moment."""
        return self._fleet.pools(self._clock())

    def readiness(self) -> Readiness:
        """Whether calls are admitted and every model has a replica that serves."""
        return readiness(self.pools(), self._clock(), draining=self._fleet.draining)

    # ---------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Start the replicas and wait until each model can be served.

        Raises ``ModelLoadError`` where a model cannot be loaded; the processes are stopped then.
        """
        self._handle(Tick())
        while not self.readiness().ready:
            await self._changed.wait()
            self._changed.clear()
            failed = [failure.error for failure in self._load_failures.values()]
            errors = failed or crash_loops(self.pools())
            if errors:
                await self.close()
                raise ModelLoadError("; ".join(errors))

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more and wait until every call has ended, at most about ``grace_s``."""
        self._handle(FleetDraining(self._clock() + int(grace_s * 1e9)))
        # The fleet ends calls at the deadline; a cancelled call, which it has forgotten, may be
        # held by a replica that hangs.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + _ENDINGS_S_MAX):
                while self._calls:
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self) -> None:
        """Stop the processes. Calls that still live end with ``SHUTDOWN``."""
        self._handle(FleetDraining(self._clock()))
        self._handle(Tick())
        self._calls.end_all()
        for task in self._retargets:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    # ---------------------------------------------------------------------------------- replicas

    def busy(self, replica_id: str) -> bool:
        """Whether the replica holds work, so that silence is a fault."""
        return bool(self._calls.on_replica(replica_id))

    def received(self, replica_id: str, messages: Sequence[FromReplica]) -> None:
        """Messages came from the replica."""
        for message in messages:
            match message:
                case Text():
                    tokens = max(1, message.delta.tokens)
                    self._handle(Progress(message.request_id, tokens))
                    self._calls.deliver(message)
                case ChoiceDone():
                    self._calls.end_choice(message)
                case RequestEnded():
                    ended = Ended(message.request_id, message.reason, message.usage, message.phases)
                    self._handle(ended)
                    self._calls.ended(message)
                case Load():
                    self._handle(ReplicaReported(replica_id, message.report))
                    self._observer.reported(replica_id, self._model_of[replica_id], message.report)
                case Ready():
                    model = self._model_of[replica_id]
                    self._observer.ready(replica_id, model, message.limits)
                    self._models[model].limits = message.limits
                    self._handle(ReplicaReady(replica_id, message.limits))
                    self._changed.set()
                case LoadFailed():
                    self._load_failures[replica_id] = message
                case DrainDone():
                    pass
                case _:
                    assert_never(message)

    def lost(self, replica_id: str, error: str, *, silent: bool = False) -> None:
        """The process of the replica is gone."""
        failure = self._load_failures.get(replica_id)
        if failure is not None:
            error = failure.error
        self._observer.lost(replica_id, self._model_of[replica_id], error)
        self._calls.replica_lost(replica_id)
        permanent = failure is not None and failure.permanent
        self._handle(ReplicaLost(replica_id, error, permanent=permanent, silent=silent))
        self._changed.set()

    # ------------------------------------------------------------------------------------- fleet

    def _handle(self, event: FleetEvent) -> None:
        for effect in self._fleet.handle(event, self._clock()):
            self._perform(effect)
        while self._unsent:
            request_id = self._unsent.pop()
            reason = EndReason.FAILED
            ended = Ended(request_id, reason, Usage(0, 0, 0), PhaseTimes())
            self._handle(ended)
            error = "it could not be sent to its replica"
            self._calls.end_here(request_id, reason, error, Fault.ENGINE)

    def _dispatch(self, effect: Dispatch) -> None:
        """Send a call to its replica; one that cannot be sent is over when all effects are done.

        It would hold its places for ever: no replica knows of it.
        """
        try:
            self._processes[effect.replica_id].send(self._calls.dispatched(effect))
        except Exception:  # noqa: BLE001 - boundary of one request: others go on
            _log.exception("request %s could not be sent", effect.request_id)
            self._unsent.append(effect.request_id)

    def _perform(self, effect: FleetEffect) -> None:
        match effect:
            case Dispatch():
                self._dispatch(effect)
            case Reject():
                self._calls.refuse(effect)
            case Shorten():
                self._calls.shortened(effect)
            case Retarget():
                call = self._calls.call_for_smaller(effect)
                task = asyncio.get_running_loop().create_task(self._retarget(effect, call))
                self._retargets.add(task)
                task.add_done_callback(self._retargets.discard)
            case Abort():
                self._processes[effect.replica_id].send(Cancel(effect.request_id))
            case Fail():
                self._calls.end_here(effect.request_id, effect.reason, effect.error)
            case StartReplica():
                self._load_failures.pop(effect.replica_id, None)
                self._processes[effect.replica_id].start()
            case WakeAt():
                self._wake_at(effect.at_ns)
            case _:
                assert_never(effect)

    async def _retarget(self, effect: Retarget, call: Call) -> None:
        """Let a call that its model does not take arrive at the smaller one.

        The fleet knows nothing of it meanwhile. Its client may leave, and it may be ended with all
        others; it is ended here where neither model can be asked.
        """
        served, arrived, failed = self._models[effect.model], None, True
        try:
            try:
                submit = await served.submit(call)
            except (RequestError, Overloaded):
                arrived = self._calls.stay_at_larger(effect)
            else:
                arrived = self._calls.arrive_at_smaller(effect, submit, served)
            failed = False
        finally:
            if failed:
                error = f"it could not be given to {effect.model}"
                reason = EndReason.FAILED
                self._calls.end_here(effect.request_id, reason, error, Fault.ENGINE)
        if arrived is not None:
            self._handle(arrived)

    def _wake_at(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, at_ns - self._clock()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, Tick())
