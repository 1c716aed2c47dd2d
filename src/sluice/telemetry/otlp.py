"""Sends spans by OTLP, over gRPC or HTTP. The only importer of OpenTelemetry.

Installed with ``sluice[otlp]``, and imported by the process that exports alone. ``send`` blocks and
is called by a thread of that process; it never raises for what is wrong at the other end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

import sluice
from sluice.telemetry.spans import Span

_TIMEOUT_S = 5
_HTTP_PATH = "/v1/traces"
_KINDS = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SCOPE = InstrumentationScope("sluice", sluice.__version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans go. ``endpoint`` is ``http://HOST:PORT`` or with ``https``."""

    endpoint: str
    protocol: Literal["grpc", "http"]
    service: str


class OtlpSender:
    """Sends to one collector. Its connection is opened with the first batch."""

    def __init__(self, collector: Collector) -> None:
        self._resource = Resource.create(
            {"service.name": collector.service, "service.version": sluice.__version__}
        )
        self._exporter = _exporter(collector)

    def send(self, spans: Sequence[Span]) -> bool:
        """Send a batch; whether the collector has it."""
        made = [_readable(span, self._resource) for span in spans]
        return self._exporter.export(made) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


def _exporter(collector: Collector) -> SpanExporter:
    if collector.protocol == "grpc":
        return GrpcExporter(
            endpoint=collector.endpoint,
            insecure=collector.endpoint.startswith("http://"),
            timeout=_TIMEOUT_S,
        )
    endpoint = collector.endpoint.rstrip("/")
    if not endpoint.endswith(_HTTP_PATH):
        endpoint += _HTTP_PATH
    return HttpExporter(endpoint=endpoint, timeout=_TIMEOUT_S)


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    state = TraceState.from_header([span.tracestate]) if span.tracestate else TraceState()
    parent = None
    if span.parent_id is not None:
        parent = SpanContext(span.trace_id, span.parent_id, span.parent_is_remote, _SAMPLED, state)
    error = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(
            span.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state
        ),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[Event(one.name, one.attributes, one.at_ns) for one in span.events],
        links=[
            Link(
                SpanContext(one.trace_id, one.span_id, is_remote=True, trace_flags=_SAMPLED),
                one.attributes,
            )
            for one in span.links
        ],
        kind=_KINDS[span.kind],
        status=error,
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )
