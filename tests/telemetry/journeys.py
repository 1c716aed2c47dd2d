"""Records of requests, as a gateway and its replicas write them, for tests of spans."""

from collections.abc import Sequence

from sluice.telemetry.journal import Entry
from sluice.telemetry.records import (
    AnyRecord,
    AttemptFailed,
    Chunk,
    FirstToken,
    RequestArrived,
    RequestDegraded,
    RequestDispatched,
    RequestEnded,
    RequestRejected,
    Step,
)

MS = 1_000_000
WALL_NS = 1_700_000_000 * 10**9
CALL = "0123456789abcdef0123456789abcdef"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-00"


def entries(records: Sequence[AnyRecord], source: str = "gateway") -> list[Entry]:
    return [Entry(one.t_ns + WALL_NS, source, one) for one in records]


def served(
    name: str = CALL, outcome: str = "met", traceparent: str = "", at_ms: int = 0
) -> list[AnyRecord]:
    """A request with every phase that ends well, beside another one."""
    at = at_ms * MS
    return [
        RequestArrived(
            at + MS, name, "m", at, 100, 50, slo_class="gold", operation="chat",
            traceparent=traceparent, tracestate="vendor=1" if traceparent else "",
        ),
        RequestDegraded(at + 2 * MS, name, "shorten", 20),
        RequestDispatched(at + 10 * MS, name, "m-0", 1, (), 5 * MS, 9 * MS),
        Step(at + 30 * MS, "m-0", 1, 9 * MS, 10 * MS, (("other", 0),), (Chunk(name, 0, 64, 0),)),
        Step(
            at + 40 * MS, "m-0", 2, 9 * MS, 10 * MS, (),
            (Chunk(name, 0, 36, 64), Chunk("long", 0, 500, 0)),
        ),
        FirstToken(at + 41 * MS, name, 41 * MS),
        Step(at + 50 * MS, "m-0", 3, 9 * MS, 10 * MS, ((name, 0), ("other", 0)), ()),
        RequestEnded(
            at + 100 * MS, name, "m", "stop", at, "m-0", 1, 100, 60, 20,
            retrieval_ns=5 * MS, admission_ns=5 * MS, queue_ns=10 * MS, prefill_ns=20 * MS,
            decode_ns=50 * MS, preempted_ns=10 * MS, preemptions=1, ttft_ns=41 * MS, tpot_ns=3 * MS,
            outcome=outcome,
        ),
    ]  # fmt: skip


def tried_twice(traceparent: str = GIVEN) -> list[AnyRecord]:
    """A request that a remote engine failed before another one answered."""
    return [
        RequestArrived(MS, CALL, "m", 0, 100, 50, operation="chat", traceparent=traceparent),
        RequestDispatched(2 * MS, CALL, "m-0", 1, remote=True),
        AttemptFailed(20 * MS, CALL, "m-0", 1, "unavailable", "503 from m-0"),
        RequestDispatched(22 * MS, CALL, "m-1", 2, remote=True),
        FirstToken(60 * MS, CALL, 60 * MS),
        RequestEnded(
            99 * MS, CALL, "m", "stop", 0, "m-1", 2, 100, 0, 20, decode_ns=99 * MS, outcome="met"
        ),
    ]


def refused(name: str = CALL) -> list[AnyRecord]:
    return [
        RequestArrived(MS, name, "m", 0, 100, 50, operation="chat"),
        RequestRejected(3 * MS, name, "m", 429, "queue_full", 9, 8, 1.5),
    ]
