"""What a remote engine's error means to the fleet, and what a client is told of it: two tables.

Called by ``fleet_driver`` for each attempt that failed, and by ``relay`` once the call is over.
Which attempts are repeated is the fleet's decision.
"""

from sluice.core.errors import EngineRefused, ExecutorError, Overloaded, SluiceError
from sluice.core.events import Outcome
from sluice.executors.stream import (
    ClientError,
    ConnectFailed,
    ConnectFault,
    FirstTokenLate,
    OverloadKind,
    Reply,
    UpstreamError,
    UpstreamFailed,
    UpstreamOverloaded,
)

# An account without credit gets none by waiting, and is looked at again after so long.
_NO_CREDIT_REST_NS = 60_000_000_000


def outcome_of(error: UpstreamError) -> Outcome:
    """How the attempt went, as the fleet counts it."""
    match error:
        case ClientError() if not error.about_key:
            return Outcome.VOID
        case UpstreamOverloaded() | ConnectFailed(fault=ConnectFault.CROWDED):
            return Outcome.FULL
        case _:
            return Outcome.FAULT


def rest_ns_of(error: UpstreamError) -> int | None:
    """How long the engine asks to be left alone; ``None`` where it does not say."""
    if not isinstance(error, UpstreamOverloaded):
        return None
    if error.kind is OverloadKind.QUOTA:
        return _NO_CREDIT_REST_NS
    return None if error.retry_after_s is None else round(error.retry_after_s * 1e9)


def error_for_client(error: UpstreamError) -> SluiceError:
    """The error towards the client. The engine's own words are passed on, our key's trouble not."""
    match error:
        case ClientError() if error.about_key:
            return _failed(f"{error.upstream}: the engine does not accept this server's key", 502)
        case ClientError():
            return _passed_on(error.message, error.reply)
        case UpstreamOverloaded():
            return _overloaded(error)
        case UpstreamFailed():
            return _failed(str(error), 502)
        case FirstTokenLate():
            return _failed(str(error), 504)
        case _:
            return _failed(str(error), 502)


def _failed(message: str, status: int) -> ExecutorError:
    failed = ExecutorError(message)
    failed.status = status
    return failed


def _passed_on(message: str, reply: Reply) -> EngineRefused:
    kind = reply.header("content-type") or "application/json"
    return EngineRefused(message, status=reply.status, body=reply.body, content_type=kind)


def _overloaded(error: UpstreamOverloaded) -> Overloaded:
    """The engine takes nothing: its own word on when to come back is passed on."""
    loading = error.kind is OverloadKind.LOADING
    return Overloaded(
        str(error),
        status=503 if loading else error.reply.status if error.reply.status == 503 else 429,
        reason="not_ready" if loading else "upstream_busy",
        measured=None,
        threshold=None,
        retry_after_s=None if error.kind is OverloadKind.QUOTA else error.retry_after_s or 1.0,
    )
