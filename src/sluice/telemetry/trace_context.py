"""Ids of traces and spans, and what the next hop is told (W3C Trace Context, level 2).

Ids are made from the id of a call, so that the gateway, which tells an engine whose child it is,
and the exporter, which makes the spans later from the journal, agree without a word between them.
The trace of a call whose client began none has the id of the call itself, which is the answer's
``x-request-id``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
TRACESTATE_CHARS_MAX = 512

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_SHARE_BITS = 56


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of a client that a call belongs to."""

    trace_id: int
    span_id: int
    sampled: bool


def parent_of(traceparent: str) -> Parent | None:
    """What a client says its span is, ``None`` where it says nothing that can be followed."""
    match = _PARENT.fullmatch(traceparent.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))


def trace_id_of(call_id: str, parent: Parent | None) -> int:
    """The trace that a call belongs to."""
    if parent is not None:
        return parent.trace_id
    if re.fullmatch(r"[0-9a-f]{32}", call_id) and int(call_id, 16):
        return int(call_id, 16)
    return int.from_bytes(blake2b(call_id.encode(), digest_size=16).digest())


def span_id_of(call_id: str, name: str) -> int:
    """The id of one of a call's spans: ``server``, ``attempt N``, or a phase."""
    return int.from_bytes(blake2b(f"{call_id}/{name}".encode(), digest_size=8).digest()) or 1


def attempt_name(attempt: int) -> str:
    """The name under which an attempt's span has its id."""
    return f"attempt {attempt}"


def is_in_share(trace_id: int, share: float) -> bool:
    """Whether a trace belongs to the share that is kept whatever becomes of it.

    Every service that decides by the same bits of the id keeps the same traces.
    """
    return (trace_id & ((1 << _SHARE_BITS) - 1)) < share * (1 << _SHARE_BITS)


def headers_for(
    call_id: str, headers: Sequence[tuple[str, str]], attempt: int, share: float
) -> tuple[tuple[str, str], ...]:
    """The headers that go upstream, with the span of the attempt as parent of what happens there.

    Its flag says that the trace is kept for certain; more are kept once it is known how they end.
    """
    given = next((value for name, value in headers if name == TRACEPARENT), "")
    parent = parent_of(given)
    trace_id = trace_id_of(call_id, parent)
    sampled = is_in_share(trace_id, share) if parent is None else parent.sampled
    span_id = span_id_of(call_id, attempt_name(attempt))
    made = f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"
    # A state without the parent that it belongs to means nothing.
    kept = [one for one in headers if one[0] != TRACEPARENT and (parent or one[0] != TRACESTATE)]
    return (*kept, (TRACEPARENT, made))
