"""What the gateway tells metrics and journal about calls and replicas.

One place turns what happens to a call into measurements, so that a metric and the journal cannot
disagree: TTFT, the gaps between chunks and TPOT are taken here, from the call's arrival, at the
moment its text is handed to its stream. Nothing is decided here.
"""

import logging
from collections.abc import Callable, Sequence

from msgspec import structs

from sluice.cluster.starts import Starts
from sluice.cluster.timings import TEXT_CHARS_MAX, CallTexts, CallTiming
from sluice.core import events
from sluice.core.events import (
    Dispatch,
    DrainReplica,
    Reject,
    ReplicaLimits,
    Report,
    Retarget,
    Scaled,
    Shorten,
)
from sluice.core.model_routes import Choice, RouteView
from sluice.core.pool_view import PoolView
from sluice.core.request import COMPLETE, EndReason, Request, Rung
from sluice.executors.stream import Gauges
from sluice.runtime import messages
from sluice.runtime.generation import Call, Delta, Fault, RawPrompt, Refused, Retrieval
from sluice.telemetry import records
from sluice.telemetry.journal_file import Journal
from sluice.telemetry.metric_table import Outcome, Stage
from sluice.telemetry.metrics import ClassTargets, Finish, Metrics
from sluice.telemetry.recent import Recent
from sluice.telemetry.timeline import Stages

_log = logging.getLogger(__name__)

# Records of requests refused before they became a call, in each window.
_EARLY_RECORDS_MAX = 20
_EARLY_WINDOW_NS = 1_000_000_000
# Between two records of what one engine elsewhere tells of its load.
_SAMPLE_NS = 2_000_000_000


