"""Replicas that run elsewhere: one ``RemoteReplica`` is one engine behind an address.

It stands where ``placement.replica.PlacedReplica`` does: it is told to start, to take a call, to
drop one, and tells its listener what happens. It starts nothing; being started means to be probed
until it serves. Whether and where a call is tried again is the fleet's decision.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.cluster.forward import Forward, Wording, body_for
from sluice.cluster.relay import Attempt, Relay
from sluice.cluster.remote_model import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS_UNKNOWN,
    NOT_GENERATING,
    RemoteModel,
)
from sluice.cluster.rest import Rest
from sluice.core.events import ReplicaLimits, Report
from sluice.core.quota import QuotaLeft
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.executors.dialects import Dialect
from sluice.executors.lookout import Lookout
from sluice.executors.ratelimits import quota_left
from sluice.executors.stream import (
    Answer,
    Deadlines,
    EngineClient,
    EngineFacts,
    Gauges,
    Headers,
    Health,
    Lost,
    Probe,
    UpstreamError,
    UpstreamRequest,
    UsageEvents,
)
from sluice.runtime.generation import RawPrompt
from sluice.runtime.messages import Cancel, FromReplica, Load, Ready, RequestEnded
from sluice.telemetry.trace_context import headers_for

_log = logging.getLogger(__name__)

# One probe may fail for its own reasons.
_FAULTS_MAX = 2
# Between two looks at an engine that does not serve.
_PROBE_S_DOWN = 2.0
# For an engine that does not say how many sequences it runs.
IN_FLIGHT_UNKNOWN = 256


class RemoteListener(Protocol):
    """Who wants to know what becomes of a remote replica and of the calls that it was given."""

    def received(self, replica_id: str, messages: Sequence[FromReplica]) -> None:
        """It is ready, reports its load, or has ended a call."""
        ...

    @property
    def records_text(self) -> bool:
        """Whether it wants to see the bytes of answers."""
        ...

    def recorded(self, request_id: str, raw: bytes) -> None:
        """Bytes of an answer, for the record."""
        ...

    def passed(self, request_id: str, tokens: int) -> None:
        """Output of a call goes out to its client."""
        ...

    def failed(self, replica_id: str, attempt: Attempt, error: UpstreamError) -> None:
        """A call got no whole answer; this replica has nothing more to do with it."""
        ...

    def told(self, replica_id: str, request_id: str, left: QuotaLeft) -> None:
        """The answer to a call says what its vendor still allows."""
        ...

    def parted(self, replica_id: str, error: str) -> None:
        """It does not answer probes any more. Its calls go on as far as they can."""
        ...

    def probed(self, replica_id: str) -> None:
        """A probe is over, whatever it found."""
        ...

    def sampled(self, replica_id: str, gauges: Gauges) -> None:
        """An engine told its load."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteTerms:
    """What is asked of one engine, as configured; ``None`` for what it tells itself.

    ``model`` is its name for the model, ``probe_s`` the time between two looks at it. With
    ``sleep`` it frees its memory while it is warm and not needed.
    """

    dialect: Dialect
    name: str
    deadlines: Deadlines
    model: str | None = None
    context_tokens_max: int | None = None
    in_flight_max: int | None = None
    priority: bool = False
    probe_s: float = 1.0
    sleep: bool = False


