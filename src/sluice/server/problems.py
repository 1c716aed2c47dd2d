"""Errors as HTTP answers: one table from error class to status, type, code and retry advice.

The only place that decides what a client is told about a failure. ``app`` and ``sse`` call it; no
route builds an error body of its own. Bodies have OpenAI's shape,
``{"error": {"message", "type", "param", "code"}}``, with ``measured`` and ``threshold`` beside them
where admission compared numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, assert_never

import msgspec

from sluice.core.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ConfigError,
    ContextExceeded,
    EngineRefused,
    ExecutorError,
    Forbidden,
    InternalError,
    InvalidRequest,
    MemoryShort,
    ModelLoadError,
    ModelNotFound,
    Overloaded,
    ReplicaGone,
    RequestError,
    SluiceError,
    Unauthorized,
)
from sluice.core.request import EndReason
from sluice.runtime.generation import Fault, Finished

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Row:
    """How one error class is answered.

    ``status`` and ``code`` are ``None`` where the error itself carries them. ``shown`` says whether
    the error's own words are for clients. ``retry`` is what ``x-should-retry`` says, ``None`` for
    saying nothing and leaving it to the client's own rule for the status.
    """

    status: int | None
    type: str
    code: str | None = None
    shown: bool = True
    retry: bool | None = None


TABLE: Mapping[type[SluiceError], Row] = {
    RequestError: Row(400, "invalid_request_error"),
    InvalidRequest: Row(400, "invalid_request_error"),
    ContextExceeded: Row(400, "invalid_request_error"),
    Unauthorized: Row(401, "authentication_error"),
    Forbidden: Row(403, "permission_error"),
    ModelNotFound: Row(404, "invalid_request_error"),
    BodyTooLarge: Row(413, "invalid_request_error"),
    BodyTooSlow: Row(408, "invalid_request_error"),
    Overloaded: Row(None, "rate_limit_exceeded"),
    ExecutorError: Row(None, "server_error", "engine_error"),
    ReplicaGone: Row(502, "server_error", "replica_lost"),
    EngineRefused: Row(None, "invalid_request_error", "engine_refused"),
    ConfigError: Row(500, "server_error", "internal_error", shown=False, retry=False),
    ModelLoadError: Row(503, "server_error", "model_not_loaded", shown=False),
    MemoryShort: Row(503, "server_error", "model_not_loaded", shown=False),
    InternalError: Row(500, "server_error", "internal_error", shown=False, retry=False),
    SluiceError: Row(500, "server_error", "internal_error", shown=False, retry=False),
}

_HIDDEN = "The server could not answer this request; its log has the details under this request id."


@dataclass(frozen=True, slots=True)
class Problem:
    """One error answer: status, the error object of its body, and headers that go with it.

    ``passed_on`` is the body where it is the one of a remote engine.
    """

    status: int
    error: Mapping[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()
    passed_on: bytes | None = None
    content_type: bytes = b"application/json"

    @property
    def code(self) -> str:
        """The short name that clients and metrics know the error by."""
        return str(self.error["code"])

    def body(self) -> bytes:
        """The body, which is JSON unless a remote engine made another one."""
        if self.passed_on is not None:
            return self.passed_on
        return msgspec.json.encode({"error": self.error})


def problem_of(error: Exception) -> Problem:
    """The answer to an error. Whatever is not a ``SluiceError`` is a bug and is told as one."""
    row = _row(type(error))
    if isinstance(error, Overloaded):
        return _overloaded(error, row)
    status = row.status if row.status is not None else _status_of(error)
    code = str(row.code or getattr(error, "code", "internal_error"))
    message = str(error) if row.shown and str(error) else _HIDDEN
    headers = [(b"x-sluice-reason", header_text(code))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if row.retry is not None:
        headers.append((b"x-should-retry", b"true" if row.retry else b"false"))
    param = getattr(error, "param", None)
    described = _error_object(message, row.type, param, code)
    if isinstance(error, EngineRefused):
        kind = header_text(error.content_type)
        return Problem(status, described, tuple(headers), error.body, kind)
    return Problem(status, described, tuple(headers))


def unknown_path(message: str) -> Problem:
    """Nothing is served at the path asked for; ``message`` says what is there instead."""
    return _routing_problem(404, message, "not_found")


def settings_refused(problems: Sequence[str]) -> Problem:
    """Settings that cannot be used; nothing was changed. ``problems`` are all their mistakes."""
    message = "The settings were not changed: " + "; ".join(problems)
    return _routing_problem(400, message, "invalid_settings", problems=list(problems))


def method_refused(method: str, allowed: str) -> Problem:
    """The path exists and takes another ``method``; ``allowed`` is the whole Allow header."""
    message = f"This path takes {method}."
    return _routing_problem(405, message, "method_not_allowed", (b"allow", allowed.encode()))


def overdue() -> Problem:
    """The request outlived its longest life, and the gateway did not end it."""
    late = ExecutorError("No answer was complete within the longest life of a request.")
    late.status = 504
    return problem_of(late)


def unfinished(finished: Finished) -> SluiceError:
    """The error that an ending stands for which is neither ``STOP`` nor ``LENGTH``."""
    reason = finished.reason
    if reason is EndReason.EXPIRED:
        message = finished.error or "The deadline passed before the answer was complete."
        return _ended(message, 429, "deadline_expired")
    if reason is EndReason.SHUTDOWN:
        message = finished.error or "The server is shutting down and ended this request."
        return _ended(message, 503, "shutting_down")
    if reason is EndReason.CANCELLED:
        return _ended(finished.error or "The request was cancelled.", 503, "cancelled")
    match finished.fault:
        case Fault.REQUEST:
            return InvalidRequest(finished.error)
        case Fault.ENGINE:
            failure = ExecutorError(finished.error or "The engine could not compute this request.")
            failure.status = 500
            return failure
        case Fault.REPLICA | None:
            return ReplicaGone(finished.error or "The replica that computed this request failed.")
        case _:
            assert_never(finished.fault)


def _row(kind: type) -> Row:
    for parent in kind.__mro__:
        if parent in TABLE:
            return TABLE[parent]
    return TABLE[InternalError]


def _status_of(error: Exception) -> int:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else 500


def _overloaded(error: Overloaded, row: Row) -> Problem:
    kind = row.type if error.status == 429 else "server_error"
    body = _error_object(error.message, kind, None, error.reason)
    told = error.reason
    if error.measured is not None and error.threshold is not None:
        body["measured"], body["threshold"] = _finite(error.measured), _finite(error.threshold)
        told = f"{told}; measured={error.measured:g}; threshold={error.threshold:g}"
    headers = [(b"x-sluice-reason", header_text(told)), *_retry_headers(error)]
    return Problem(error.status, body, tuple(headers))


def _retry_headers(error: Overloaded) -> Headers:
    """Advice for retrying: whole seconds rounded up, at least 1, and exact milliseconds."""
    retry_after_s = error.retry_after_s
    if retry_after_s is None or not math.isfinite(retry_after_s):
        return [(b"x-should-retry", b"false")]
    return [
        (b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()),
        (b"retry-after-ms", str(max(1, math.ceil(retry_after_s * 1000))).encode()),
        (b"x-should-retry", b"true" if error.should_retry else b"false"),
    ]


def _ended(message: str, status: int, reason: str) -> Overloaded:
    """An accepted request that the server gave up; one second is the least that HTTP can say."""
    return Overloaded(
        message, status=status, reason=reason, measured=None, threshold=None, retry_after_s=1.0
    )


def _routing_problem(
    status: int, message: str, code: str, *headers: tuple[bytes, bytes], **more: Any
) -> Problem:
    error = {**_error_object(message, "invalid_request_error", None, code), **more}
    return Problem(status, error, ((b"x-sluice-reason", code.encode()), *headers))


def _error_object(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": code}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


@lru_cache(256)
def header_text(text: str) -> bytes:
    """Text as a header value: printable ASCII only, so that no message can add a header."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return "".join(c if " " <= c <= "~" else "?" for c in text).encode()