class Observer:
    """Measures calls. ``journal`` is ``None`` where none is kept.

    ``deployment`` says what is served; nothing secret. Its name and time are filled in here.
    """

    def __init__(
        self,
        metrics: Metrics,
        journal: Journal | None,
        clock: Callable[[], int],
        deployment: records.Deployment | None = None,
    ) -> None:
        self._metrics = metrics
        self.recent = Recent()
        self.starts = Starts()
        self._journal = journal
        # Whether prompts and outputs go into the journal.
        self.records_text = journal is not None and journal.records_text
        self._clock = clock
        self.deployment = deployment or records.Deployment(0, "")
        self._timings: dict[str, CallTiming] = {}
        self._incarnations: dict[str, int] = {}
        self._short: set[str] = set()  # models that need more replicas than they may have
        self._sampled_ns: dict[str, int] = {}
        self._early_since_ns = clock()
        self._early_count = 0

    # ------------------------------------------------------------------------------------- calls

    def arrived(
        self, call: Call, request: Request, text_of: Callable[[Sequence[int]], str]
    ) -> None:
        """A call was read, checked and tokenised. ``text_of`` gives the text of its prompt."""
        stream = self._metrics.stream(call.model, request.slo_class)
        timing = CallTiming(call.model, self._clock(), stream, request.slo_class)
        timing.whole = isinstance(call.prompt, RawPrompt) and not call.prompt.streamed
        self._timings[request.id] = timing
        if self.records_text:
            # A token has at least one character of text in all but odd vocabularies.
            prompt = text_of(request.prompt[:TEXT_CHARS_MAX])
            if isinstance(call.prompt, RawPrompt):
                prompt = call.prompt.body[:TEXT_CHARS_MAX].decode("utf-8", "replace")
            timing.texts = CallTexts(prompt)
        self._metrics.arrived(call.model)
        self._write(
            records.RequestArrived(
                self._clock(),
                request.id,
                call.model,
                request.arrived_ns,
                request.prompt_tokens,
                request.output_tokens_max,
                request.choices,
                request.tier,
                request.tenant,
                request.slo_class,
                request.deadline_ns,
                call.client_id,
                request.overload,
                call.operation,
                call.traceparent,
                call.tracestate,
            )
        )

        if call.retrieval is not None:
            self._retrieved(request.id, call.retrieval)

    def _retrieved(self, request_id: str, made: Retrieval) -> None:
        outcome = "whole" if made.sources else "empty"
        outcome = made.degraded[-1] if made.degraded else outcome
        seconds, passages = made.duration_ns / 1e9, len(made.sources)
        self._metrics.retrieved(made.pipeline, outcome, seconds, passages)
        self._write(
            records.Retrieved(
                self._clock(),
                request_id,
                made.pipeline,
                made.duration_ns,
                made.budget_ns,
                made.found,
                made.tokens,
                tuple(one.id for one in made.sources),
                made.degraded,
                made.reason,
            )
        )

    def routed(self, call_id: str, choice: Choice) -> None:
        """A request for a route goes to one of its models."""
        self._metrics.routed(choice.route, choice.way, choice.why)
        self._write(
            records.RequestRouted(
                self._clock(),
                call_id,
                choice.route,
                choice.model,
                choice.way,
                choice.why,
                choice.score,
                choice.threshold,
                choice.would or "",
            )
        )

    def outcome_told(self, route: str) -> None:
        """A client told what became of a prompt."""
        self._metrics.outcome_told(route)

    def refused_early(self, refused: Refused) -> None:
        """A request was refused before it became a call.

        All are counted; of many in one second the first go to the journal, so that senders of
        nonsense cannot push everything else out of it.
        """
        self._metrics.refused(refused.model or None, refused.code)
        now_ns = self._clock()
        if now_ns - self._early_since_ns >= _EARLY_WINDOW_NS:
            self._early_since_ns, self._early_count = now_ns, 0
        self._early_count += 1
        if self._early_count <= _EARLY_RECORDS_MAX:
            self._write(
                records.RequestRefused(
                    now_ns,
                    refused.id,
                    refused.status,
                    refused.code,
                    refused.model,
                    refused.client_id,
                )
            )

    def turned_away(self, call: Call, least: Request, reject: Reject) -> None:
        """Admission refused the call before it was tokenised; ``least`` is what is known of it."""
        self._metrics.arrived(call.model)
        self._write(
            records.RequestArrived(
                self._clock(),
                call.id,
                call.model,
                call.arrived_ns,
                prompt_tokens=0,
                output_tokens_max=call.output_tokens_max or 0,
                choices=least.choices,
                tier=least.tier,
                tenant=least.tenant,
                slo_class=least.slo_class,
                deadline_ns=least.deadline_ns,
                client_id=call.client_id,
                overload=least.overload,
                operation=call.operation,
                traceparent=call.traceparent,
                tracestate=call.tracestate,
            )
        )
        self._refused(call.model, reject, least.slo_class)

    def rejected(self, request: Request, reject: Reject) -> None:
        """Admission refused the call."""
        timing = self._timings.pop(request.id)
        self._refused(timing.model, reject, timing.slo_class)
        if timing.texts is not None:
            self._write(timing.texts.record(self._clock(), request))

    def _refused(self, model: str, reject: Reject, slo_class: str) -> None:
        self._metrics.refused(model, reject.reason)
        if reject.status != 400:
            self._metrics.outcome(model, slo_class, Outcome.REFUSED)
        self._write(
            records.RequestRejected(
                self._clock(),
                reject.request_id,
                model,
                reject.status,
                reject.reason,
                reject.measured,
                reject.threshold,
                reject.retry_after_s,
            )
        )

    def dispatched(self, dispatch: Dispatch, *, remote: bool = False) -> None:
        """The call was given to a replica; ``remote`` ones run elsewhere."""
        timing = self._timings[dispatch.request_id]
        timing.replica, timing.attempts = dispatch.replica_id, dispatch.attempt
        timing.cold_ns = self._clock() if self.starts.is_first(dispatch.replica_id) else None
        if timing.handed_over_by:
            self._metrics.degraded(timing.handed_over_by, timing.handed_over)
            timing.handed_over_by = ""
        waited_ns = None
        if dispatch.predicted_wait_ns is not None and dispatch.attempt == 1:
            waited_ns = self._clock() - timing.arrived_ns
            self._metrics.waited(timing.model, dispatch.predicted_wait_ns, waited_ns)
        scores = [
            records.Score(one.replica_id, one.score, one.uncached_tokens, one.places, one.kv_fits)
            for one in dispatch.scores
        ]
        self._write(
            records.RequestDispatched(
                self._clock(),
                dispatch.request_id,
                dispatch.replica_id,
                dispatch.attempt,
                tuple(scores),
                dispatch.predicted_wait_ns,
                waited_ns,
                remote,
            )
        )

    def attempt_failed(
        self, request_id: str, replica_id: str, outcome: events.Outcome, error: str
    ) -> None:
        """A remote replica gave no whole answer to the call, which may go elsewhere."""
        timing = self._timings[request_id]
        if outcome is not events.Outcome.VOID:  # clients could fill the log
            _log.warning("request %s, attempt %d: %s", request_id, timing.attempts, error)
        self._metrics.attempt_failed(replica_id, timing.model, outcome)
        self._write(
            records.AttemptFailed(
                self._clock(), request_id, replica_id, timing.attempts, outcome, error
            )
        )

    def shortened(self, effect: Shorten) -> None:
        """The answer of the call is limited to fewer tokens than it asked for."""
        timing = self._timings[effect.request_id]
        self._metrics.degraded(timing.model, Rung.SHORTEN)
        self._write(
            records.RequestDegraded(
                self._clock(), effect.request_id, Rung.SHORTEN, effect.output_tokens_max
            )
        )

    def retargeted(self, effect: Retarget, *, whole: bool = False) -> None:
        """The call arrives at a smaller model; all that happens counts for that one from here on.

        ``whole`` says that a remote engine answers in one piece there. It is degraded where that
        model takes it.
        """
        timing = self._timings[effect.request_id]
        timing.handed_over_by, timing.handed_over = timing.model, effect.rung
        timing.whole = whole
        self._metrics.arrived(effect.model)
        timing.model, timing.arrived_ns = effect.model, self._clock()
        timing.stream = self._metrics.stream(effect.model, timing.slo_class)
        self._write(
            records.RequestDegraded(
                self._clock(),
                effect.request_id,
                effect.rung,
                model=effect.model,
                measured=effect.measured,
                threshold=effect.threshold,
            )
        )

    def text(self, request: Request, delta: Delta) -> None:
        """Text of the call is handed to its stream."""
        timing = self._timings[request.id]
        if timing.texts is not None:
            timing.texts.add(delta)
        self._passed(timing, request, delta.tokens, delta.choice)

    def tokens(self, request: Request, tokens: int, choice: int = 0) -> None:
        """So many tokens of one choice of the call go out."""
        self._passed(self._timings[request.id], request, tokens, choice)

    def _passed(self, timing: CallTiming, request: Request, tokens: int, choice: int) -> None:
        now_ns = self._clock()
        before_ns = timing.choice_ns.get(choice)
        if before_ns is not None:
            timing.stream.chunk((now_ns - before_ns) * 1e-9, tokens)
        elif timing.first_ns is None:
            ttft_ns = now_ns - request.arrived_ns
            timing.first_ns = now_ns
            timing.first_tokens = tokens
            timing.stream.first_token(ttft_ns / 1e9, tokens)
            self._write(records.FirstToken(now_ns, request.id, ttft_ns))
            if timing.cold_ns is not None:
                taken_ns = now_ns - timing.cold_ns
                self.starts.first_token(timing.replica, taken_ns)
                self._stage(timing.replica, timing.model, Stage.FIRST_TOKEN, taken_ns)
        else:
            timing.uncounted += tokens
        timing.choice_ns[choice] = timing.last_ns = now_ns
        timing.tokens += tokens

    def recorded(self, request: Request, raw: bytes) -> None:
        """Bytes that a remote engine answered: they are its output as far as anyone reads it."""
        texts = self._timings[request.id].texts
        if texts is not None:
            texts.add(Delta(0, raw.decode("utf-8", "replace"), 0))

    def ended(self, request: Request, ended: messages.RequestEnded) -> None:
        """The call had its one ending."""
        timing = self._timings.pop(request.id)
        tpot_ns = timing.tpot_ns(request.choices)
        tpot_s = None if tpot_ns is None else tpot_ns / 1e9
        finish = Finish(ended.reason, ended.usage, ended.phases, tpot_s, timing.counted_tokens)
        self._metrics.ended(timing.model, finish, slo_class=timing.slo_class)
        if ended.is_estimated or ended.engine_ttft_ns is not None:
            told_ns = ended.engine_ttft_ns
            self._metrics.engine_told(timing.model, told_ns, estimated=ended.is_estimated)
        outcome: Outcome | None = None
        if ended.fault is not Fault.REQUEST:  # which no target can be met by, as of one refused
            outcome = self._outcome(request, timing, ended.reason)
            self._metrics.outcome(timing.model, timing.slo_class, outcome)
        phases, usage = ended.phases, ended.usage
        self._write(
            records.RequestEnded(
                self._clock(),
                request.id,
                timing.model,
                ended.reason,
                request.arrived_ns,
                timing.replica,
                timing.attempts,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                phases.retrieval_ns,
                phases.admission_ns,
                phases.queue_ns,
                phases.prefill_ns,
                phases.decode_ns,
                phases.preempted_ns,
                ended.preemptions,
                None if timing.first_ns is None else timing.first_ns - request.arrived_ns,
                tpot_ns,
                ended.error,
                outcome or "",
            )
        )
        if timing.texts is not None:
            self._write(timing.texts.record(self._clock(), request))

    def _outcome(self, request: Request, timing: CallTiming, reason: EndReason) -> Outcome:
        """Whether the call met its targets; an answer that is not whole did not."""
        if reason is EndReason.CANCELLED:
            return Outcome.LEFT
        tpot_ns, first_ns = timing.tpot_ns(request.choices), timing.first_ns
        met = reason in COMPLETE
        if request.ttft_due_ns is not None and not (timing.whole and first_ns is None):
            met = met and first_ns is not None and first_ns <= request.ttft_due_ns
        if request.tpot_ns is not None and tpot_ns is not None:
            met = met and tpot_ns <= request.tpot_ns
        if request.deadline_ns is not None:
            met = met and self._clock() <= request.deadline_ns
        return Outcome.MET if met else Outcome.MISSED

    # ---------------------------------------------------------------------------------- replicas

    def ready(self, replica_id: str, model: str, limits: ReplicaLimits) -> None:
        """A replica has loaded its model."""
        incarnation = self._incarnations.get(replica_id, 0) + 1
        self._incarnations[replica_id] = incarnation
        _log.info("replica %s is ready, start %d", replica_id, incarnation)
        self._write(
            records.ReplicaChanged(
                self._clock(),
                replica_id,
                model,
                "ready",
                "",
                incarnation,
                limits.context_tokens_max,
                limits.block_size,
                limits.blocks_total,
                limits.sequences_max,
            )
        )

    def asked_for(self, replica_id: str) -> None:
        """A replica is to start or to wake."""
        self.starts.asked(replica_id, self._clock())

    def loaded(self, replica_id: str, model: str, ready: messages.Ready) -> None:
        """A replica that runs here can serve: it has loaded its model, or was woken."""
        if not self.starts.is_loaded(replica_id):
            self.ready(replica_id, model, ready.limits)
        stages = self.starts.ready(replica_id, ready, self._clock())
        if stages:
            told = ", ".join(f"{stage} {taken / 1e9:.3f} s" for stage, taken in stages.items())
            _log.info("replica %s: %s", replica_id, told)
        for stage, taken_ns in stages.items():
            self._stage(replica_id, model, stage, taken_ns)

    def _stage(self, replica_id: str, model: str, stage: Stage, taken_ns: int) -> None:
        self._metrics.started(model, stage, taken_ns)
        self._write(records.StartStage(self._clock(), replica_id, model, stage, taken_ns))

    def lost(self, replica_id: str, model: str, error: str) -> None:
        """A replica's process is gone."""
        _log.error("replica %s was lost: %s", replica_id, error)
        self.starts.over(replica_id)
        incarnation = self._incarnations.get(replica_id, 0)
        self._metrics.replica_lost(replica_id, model)
        self._write(
            records.ReplicaChanged(self._clock(), replica_id, model, "lost", error, incarnation)
        )

    def scaled(self, effect: Scaled | DrainReplica) -> None:
        """The number of replicas of a model that are to serve changed, or one of them drains."""
        if isinstance(effect, DrainReplica):
            _log.info("replica %s gets nothing more: %s", effect.replica_id, effect.reason)
            self.starts.drains(effect.replica_id)
            return
        model, number, change = effect.model, effect.number, effect.number - effect.before
        if change:
            told = (model, number, effect.before, effect.reason)
            _log.info("%s: %d replicas are to serve, not %d: %s", *told)
            self._metrics.scaled(model, change, effect.reason)
        if effect.short_of is None:
            self._short.discard(model)
        elif model not in self._short:
            self._short.add(model)
            short = (model, effect.short_of)
            _log.warning("%s: %d replicas are needed, more than replicas.max allows", *short)
        self._write(
            records.FleetScaled(
                self._clock(),
                effect.model,
                effect.before,
                effect.number,
                effect.reason,
                dict(effect.terms),
                effect.short_of,
            )
        )

    def reported(self, replica_id: str, model: str, report: Report) -> None:
        """A replica told its load."""
        incarnation = self._incarnations.get(replica_id, 0)
        self._metrics.replica_report(replica_id, model, report, incarnation)

    def sampled(self, replica_id: str, model: str, gauges: Gauges) -> None:
        """An engine that runs elsewhere told its load; of many looks some are recorded."""
        now_ns = self._clock()
        if now_ns - self._sampled_ns.get(replica_id, now_ns - _SAMPLE_NS) < _SAMPLE_NS:
            return
        self._sampled_ns[replica_id] = now_ns
        self._write(
            records.EngineSampled(
                now_ns,
                replica_id,
                model,
                gauges.waiting,
                gauges.running,
                gauges.kv_use,
                dict(gauges.counters),
            )
        )

    def deployed(self, what: str) -> None:
        """The deployment started, or began to drain."""
        self.changed(structs.replace(self.deployment, what=what))

    def changed(self, deployment: records.Deployment) -> None:
        """Something changed at this moment; nothing secret."""
        if deployment.settings:
            self.deployment = deployment
        self._write(structs.replace(deployment, t_ns=self._clock()))

    def know_classes(self, slo_classes: Sequence[ClassTargets]) -> None:
        """Count requests of these classes by name from now on, and show what they promise."""
        self._metrics.know_targets(slo_classes)

    # ------------------------------------------------------------------------------------ output

    @property
    def metrics(self) -> Metrics:
        """The metrics that it keeps."""
        return self._metrics

    def stages(self) -> dict[str, Stages]:
        """What the calls of each model do at this moment."""
        counts: dict[str, list[int]] = {}
        for timing in self._timings.values():
            stage = 0 if not timing.replica else 1 if timing.first_ns is None else 2
            counts.setdefault(timing.model, [0, 0, 0])[stage] += 1
        return {model: Stages(*found) for model, found in counts.items()}

    def exposition(
        self, pools: Sequence[PoolView], routes: Sequence[RouteView] = ()
    ) -> tuple[bytes, str]:
        """The metrics with the fleet's own view, in Prometheus' format, and its content type."""
        return self._metrics.exposition(pools, routes)

    def close(self) -> None:
        """Write what is left of the journal."""
        if self._journal is not None:
            self._journal.close()

    def _write(self, record: records.AnyRecord) -> None:
        self.recent.add(record)
        if self._journal is not None:
            self._journal.append(record)