class RemoteReplica:
    """One engine that runs elsewhere, over all the times that it comes and goes.

    ``clock`` gives monotonic nanoseconds.
    """

    def __init__(
        self,
        replica_id: str,
        engine: EngineClient,
        terms: RemoteTerms,
        model: RemoteModel,
        listener: RemoteListener,
        clock: Callable[[], int],
    ) -> None:
        self.replica_id = replica_id
        self._engine, self._terms, self._model = engine, terms, model
        self._listener, self._clock = listener, clock
        self._wording = Wording(terms.dialect, terms.model or terms.name, terms.priority)
        self._attempts: dict[str, Attempt] = {}
        self._lookout = Lookout(self._expire)
        self._watch: asyncio.Task[None] | None = None
        self._started_ns: int | None = None  # while it is asked for and does not serve
        self._serves = False
        self._faults = 0
        self._parted_ns = 0
        self._blocks = 0
        self._has_gauges = False  # since it serves
        self._rest = Rest(replica_id, engine) if terms.sleep else None
        self._wish = asyncio.Event()
        self.was_probed = False

    # ---------------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Probe it until it serves; what comes of it is told to the listener."""
        self._started_ns = self._clock()
        if self._rest is not None:
            self._rest.wanted = False
        if self._serves:
            self._wish.set()  # it is warm, and waited for
        if self._watch is None:
            loop = asyncio.get_running_loop()
            self._watch = loop.create_task(self._probe_always(), name=f"probes {self.replica_id}")

    def warm(self) -> None:
        """Look at it where that has not begun, and let it sleep where it can."""
        if self._watch is None:
            self.start()
        if self._rest is not None:
            self._rest.wanted = True
        self._wish.set()

    @property
    def is_awaited(self) -> bool:
        """Whether it is being looked at, and has not been yet."""
        return self._watch is not None and not self.was_probed

    async def stop(self) -> None:
        """Leave all calls and close all connections."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        self._lookout.stop()
        for request_id in list(self._attempts):
            self._end_unfinished(request_id, EndReason.CANCELLED, "")
        await self._engine.close()

    async def _probe_always(self) -> None:
        while True:
            await self._take(await self._engine.probe())
            self.was_probed = True
            self._listener.probed(self.replica_id)
            usual_s = self._terms.probe_s
            wait_s = usual_s if self._serves else min(usual_s, _PROBE_S_DOWN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wish.wait()
            self._wish.clear()

    async def _take(self, probe: Probe) -> None:
        if probe.health is Health.READY:
            self._faults = 0
            if self._rest is not None and not self._attempts:
                await self._rest.settle()
            if self._started_ns is not None and (self._rest is None or self._rest.is_settled):
                await self._became_ready(self._started_ns)
            self._has_gauges = self._has_gauges or probe.gauges is not None
            if probe.gauges is not None:
                self._listener.sampled(self.replica_id, probe.gauges)
            # An engine may have none, or not show them. Where it had some, their age is told.
            if self._serves and (probe.gauges or not self._has_gauges):
                report = _report(probe.gauges, len(self._attempts), self._blocks)
                self._listener.received(self.replica_id, [Load(report)])
            return
        self._faults += 1
        self._give_up_hung(probe.at_ns)
        if self._serves and self._faults >= _FAULTS_MAX:
            self._serves = False
            self._parted_ns = probe.at_ns
            self._listener.parted(self.replica_id, probe.fault)
        elif not self.was_probed:
            _log.warning("replica %s does not serve yet: %s", self.replica_id, probe.fault)

    def _give_up_hung(self, at_ns: int) -> None:
        """Break off what an engine does not answer that has answered no probe for long.

        A stream that has begun has a deadline of its own, and may still be going on.
        """
        silence_s = self._terms.deadlines.silence_s
        if self._serves or silence_s is None or at_ns - self._parted_ns < silence_s * 1e9:
            return
        why = f"it has answered no probe well for {silence_s:g} s"
        for attempt in [one for one in self._attempts.values() if one.first_ns is None]:
            attempt.break_off(Lost(self.replica_id, why))

    async def _became_ready(self, started_ns: int) -> None:
        facts = await self._engine.facts()
        terms = self._terms
        if terms.model is None:
            only = facts.models[0] if len(facts.models) == 1 else terms.name
            self._wording = Wording(terms.dialect, only, terms.priority)
        limits = limits_of(terms, facts)
        self._blocks = limits.blocks_total
        self._has_gauges = False
        self._started_ns, self._serves = None, True
        self._listener.received(self.replica_id, [Ready(limits, self._clock() - started_ns)])

    # ------------------------------------------------------------------------------------- calls

    def send(self, message: Relay | Cancel) -> None:
        """Give it a call, which its relay asks for then, or take one back."""
        match message:
            case Relay():
                attempt = self._attempt(message.forward, message.attempt_id, message.number)
                self._attempts[attempt.request_id] = attempt
                message.take(attempt)
            case Cancel():
                self._cancel(message.request_id)

    def _attempt(self, forward: Forward, attempt_id: str, number: int) -> Attempt:
        raw, request, now_ns = forward.raw, forward.request, self._clock()
        asked = UpstreamRequest(
            id=attempt_id,
            path=raw.path,
            body=body_for(forward, self._wording, attempt_id),
            headers=(*self._client_headers(raw, request.id, number), *_time_left(request, now_ns)),
            streamed=raw.streamed,
            any_body=raw.path in NOT_GENERATING,
            usage_events=UsageEvents.AS_SENT if raw.shows_usage else UsageEvents.NONE,
            deadlines=self._terms.deadlines,
        )
        attempt = Attempt(
            forward, self._engine, asked, self._clock,
            self._on_begun, self._on_tokens, self._on_ended, self._on_failed,
            self._on_text if self._listener.records_text else None, now_ns,
            self.replica_id,
        )  # fmt: skip
        if request.deadline_ns is not None:
            left_s = max(0, request.deadline_ns - now_ns) / 1e9
            attempt.expires_s = asyncio.get_running_loop().time() + left_s
            self._lookout.by(attempt.expires_s)
        return attempt

    def _client_headers(self, raw: RawPrompt, call_id: str, number: int) -> Headers:
        """The client's own that go along, with our span as parent where spans are made."""
        share = self._model.traced_share
        return raw.headers if share is None else headers_for(call_id, raw.headers, number, share)

    def _on_begun(self, attempt: Attempt, answer: Answer) -> None:
        self._tell_quota(attempt, answer.headers)

    def _tell_quota(self, attempt: Attempt, headers: Headers) -> None:
        left = quota_left(headers)
        if left is not None:
            self._listener.told(self.replica_id, attempt.request_id, left)

    def _on_text(self, attempt: Attempt, raw: bytes) -> None:
        self._listener.recorded(attempt.request_id, raw)

    def _on_tokens(self, attempt: Attempt, tokens: int) -> None:
        self._listener.passed(attempt.request_id, tokens)

    def _on_ended(self, attempt: Attempt, answer: Answer) -> None:
        told = answer.usage()
        if told.prompt_tokens is not None:
            self._model.learn(attempt.forward.text_bytes, told.prompt_tokens)
        prompt_tokens = told.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = attempt.forward.request.prompt_tokens
        usage = Usage(prompt_tokens, told.cached_tokens or 0, told.completion_tokens)
        reason = EndReason.LENGTH if attempt.cut else EndReason.STOP
        times = answer.engine_times()
        phases = self._phases(attempt, times.prefill_s or times.first_token_s)
        first_s = times.first_token_s
        ended = RequestEnded(
            attempt.request_id,
            reason,
            usage,
            phases,
            preemptions=0,
            error="",
            is_estimated=told.estimated,
            engine_ttft_ns=None if first_s is None else round(first_s * 1e9),
        )
        self._end(attempt, ended)

    def _on_failed(self, attempt: Attempt, error: UpstreamError) -> None:
        self._forget(attempt)
        if error.reply is not None:
            self._tell_quota(attempt, error.reply.headers)
        self._listener.failed(self.replica_id, attempt, error)

    def _cancel(self, request_id: str) -> None:
        """Stop a call at once and say so afterwards: who cancels it may have an ending for it."""
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            attempt.leave()
            loop = asyncio.get_running_loop()
            loop.call_soon(self._end_unfinished, request_id, EndReason.CANCELLED, "the client left")

    def _expire(self, now_s: float) -> float | None:
        """End the calls whose deadlines have passed. Returns when the next one does."""
        error = "The deadline passed before the answer was complete."
        for request_id, attempt in list(self._attempts.items()):
            if attempt.expires_s is not None and attempt.expires_s <= now_s:
                self._end_unfinished(request_id, EndReason.EXPIRED, error)
        times_s = [one.expires_s for one in self._attempts.values()]
        return min((at_s for at_s in times_s if at_s is not None), default=None)

    def _end_unfinished(self, request_id: str, reason: EndReason, error: str) -> None:
        """Leave a call: the engine is told by the connection that ends."""
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            attempt.leave()
            usage = Usage(attempt.forward.request.prompt_tokens, 0, attempt.tokens)
            phases = self._phases(attempt, None)
            silent = attempt.streamed and attempt.first_ns is None
            ended = RequestEnded(request_id, reason, usage, phases, 0, error, silent=silent)
            self._end(attempt, ended)

    def _end(self, attempt: Attempt, ended: RequestEnded) -> None:
        self._forget(attempt)
        self._listener.received(self.replica_id, [ended])

    def _forget(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.request_id, None)

    def _phases(self, attempt: Attempt, prefill_s: float | None) -> PhaseTimes:
        """Time in the gateway until the dispatch is told as admission, as replicas do.

        Where an answer was not streamed the engine's own word divides it, if it gives one.
        It may be wrong: no part is longer than the whole.
        """
        request, now_ns = attempt.forward.request, self._clock()
        first_ns = attempt.first_ns
        if first_ns is None:
            first_ns = min(now_ns, attempt.dispatched_ns + round((prefill_s or 0.0) * 1e9))
        return PhaseTimes(
            admission_ns=attempt.dispatched_ns - request.arrived_ns,
            prefill_ns=first_ns - attempt.dispatched_ns,
            decode_ns=max(0, now_ns - first_ns),
        )


