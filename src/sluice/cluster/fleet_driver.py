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

from sluice.cluster.calls import AnyModel, LiveCalls
from sluice.cluster.forward import Forward, understood
from sluice.cluster.members import Launch, Members
from sluice.cluster.observer import Observer
from sluice.cluster.readiness import is_whole, readiness, rests, serves, start_failures
from sluice.cluster.relay import Attempt, Relay
from sluice.cluster.remote import RemoteReplica
from sluice.cluster.remote_model import RemoteModel
from sluice.cluster.upstream_errors import outcome_of, rest_ns_of
from sluice.core.errors import InternalError, ModelLoadError, Overloaded, RequestError
from sluice.core.events import (
    Abort,
    Arrived,
    AttemptFailed,
    Dispatch,
    DrainReplica,
    Ended,
    Fail,
    FleetDraining,
    FleetEffect,
    FleetEvent,
    Outcome,
    Progress,
    QuotaTold,
    Reconfigured,
    Reject,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    ReplicasPinned,
    Retarget,
    Scaled,
    Shorten,
    StartReplica,
    StopReplica,
    Tick,
    WakeAt,
    WarmReplica,
)
from sluice.core.fleet import Fleet
from sluice.core.model_routes import Choice, Question, RouteView
from sluice.core.path_budget import Predicted
from sluice.core.pool_view import PoolView
from sluice.core.quota import QuotaLeft
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.core.tenants import Allowance
from sluice.executors.stream import Gauges, UpstreamError
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


# After a drain's grace period its calls are ended; replicas may take this long to say so.
_ENDINGS_S_MAX = 1.0


