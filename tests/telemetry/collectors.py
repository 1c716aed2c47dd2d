"""OpenTelemetry collectors over gRPC and HTTP that keep what they are sent.

It is parsed by the protocol's own messages.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Collected:
    """What came, and where to send it."""

    endpoint: str = ""
    requests: list[Any] = field(default_factory=list)

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def resource(self) -> dict[str, str]:
        (first, *_) = self.requests
        return attributes(first.resource_spans[0].resource)


def attributes(of: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {one.key: _plain(one.value) for one in of.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def grpc_collector() -> Iterator[Collected]:
    found = Collected()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802 - the protocol's name
            found.requests.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    found.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield found
    finally:
        server.stop(0).wait()


@contextmanager
def http_collector() -> Iterator[Collected]:
    found = Collected()

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            found.requests.append(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Taker) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        found.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
