"""The calls that are being served: from arrival to their one ending, with text on the way.

The table belongs to the gateway, which tells it what the fleet decided and what replicas said. Each
way out of the table (``ended``, ``end_here``, ``refuse``) gives the call's stream its last word and
tells the observer. Nothing is decided here about capacity or replicas.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from sluice.cluster.forward import Forward
from sluice.cluster.observer import Observer
from sluice.cluster.relay import Relay
from sluice.cluster.remote_model import RemoteModel
from sluice.cluster.served import ServedModel, ToolCalls
from sluice.core.errors import InternalError
from sluice.core.events import Arrived, Cancelled, Dispatch, Reject, Retarget, Shorten
from sluice.core.request import COMPLETE, EndReason, PhaseTimes, Request, Rung, Usage
from sluice.runtime.generation import Call, ChoiceEnded, Fault, Finish, Finished
from sluice.runtime.messages import ChoiceDone, RequestEnded, Submit, Text
from sluice.runtime.refusals import refusal_error
from sluice.runtime.streams import PieceStream

# A model whose replicas batch here, or one that remote engines serve.
AnyModel = ServedModel | RemoteModel

_CLIENT_LEFT = "the client left"
# Tokens of a remote engine that are told to the fleet together, after the first.
_TOLD_TOGETHER = 8


@dataclass(slots=True)
class _Live:
    """A call between its arrival and its one ending."""

    call: Call
    submit: Submit | Forward
    stream: PieceStream
    tools: ToolCalls | None
    admitted_ns: int
    replica: str = ""
    tokens: int = 0
    cancelled: bool = False
    untold: int = 0
    relay: Relay | None = None

    @property
    def request(self) -> Request:
        return self.submit.request

    @property
    def retrieval_ns(self) -> int:
        """Of the time before admission, that for retrieval."""
        retrieval = self.call.retrieval
        return 0 if retrieval is None else retrieval.duration_ns

    def change(self, **fields: Any) -> None:
        """Change what is asked of the replica, before it is sent to one."""
        request = replace(self.submit.request, **fields)
        self.submit = structs.replace(self.submit, request=request)

    def waited(self, phases: PhaseTimes) -> PhaseTimes:
        """The phases with the wait for a replica, which takes it for admission, as queueing."""
        before_ns = min(phases.admission_ns, self.admitted_ns - self.request.arrived_ns)
        queue_ns = phases.queue_ns + phases.admission_ns - before_ns
        retrieval_ns = self.retrieval_ns
        return PhaseTimes(
            retrieval_ns=retrieval_ns,
            admission_ns=before_ns - retrieval_ns,
            queue_ns=queue_ns,
            prefill_ns=phases.prefill_ns,
            decode_ns=phases.decode_ns,
            preempted_ns=phases.preempted_ns,
        )


class LiveCalls:
    """The table of calls. ``on_gone`` is called after each way out of it."""

    def __init__(
        self, observer: Observer, clock: Callable[[], int], on_gone: Callable[[], None]
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._on_gone = on_gone
        self._live: dict[str, _Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def add(
        self,
        call: Call,
        submit: Submit | Forward,
        served: AnyModel,
        on_cancel: Callable[[str], None],
    ) -> PieceStream:
        """Take a call in. ``on_cancel`` gets its id when the reader of its stream gives up."""
        request = submit.request
        if request.id in self._live:
            raise InternalError(f"the request id {request.id} is in use")
        leave = partial(on_cancel, request.id)
        stream = PieceStream(call.model, request.slo_class, leave, call.retrieval)
        tools = served.tool_calls(call)
        self._live[request.id] = _Live(call, submit, stream, tools, self._clock())
        self._observer.arrived(call, request, served.text_of)
        return stream

    def left_early(self, call: Call, least: Request, retrieval_ns: int) -> None:
        """The client left before the call was admitted; ``least`` is all that is known of it.

        Retrieving took ``retrieval_ns``, where it is not over.
        """
        self._observer.arrived(call, least, lambda _: "")
        if call.retrieval is not None:
            retrieval_ns = call.retrieval.duration_ns
        admission_ns = self._clock() - call.arrived_ns - retrieval_ns
        phases, nothing = PhaseTimes(retrieval_ns, admission_ns), Usage(0, 0, 0)
        ended = RequestEnded(call.id, EndReason.CANCELLED, nothing, phases, 0, _CLIENT_LEFT)
        self._observer.ended(least, ended)

    # ------------------------------------------------------------------------------- on the way

    def dispatched(self, effect: Dispatch) -> Submit | Relay:
        """The call goes to a replica; what that replica is to be sent."""
        live = self._live[effect.request_id]
        live.replica = effect.replica_id
        self._observer.dispatched(effect, remote=isinstance(live.submit, Forward))
        if isinstance(live.submit, Submit):
            live.stream.dispatched(effect.replica_id)
            return live.submit
        if live.relay is None:
            live.relay = Relay(live.stream, live.submit)
        live.relay.forward, live.relay.number = live.submit, effect.attempt
        live.stream.dispatched(effect.replica_id, live.relay)
        return live.relay

    def shortened(self, effect: Shorten) -> None:
        """The answer is limited to fewer tokens than were asked for; told again, it is one rung."""
        live = self._live[effect.request_id]
        degraded = tuple(dict.fromkeys((*live.request.degraded, Rung.SHORTEN)))
        if degraded != live.request.degraded:
            self._observer.shortened(effect)
        live.change(output_tokens_max=effect.output_tokens_max, degraded=degraded)
        live.stream.shortened(effect.output_tokens_max)

    def call_for_smaller(self, effect: Retarget) -> Call:
        """The call as it would be for the smaller model, to be read and tokenised."""
        return replace(self._live[effect.request_id].call, model=effect.model)

    def arrive_at_smaller(
        self, effect: Retarget, call: Call, submit: Submit | Forward, served: AnyModel
    ) -> Arrived | None:
        """The call goes to the smaller model, if that can hold it; ``None`` where it is over.

        ``call`` is as that model reads it. What was agreed for it stays: its class, its times and
        the limit of its output.
        """
        live = self._live.get(effect.request_id)
        if live is None:
            return None
        asked = submit.request
        output_tokens_max = min(live.request.output_tokens_max, asked.output_tokens_max)
        if not served.holds(asked.prompt_tokens + output_tokens_max):
            return self.stay_at_larger(effect)
        request = replace(
            live.request,
            prompt=asked.prompt,
            prompt_estimate=asked.prompt_estimate,
            prefixes=asked.prefixes,
            choices=asked.choices,
            output_tokens_max=output_tokens_max,
            degraded=(*live.request.degraded, effect.rung),
        )
        live.submit = structs.replace(submit, request=request)
        live.tools = served.tool_calls(call)
        live.stream.retargeted(effect.model, effect.rung)
        whole = isinstance(submit, Forward) and not submit.raw.streamed
        self._observer.retargeted(effect, whole=whole)
        return Arrived(effect.model, request)

    def stay_at_larger(self, effect: Retarget) -> Arrived | None:
        """The other model cannot take the call: its own decides about the other rungs."""
        live = self._live.get(effect.request_id)
        if live is None:
            return None
        live.change(degraded=(*live.request.degraded, effect.rung))
        return Arrived(live.call.model, live.request)

    def deliver(self, message: Text) -> None:
        """Hand text to the call's stream; text for a call that is over is dropped."""
        live = self._live.get(message.request_id)
        if live is None:
            return
        delta = message.delta if live.tools is None else live.tools.read(message.delta)
        self._observer.text(live.request, message.delta)
        live.tokens += delta.tokens
        live.stream.put(delta)

    def passed(self, request_id: str, tokens: int) -> int:
        """Output of a remote engine goes out; its text is not looked at.

        Returns the tokens that the fleet is to be told of, a few at a time.
        """
        live = self._live.get(request_id)
        if live is None:
            return 0
        self._observer.tokens(live.request, tokens)
        live.untold += tokens
        told = live.untold if not live.tokens or live.untold >= _TOLD_TOGETHER else 0
        live.tokens += tokens
        live.untold -= told
        return told

    def untold(self, request_id: str) -> int:
        """The tokens of a call that were not told yet, because more were to come."""
        live = self._live.get(request_id)
        if live is None:
            return 0
        told, live.untold = live.untold, 0
        return told

    def recorded(self, request_id: str, raw: bytes) -> None:
        """What a remote engine answers, for a journal that holds texts."""
        live = self._live.get(request_id)
        if live is not None:
            self._observer.recorded(live.request, raw)

    def end_choice(self, message: ChoiceDone) -> None:
        """One choice is whole."""
        live = self._live.get(message.request_id)
        if live is None or message.reason not in COMPLETE:
            return
        finish: Finish = "length" if message.reason is EndReason.LENGTH else "stop"
        if live.tools is not None:
            rest, called = live.tools.finish(message.choice)
            if rest is not None:
                live.stream.put(rest)
            if called and finish == "stop":
                finish = "tool_calls"
        live.stream.put(ChoiceEnded(message.choice, finish))

    def cancelled(self, request_id: str) -> Cancelled | None:
        """Note that the client left; what the fleet is to be told, ``None`` where it is over."""
        live = self._live.get(request_id)
        if live is None:
            return None
        live.cancelled = True
        return Cancelled(request_id, withdrawn=live.stream.withdrawn)

    # ---------------------------------------------------------------------------------- replicas

    def on_replica(self, replica_id: str) -> list[str]:
        """Ids of the calls that the replica holds."""
        return [key for key, live in self._live.items() if live.replica == replica_id]

    def attempt_failed(self, request_id: str) -> None:
        """The call's replica holds nothing of it any more, and will not report an ending."""
        self._live[request_id].replica = ""

    def replica_lost(self, replica_id: str) -> None:
        """The replica holds nothing any more, and will not report an ending."""
        for request_id in self.on_replica(replica_id):
            self._live[request_id].replica = ""
            self.end_if_left(request_id)

    # ----------------------------------------------------------------------------------- the end

    def ended(self, message: RequestEnded) -> None:
        """The call's replica ended it."""
        live = self._live.pop(message.request_id, None)
        if live is not None:
            self._finish(live, structs.replace(message, phases=live.waited(message.phases)))

    def end_here(
        self, request_id: str, reason: EndReason, error: str, fault: Fault = Fault.REPLICA
    ) -> None:
        """End a call whose replica will not report its ending; ``fault`` is that of a failure."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        request = live.request
        # A prompt was not processed that never reached a replica, or of which a remote one made
        # nothing.
        was_computed = live.tokens if live.relay else live.stream.replica
        prompt_tokens = request.prompt_tokens if was_computed else 0
        usage = Usage(prompt_tokens, 0, live.tokens)
        retrieval_ns = live.retrieval_ns
        admission_ns = live.admitted_ns - request.arrived_ns - retrieval_ns
        rest_ns = self._clock() - live.admitted_ns
        queue_ns, decode_ns = (0, rest_ns) if live.tokens else (rest_ns, 0)
        phases = PhaseTimes(retrieval_ns, admission_ns, queue_ns, decode_ns=decode_ns)
        put_down_to = fault if reason is EndReason.FAILED else None
        self._finish(live, RequestEnded(request_id, reason, usage, phases, 0, error, put_down_to))

    def end_if_left(self, request_id: str) -> None:
        """End a call whose client left and that no replica holds: the fleet has forgotten it."""
        live = self._live.get(request_id)
        if live is not None and live.cancelled and not live.replica:
            self.end_here(request_id, EndReason.CANCELLED, _CLIENT_LEFT)

    def end_all(self) -> None:
        """End the calls that the fleet has forgotten, whose replicas are about to be stopped."""
        for request_id in list(self._live):
            self.end_here(request_id, EndReason.CANCELLED, _CLIENT_LEFT)

    def refuse(self, effect: Reject) -> None:
        """Admission refused the call, at once or after a wait."""
        live = self._live.pop(effect.request_id)
        self._observer.rejected(live.request, effect)
        live.stream.refuse(refusal_error(effect, live.request, live.stream.model))
        self._on_gone()

    def _finish(self, live: _Live, ended: RequestEnded) -> None:
        self._observer.ended(live.request, ended)
        finished = Finished(ended.reason, ended.usage, ended.phases, ended.error, ended.fault)
        live.stream.put(finished)
        self._on_gone()
