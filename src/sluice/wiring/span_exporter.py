"""The process that exports spans: ``python -m sluice.wiring.span_exporter BOOT``.

``BOOT`` is a ``SpanExporterBoot`` as JSON. The process follows the journal until its standard input
is closed, then sends what is left and exits. Each second it writes what became of the spans so far
as one line of JSON to standard output. Headers for the collector are OpenTelemetry's business,
which reads its own variables.
"""

import os
import select
import signal
import sys
from pathlib import Path
from typing import Literal

import msgspec

from sluice.runtime.clock import monotonic_ns, wall_ns
from sluice.telemetry import log
from sluice.telemetry.following import Follower
from sluice.telemetry.otlp import Collector, OtlpSender
from sluice.telemetry.span_export import SpanExport, SpanQueue

_LOOK_S = 0.5
_TOLD_EACH = 2
# What the journal's writers still flush after the gateway let go.
_LAST_LOOK_S = 0.7
_CLOSE_S_MAX = 2.0


class SpanExporterBoot(msgspec.Struct, frozen=True):
    """What the process is to do. ``since_ns`` is Unix time."""

    journal: str
    endpoint: str
    protocol: Literal["grpc", "http"]
    service: str
    share: float
    spans_max: int
    since_ns: int


def main() -> None:
    """Run the process that ``sys.argv`` describes."""
    boot = msgspec.json.decode(sys.argv[1], type=SpanExporterBoot)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when to stop
    os.nice(10)  # where processors are short, requests go first and spans come later
    log.set_up("spans")
    sender = OtlpSender(Collector(boot.endpoint, boot.protocol, boot.service))
    queue = SpanQueue(sender, boot.spans_max)
    export = SpanExport(queue, boot.share, monotonic_ns)
    follower = Follower(Path(boot.journal), min(boot.since_ns, wall_ns()))
    looks = 0
    while not _is_told_to_stop(_LOOK_S):
        export.take(follower.news())
        looks += 1
        if looks % _TOLD_EACH == 0:
            _tell(export)
    _is_told_to_stop(_LAST_LOOK_S)
    export.take(follower.news())
    export.finish()
    queue.close(_CLOSE_S_MAX)
    follower.close()
    _tell(export)


def _is_told_to_stop(wait_s: float) -> bool:
    """Whether standard input was closed within a time; the gateway is gone or stops then."""
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(readable) and not sys.stdin.readline()


def _tell(export: SpanExport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(export.counted) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
