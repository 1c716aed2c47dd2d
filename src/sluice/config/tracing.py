"""Settings of the export of spans."""

from dataclasses import dataclass
from typing import Annotated, Literal

from sluice.config.sections import Positive, Range


@dataclass(frozen=True, slots=True)
class TracingSection:
    """Spans of requests for an OpenTelemetry collector."""

    endpoint: str | None = None
    """Address of the collector, ``http://HOST:4317`` for gRPC or ``http://HOST:4318`` for HTTP.
    Unset: no spans, and trace headers of clients go upstream as they came. Needs ``journal`` and
    the packages of ``sluice[otlp]``. Headers and certificates for the collector are read from
    OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_HEADERS``."""

    protocol: Literal["grpc", "http"] = "grpc"
    """How the collector is spoken to."""

    share: Annotated[float, Range(low=0, high=1)] = 0.01
    """Share of the requests that met their targets whose spans are sent. All that missed them,
    failed or were refused are sent in any case, and so are those whose client keeps their trace.
    Each span tells the probability with which it was kept."""

    service_name: str = "sluice"
    """Name of this service in traces."""

    queue_spans_max: Positive = 20_000
    """Spans that wait for the collector; more are dropped and counted. A larger queue bridges
    longer pauses of the collector and takes more memory."""