def _time_left(request: Request, now_ns: int) -> Headers:
    """What is left of the time of a request, for an engine that is a path of its own."""
    if request.deadline_ns is None:
        return ()
    left_ms = max(0, request.deadline_ns - now_ns) // 1_000_000
    return (("x-sluice-deadline-ms", str(left_ms)),)


def limits_of(terms: RemoteTerms, facts: EngineFacts) -> ReplicaLimits:
    """What the fleet counts on. The settings win; blocks only stand for shares of the KV pool.

    The pool is taken to hold all sequences at full length: its true size is not known, and its
    use is told by the engine as a share.
    """
    context = terms.context_tokens_max or facts.context_tokens_max or CONTEXT_TOKENS_UNKNOWN
    sequences = terms.in_flight_max or facts.sequences_max or IN_FLIGHT_UNKNOWN
    blocks = sequences * -(-context // BLOCK_TOKENS)
    return ReplicaLimits(context, BLOCK_TOKENS, blocks, sequences)


def _report(gauges: Gauges | None, in_flight: int, blocks: int) -> Report:
    """The engine's view of its load, as far as it tells it."""
    found = gauges or Gauges(None, None, None)
    counters = found.counters
    running = in_flight if found.running is None else round(found.running)
    return Report(
        waiting=round(found.waiting or 0),
        running=running,
        blocks_free=round((1.0 - min(1.0, found.kv_use or 0.0)) * blocks),
        blocks_total=blocks,
        blocks_cached=0,
        preemptions=round(counters.get("preemptions", 0)),
        prefix_query_tokens=round(counters.get("prefix_queries", 0)),
        prefix_hit_tokens=round(counters.get("prefix_hits", 0)),
        prefill_tokens_per_s=0.0,
        step_ns=0,
        gauged=found.waiting is not None,
    )
