"""Spans of a request's life, as plain values: names, attributes, times and relations.

Standard ``gen_ai.*`` names where there are any, vLLM's ``gen_ai.latency.*`` beside them so that
dashboards made for it work, and ``sluice.*`` for the rest. ``otlp`` sends them; ids are those of
``trace_context``. Which requests are kept is decided in ``span_export``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sluice.core.request import COMPLETE, Phase
from sluice.telemetry.journal import Entry
from sluice.telemetry.life import Decision, Life, StepShare
from sluice.telemetry.records import Step
from sluice.telemetry.trace_context import (
    attempt_name,
    parent_of,
    span_id_of,
    trace_id_of,
)

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]
SpanKind = Literal["server", "client", "internal"]

SERVER = "server"
_EVENTS_MAX = 64
_LINKS_MAX = 8


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something at an instant, in Unix nanoseconds."""

    name: str
    at_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanLink:
    """A span of another trace that this one has to do with."""

    trace_id: int
    span_id: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are Unix nanoseconds; ``error`` is empty for none."""

    name: str
    kind: SpanKind
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    error: str = ""
    tracestate: str = ""
    parent_is_remote: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """Another request that was computed in the same steps, and how much of it."""

    id: str
    traceparent: str
    steps: int
    prefill_tokens: int


@dataclass(slots=True)
class _Frame:
    """What all spans of a request share."""

    life: Life
    trace_id: int
    end_ns: int
    spans: list[Span] = field(default_factory=list)

    def at(self, after_ns: int) -> int:
        """Unix time of an instant of the life, within it: no child outlives its parent."""
        start_ns = self.life.arrived_wall_ns
        return min(max(start_ns, start_ns + after_ns), self.end_ns)


def spans_of(life: Life, probability: float, beside: Sequence[Beside] = ()) -> list[Span]:
    """The spans of a request: the server's first, then its phases and attempts.

    ``probability`` is that with which a request like it is kept, so that counts can be made from
    what was.
    """
    parent = parent_of(life.traceparent)
    frame = _Frame(life, trace_id_of(life.id, parent), life.arrived_wall_ns + _lasted_ns(life))
    failed = _error_of(life)
    operation = life.operation or "chat"
    frame.spans.append(
        Span(
            name=f"{operation} {life.model}".rstrip(),
            kind="server",
            trace_id=frame.trace_id,
            span_id=span_id_of(life.id, SERVER),
            parent_id=None if parent is None else parent.span_id,
            start_ns=life.arrived_wall_ns,
            end_ns=frame.end_ns,
            attributes=_drop_none(_server_attributes(life, operation, probability, failed)),
            events=_server_events(frame),
            links=tuple(_link(one) for one in beside[:_LINKS_MAX]),
            error=failed,
            tracestate=life.tracestate if parent is not None else "",
            parent_is_remote=parent is not None,
        )
    )
    _add_phases(frame)
    _add_attempts(frame)
    return frame.spans


def beside_of(
    request_id: str, steps: Sequence[Entry], traceparents: Mapping[str, str]
) -> list[Beside]:
    """The requests that shared most steps with one, those with most prompt tokens first."""
    together, tokens = Counter[str](), Counter[str]()
    for entry in steps:
        step = entry.record
        if isinstance(step, Step):
            for other in {*(one for one, _ in step.decode), *(c.id for c in step.prefill)}:
                together[other] += 1
            for chunk in step.prefill:
                tokens[chunk.id] += chunk.tokens
    ranked = sorted(together, key=lambda one: (-tokens[one], -together[one], one))
    return [
        Beside(one, traceparents.get(one, ""), together[one], tokens[one])
        for one in ranked
        if one != request_id
    ][:_LINKS_MAX]


def _lasted_ns(life: Life) -> int:
    if life.ending is not None:
        return max(0, life.ending.at_ns)
    return max((one.at_ns for one in life.decisions), default=0)


def _refusal(life: Life) -> Decision | None:
    return next((one for one in life.decisions if one.status), None)


def _error_of(life: Life) -> str:
    refusal = _refusal(life)
    if refusal is not None:
        return refusal.reason
    ending = life.ending
    if ending is None or ending.reason in COMPLETE:
        return ""
    return str(ending.reason)


def _server_attributes(
    life: Life, operation: str, probability: float, failed: str
) -> dict[str, Value | None]:
    told: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": life.model or None,
        "gen_ai.request.id": life.id,
        "gen_ai.response.id": life.id,
        "gen_ai.request.max_tokens": life.output_tokens_max or None,
        "gen_ai.request.choice.count": life.choices,
        "sluice.client_request_id": life.client_id or None,
        "sluice.slo_class": life.slo_class or "default",
        "sluice.tenant": life.tenant or None,
        "sluice.tier": life.tier,
        "sluice.sample.probability": probability,
        "sluice.degraded": tuple(one.rung for one in life.decisions if one.rung) or None,
        "error.type": failed or None,
    }
    refusal = _refusal(life)
    if refusal is not None:
        told |= {
            "http.response.status_code": refusal.status,
            "sluice.outcome": "refused",
            "sluice.refusal.reason": refusal.reason,
            "sluice.refusal.measured": refusal.measured,
            "sluice.refusal.threshold": refusal.threshold,
        }
    return told | _ending_attributes(life)


def _ending_attributes(life: Life) -> dict[str, Value | None]:
    ending = life.ending
    if ending is None:
        return {}
    spent = {one.phase: one.duration_ns / 1e9 for one in life.phases}
    last = next((one for one in reversed(life.decisions) if one.rung and one.model), None)
    replica = next((one.replica for one in reversed(life.decisions) if one.replica), None)
    ttft_s = None if life.ttft_ns is None else life.ttft_ns / 1e9
    waited_s = spent.get(Phase.QUEUE, 0.0) + spent.get(Phase.ADMISSION, 0.0)
    prefill_s, decode_s = spent.get(Phase.PREFILL, 0.0), spent.get(Phase.DECODE, 0.0)
    return {
        "gen_ai.response.model": life.model if last is None else last.model,
        "gen_ai.response.finish_reasons": (str(ending.reason),),
        "gen_ai.response.time_to_first_chunk": ttft_s,
        "gen_ai.usage.input_tokens": ending.prompt_tokens,
        "gen_ai.usage.output_tokens": ending.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": ending.cached_tokens,
        "gen_ai.usage.prompt_tokens": ending.prompt_tokens,
        "gen_ai.usage.completion_tokens": ending.completion_tokens,
        "gen_ai.latency.e2e": ending.at_ns / 1e9,
        "gen_ai.latency.time_to_first_token": ttft_s,
        "gen_ai.latency.time_in_queue": waited_s,
        "gen_ai.latency.time_in_model_prefill": prefill_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
        "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
        "sluice.outcome": ending.outcome or None,
        "sluice.time_per_output_token": None if ending.tpot_ns is None else ending.tpot_ns / 1e9,
        "sluice.preemptions": ending.preemptions,
        "sluice.attempts": ending.attempts,
        "sluice.replica": replica,
        "sluice.error": ending.error or None,
    }


def _server_events(frame: _Frame) -> tuple[SpanEvent, ...]:
    life, found = frame.life, []
    for one in life.decisions:
        at_ns = frame.at(one.at_ns)
        if one.rung:
            told = {
                "sluice.rung": one.rung,
                "sluice.model": one.model or None,
                "sluice.output_tokens_max": one.output_tokens_max,
            }
            found.append(SpanEvent("degraded", at_ns, _drop_none(told)))
        elif one.route:
            routed = {
                "sluice.route": one.route,
                "sluice.model": one.model,
                "sluice.why": one.reason,
            }
            found.append(SpanEvent("routed", at_ns, _drop_none(routed)))
    if life.ttft_ns is not None:
        found.append(SpanEvent("first token", frame.at(life.ttft_ns), {}))
    return tuple(found[:_EVENTS_MAX])


def _add_phases(frame: _Frame) -> None:
    for one in frame.life.phases:
        start_ns, end_ns = frame.at(one.start_ns), frame.at(one.start_ns + one.duration_ns)
        told: dict[str, Value] = {"phase": str(one.phase), "sluice.phase": str(one.phase)}
        events: tuple[SpanEvent, ...] = ()
        if one.phase is Phase.PREFILL:
            chunks = [share for share in frame.life.steps if share.prefill_tokens]
            told["sluice.chunks"] = len(chunks)
            events = tuple(_step_event(frame, "chunk", share) for share in chunks[:_EVENTS_MAX])
        elif one.phase is Phase.DECODE:
            steps = [share for share in frame.life.steps if share.decode_rows]
            told["sluice.steps"] = len(steps)
            # Of thousands of steps those are told that took longest; the journal has them all.
            slow = sorted(steps, key=lambda share: -share.measured_ns)[:_EVENTS_MAX]
            slow.sort(key=lambda share: share.at_ns)
            events = tuple(_step_event(frame, "step", share) for share in slow)
        frame.spans.append(
            Span(
                name=str(one.phase),
                kind="internal",
                trace_id=frame.trace_id,
                span_id=span_id_of(frame.life.id, str(one.phase)),
                parent_id=frame.spans[0].span_id,
                start_ns=start_ns,
                end_ns=end_ns,
                attributes=told,
                events=events,
            )
        )


def _step_event(frame: _Frame, name: str, share: StepShare) -> SpanEvent:
    told: dict[str, Value] = {
        "sluice.replica": share.replica,
        "sluice.step": share.step,
        "sluice.step.measured_s": share.measured_ns / 1e9,
        "sluice.step.predicted_s": share.predicted_ns / 1e9,
        "sluice.step.prefill_tokens": share.prefill_tokens,
        "sluice.step.beside_decode_rows": share.beside_decode_rows,
        "sluice.step.beside_prefill_tokens": share.beside_prefill_tokens,
        "sluice.step.blocks_free": share.blocks_free,
    }
    return SpanEvent(name, frame.at(share.at_ns), told)


def _add_attempts(frame: _Frame) -> None:
    """A span for each time that the request was given to a replica."""
    life = frame.life
    given = [one for one in life.decisions if one.replica and not one.error]
    for number, one in enumerate(given):
        failure = next((d for d in life.decisions if d.error and d.attempt == one.attempt), None)
        over_ns = frame.end_ns
        if failure is not None:
            over_ns = frame.at(failure.at_ns)
        elif number + 1 < len(given):
            over_ns = frame.at(given[number + 1].at_ns)
        error = "" if failure is None else failure.error
        told: dict[str, Value | None] = {
            "gen_ai.operation.name": life.operation or "chat",
            "gen_ai.request.model": life.model,
            "sluice.replica": one.replica,
            "sluice.attempt": one.attempt,
            "sluice.wait_predicted_s": None
            if one.predicted_wait_ns is None
            else one.predicted_wait_ns / 1e9,
            "sluice.wait_actual_s": None if one.waited_ns is None else one.waited_ns / 1e9,
            "error.type": "attempt_failed" if error else None,
        }
        frame.spans.append(
            Span(
                name=attempt_name(one.attempt),
                kind="client" if one.remote else "internal",
                trace_id=frame.trace_id,
                span_id=span_id_of(life.id, attempt_name(one.attempt)),
                parent_id=frame.spans[0].span_id,
                start_ns=frame.at(one.at_ns),
                end_ns=max(frame.at(one.at_ns), over_ns),
                attributes=_drop_none(told),
                error=error,
                tracestate=life.tracestate if frame.spans[0].parent_is_remote else "",
            )
        )


def _link(other: Beside) -> SpanLink:
    told: dict[str, Value] = {
        "sluice.beside.request_id": other.id,
        "sluice.beside.steps": other.steps,
        "sluice.beside.prefill_tokens": other.prefill_tokens,
    }
    trace_id = trace_id_of(other.id, parent_of(other.traceparent))
    return SpanLink(trace_id, span_id_of(other.id, SERVER), told)


def _drop_none(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}
