"""Which fault an upstream's answer is: the one table from statuses and error bodies to errors.

Used by ``remote.py`` for answers outside of 2xx and by ``answers.py`` for errors that come within a
200. What is done about a fault is the gateway's decision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import msgspec

from sluice.executors.dialects import Dialect
from sluice.executors.stream import (
    ClientError,
    Garbage,
    Reply,
    UpstreamError,
    UpstreamFailed,
    UpstreamOverloaded,
)

# An upstream that asks for more is asked again after so long all the same: it may be wrong.
RETRY_AFTER_S_MAX = 300.0
_RETRY_HEADERS = (("retry-after-ms", 0.001), ("retry-after", 1.0))
# 4xx that are the engine's troubles with a request that is right: it waited too long for the body,
# or (TGI) the generation failed.
_ENGINE_TROUBLES = frozenset({408, 424})
# The engine has no such route or field.
_NOT_THERE = 501
# What error bodies within a 200 call a lack of room where they name no status.
_OVERLOAD_WORDS = (b'"overloaded"', b'"rate_limit_exceeded"', b'"rate_limit_error"')


@dataclass(frozen=True, slots=True)
class Source:
    """Whose answers are read: how errors call it, and its dialect."""

    name: str
    dialect: Dialect


def fault_of_reply(source: Source, reply: Reply) -> UpstreamError:
    """What a status outside of 2xx means."""
    status = reply.status
    if 300 <= status < 400:
        return Garbage(source.name, f"status {status}: redirects are not followed")
    if kind := source.dialect.overload_kind(status, reply.body):
        return UpstreamOverloaded(source.name, kind, reply, retry_after_s(reply))
    if status == _NOT_THERE or (400 <= status < 500 and status not in _ENGINE_TROUBLES):
        return ClientError(source.name, reply)
    return UpstreamFailed(source.name, reply, f"status {status}")


def fault_of_error(source: Source, payload: bytes, error: bytes, tokens: int) -> UpstreamError:
    """What an error within a 200 means; ``error`` is the part of ``payload`` that describes it.

    Before any output it counts by the status that it names. Once output has come, the request was
    right, whatever the engine calls its trouble.
    """
    try:
        fields = msgspec.json.decode(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    status, message = 500, "an error without a message"
    if isinstance(fields, str):
        message = fields
    elif isinstance(fields, Mapping):
        message = str(fields.get("message") or message)
        code = fields.get("code")
        if isinstance(code, int) and 400 <= code < 600:
            status = code
    if any(words in payload for words in _OVERLOAD_WORDS):
        status = 429
    reply = Reply(status, (("content-type", "application/json"),), payload)
    if tokens == 0 and status != 500:
        return fault_of_reply(source, reply)
    return UpstreamFailed(source.name, reply, message, tokens)


def retry_after_s(reply: Reply) -> float | None:
    """Seconds that the upstream asks to wait; ``None`` where it does not say so in a known form.

    A date is taken against the answer's own, so that the clocks need not agree. No more than
    ``RETRY_AFTER_S_MAX``.
    """
    for name, unit_s in _RETRY_HEADERS:
        value = reply.header(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit_s
        except ValueError:
            seconds = _seconds_between(reply.header("date") or "", value)
        if math.isfinite(seconds):
            return min(max(0.0, seconds), RETRY_AFTER_S_MAX)
    return None


def _seconds_between(earlier: str, later: str) -> float:
    """Time between two HTTP dates; not a number if either is none."""
    try:
        return (parsedate_to_datetime(later) - parsedate_to_datetime(earlier)).total_seconds()
    except (ValueError, TypeError):
        return math.nan