class FleetDriver:
    """Drives a fleet whose replicas are processes on this machine or engines elsewhere.

    ``models`` are told the limits of their replicas. ``replicas`` maps replica ids to their model.
    ``clock`` gives monotonic nanoseconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, AnyModel],
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
        self._gone_out: list[Progress] = []
        self._members = Members(self)
        self._members.know(replicas, launch)

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
            if reject.status == 503:
                self._handle(Tick())  # it asked for a replica, which may have to be started
            self._observer.turned_away(call, least, reject)
            raise overload_error(reject, call.choices, call.model)

    def admit(self, call: Call, submit: Submit | Forward) -> PieceStream:
        """Hand a call to the fleet. Raises what its refusal is towards the client."""
        stream = self._calls.add(call, submit, self._models[call.model], self._cancel)
        self._handle(Arrived(call.model, submit.request))
        stream.raise_refusal()
        return stream

    def left_early(self, call: Call, least: Request, retrieval_ns: int = 0) -> None:
        """The client left while the call was made ready; see ``LiveCalls.left_early``."""
        self._calls.left_early(call, least, retrieval_ns)

    def choose(self, question: Question) -> Choice:
        """The model for a request that names a route."""
        return self._fleet.choose(question, self._clock())

    def route_view(self, route: str) -> RouteView:
        """A route as it stands."""
        return self._fleet.routes[route].view()

    def allowance(self, tenant: str) -> Allowance | None:
        """What a tenant may still use, ``None`` where it has no limit per minute."""
        return self._fleet.allowance(tenant, self._clock())

    def _cancel(self, request_id: str) -> None:
        """The client left: the fleet forgets the call, its replica drops it."""
        cancelled = self._calls.cancelled(request_id)
        if cancelled is not None:
            self._tell_untold(request_id)
            self._handle(cancelled)
            self._calls.end_if_left(request_id)

    def drain_replica(self, replica_id: str, *, on: bool) -> None:
        """Give a replica nothing more, or use it again. Raises ``KeyError`` for an unknown id."""
        self._handle(ReplicaDraining(replica_id, on))

    def pin_replicas(self, model: str, number: int | None) -> None:
        """Let so many replicas of a model serve, or leave it to the load again (``None``)."""
        self._handle(ReplicasPinned(model, number))

    def reconfigure(self, limits: Reconfigured, launch: Launch) -> None:
        """Hold to other limits; ``launch`` makes the replicas that are new among them."""
        for pool in limits.pools:
            self._model_of |= dict.fromkeys(pool.replica_ids, pool.model)
            self._members.know(pool.replica_ids, launch)
        self._handle(limits)

    def predicted(self, model: str, request: Request | None = None) -> Predicted:
        """What the next call for a model, which may be this one, is predicted to take."""
        return self._fleet.predicted(model, self._clock(), request)

    def pools(self) -> Sequence[PoolView]:
        """The models and replicas as the fleet sees them at this moment."""
        return self._fleet.pools(self._clock())

    def readiness(self) -> Readiness:
        """Whether calls are admitted and every model has a replica that serves."""
        remote = frozenset(name for name in self._models if self._is_remote(name))
        return readiness(self.pools(), self._clock(), remote, draining=self._fleet.draining)

    def _is_remote(self, model: str) -> bool:
        return isinstance(self._models[model], RemoteModel)

    # ---------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Start the replicas and wait until each model that batches here can be served.

        One that may be without replicas can be: a request starts one.

        Of remote ones it is waited for what a first look finds. Raises ``ModelLoadError`` where a
        model cannot be loaded; the processes are stopped then.
        """
        self._handle(Tick())
        while not self._is_started():
            await self._changed.wait()
            self._changed.clear()
            failed = {one: failure.error for one, failure in self._load_failures.items()}
            errors = start_failures(self.pools(), failed)
            if errors:
                await self.close()
                raise ModelLoadError("; ".join(errors))

    def _is_started(self) -> bool:
        local = [pool for pool in self.pools() if not self._is_remote(pool.model)]
        return all(serves(pool) or rests(pool) for pool in local) and not any(
            isinstance(member, RemoteReplica) and member.is_awaited
            for member in self._members.values()
        )

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
        await self._members.close()

    # ---------------------------------------------------------------------------------- replicas

    def busy(self, replica_id: str) -> bool:
        """Whether the replica holds work, so that silence is a fault."""
        return bool(self._calls.on_replica(replica_id))

    def received(self, replica_id: str, messages: Sequence[FromReplica]) -> None:
        """Messages came from the replica; one that has left is not heard any more."""
        if replica_id not in self._members:
            return
        for message in messages:
            match message:
                case Text():
                    tokens = max(1, message.delta.tokens)
                    self._handle(Progress(message.request_id, tokens))
                    self._calls.deliver(message)
                case ChoiceDone():
                    self._calls.end_choice(message)
                case RequestEnded():
                    self._handle(_ended(message))
                    self._calls.ended(message)
                case Load():
                    self._handle(ReplicaReported(replica_id, message.report))
                    self._observer.reported(replica_id, self._model_of[replica_id], message.report)
                case Ready():
                    model = self._model_of[replica_id]
                    if self._is_remote(model):
                        self._observer.ready(replica_id, model, message.limits)
                    else:
                        self._observer.loaded(replica_id, model, message)
                    self._handle(ReplicaReady(replica_id, message.limits))
                    self._note_limits(model)
                    self._changed.set()
                case LoadFailed():
                    self._load_failures[replica_id] = message
                case DrainDone():
                    pass
                case _:
                    assert_never(message)

    def _note_limits(self, model: str) -> None:
        """Tell a model what its widest replica holds: a long request goes there."""
        (pool,) = [pool for pool in self.pools() if pool.model == model]
        self._models[model].limits = pool.limits

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

    def passed(self, request_id: str, tokens: int) -> None:
        """A remote replica's output goes out to its client; when it is gone the fleet is told."""
        told = self._calls.passed(request_id, tokens)
        if told:
            if not self._gone_out:
                asyncio.get_running_loop().call_soon(self._tell_gone_out)
            self._gone_out.append(Progress(request_id, told))

    def _tell_gone_out(self) -> None:
        """Tell the fleet of output, at the latest before anything that happened after it."""
        gone_out, self._gone_out = self._gone_out, []
        for progress in gone_out:
            self._handle(progress)

    def _tell_untold(self, request_id: str) -> None:
        """Tell the fleet what was kept back, before the call is over without a word on usage."""
        told = self._calls.untold(request_id)
        if told:
            self._handle(Progress(request_id, told))

    @property
    def records_text(self) -> bool:
        """Whether the journal holds what engines answer."""
        return self._observer.records_text

    def recorded(self, request_id: str, raw: bytes) -> None:
        """What a remote replica answers, for the journal."""
        self._calls.recorded(request_id, raw)

    def failed(self, replica_id: str, attempt: Attempt, error: UpstreamError) -> None:
        """A remote replica gave no whole answer to a call; the fleet may let another one try."""
        request_id, outcome = attempt.request_id, outcome_of(error)
        if request_id not in self._calls:
            return  # it was ended in the meantime, by its deadline for one
        self._observer.attempt_failed(request_id, replica_id, outcome, error.summary)
        self._calls.attempt_failed(request_id)
        if outcome is Outcome.VOID:
            self._handle(Ended(request_id, EndReason.FAILED, Usage(0, 0, 0), PhaseTimes()))
            self._calls.end_here(request_id, EndReason.FAILED, error.summary, Fault.REQUEST)
            return
        self._tell_untold(request_id)
        self._handle(AttemptFailed(request_id, outcome, error.summary, rest_ns_of(error)))
        self._calls.end_if_left(request_id)

    def told(self, replica_id: str, request_id: str, left: QuotaLeft) -> None:
        """The answer of a remote replica says what its vendor still allows."""
        self._handle(QuotaTold(replica_id, request_id, left))

    def parted(self, replica_id: str, error: str) -> None:
        """A remote replica does not answer its probes."""
        if replica_id not in self._members:
            return
        self._observer.lost(replica_id, self._model_of[replica_id], error)
        self._handle(ReplicaLost(replica_id, error, keeps_board=True))

    def probed(self, replica_id: str) -> None:  # noqa: ARG002
        """A remote replica was looked at."""
        self._changed.set()

    def sampled(self, replica_id: str, gauges: Gauges) -> None:
        """A remote replica told its load, for the journal."""
        if replica_id in self._members:
            self._observer.sampled(replica_id, self._model_of[replica_id], gauges)

    # ------------------------------------------------------------------------------------- fleet

    def _handle(self, event: FleetEvent) -> None:
        if self._gone_out:
            self._tell_gone_out()
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
            self._send(effect.replica_id, self._calls.dispatched(effect))
        except Exception:  # noqa: BLE001 - boundary of one request: others go on
            _log.exception("request %s could not be sent", effect.request_id)
            self._unsent.append(effect.request_id)

    def _send(self, replica_id: str, message: Submit | Relay) -> None:
        """A call of a model goes to replicas of that model's kind."""
        member = self._members[replica_id]
        if isinstance(member, RemoteReplica):
            if isinstance(message, Relay):
                return member.send(message)
        elif isinstance(message, Submit):
            return member.send(message)
        raise InternalError(f"{replica_id} cannot take a {type(message).__name__}")

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
                self._members[effect.replica_id].send(Cancel(effect.request_id))
            case Fail():
                self._calls.end_here(effect.request_id, effect.reason, effect.error)
            case StartReplica():
                self._load_failures.pop(effect.replica_id, None)
                self._observer.asked_for(effect.replica_id)
                self._members.start(effect.replica_id)
            case WarmReplica():
                self._load_failures.pop(effect.replica_id, None)
                self._observer.asked_for(effect.replica_id)
                self._members.warm(effect.replica_id)
            case StopReplica():
                self._observer.starts.over(effect.replica_id)
                self._calls.replica_lost(effect.replica_id)
                self._members.stop(effect.replica_id)
            case Scaled() | DrainReplica():
                self._observer.scaled(effect)
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
                if not self._is_remote(effect.model):
                    call = await understood(call)
                submit = await served.submit(call)
            except (RequestError, Overloaded):
                arrived = self._calls.stay_at_larger(effect)
            else:
                arrived = self._calls.arrive_at_smaller(effect, call, submit, served)
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


def _ended(message: RequestEnded) -> Ended:
    return Ended(
        message.request_id, message.reason, message.usage, message.phases, silent=message.silent
    )
