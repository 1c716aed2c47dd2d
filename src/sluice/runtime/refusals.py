"""Refusals of admission as errors towards the client, in words it can act on.

Called by the gateway with what ``core.fleet`` decided. Which HTTP answer an error becomes is
decided in ``server/problems.py``.
"""

from sluice.core.errors import ContextExceeded, InvalidRequest, Overloaded, RequestError
from sluice.core.events import Reject
from sluice.core.request import Request

# Beyond milliseconds: nanoseconds are what is compared.
_DIGITS_MAX = 9


def refusal_error(reject: Reject, request: Request, model: str) -> RequestError | Overloaded:
    """The error that a refusal becomes towards the client, in words it can act on."""
    threshold = int(reject.threshold)
    match reject.reason:
        case "context_length_exceeded":
            return ContextExceeded(
                f"The prompt has {request.prompt_tokens} tokens and max_tokens is "
                f"{request.output_tokens_max}; {model} holds {threshold} tokens for prompt and "
                "output together. Shorten the prompt or lower max_tokens.",
                param="messages" if request.prompt_tokens + 1 > threshold else "max_tokens",
            )
        case "too_many_choices":
            return InvalidRequest(
                f"n is {request.choices}; {model} generates at most {threshold} choices at a "
                "time. Lower n or send several requests.",
                param="n",
                code="too_many_choices",
            )
        case _:
            return overload_error(reject, request.choices, model)


def overload_error(reject: Reject, choices: int, model: str) -> Overloaded:
    """The error of a refusal for want of capacity, whatever the prompt is."""
    error = Overloaded(
        _overload_message(reject, choices, model),
        status=reject.status,
        reason=reject.reason,
        measured=reject.measured,
        threshold=reject.threshold,
        retry_after_s=reject.retry_after_s,
    )
    error.should_retry = reject.should_retry
    return error


def too_many_prompts(prompts: int, limit: str) -> InvalidRequest:
    """The error of a request whose prompts, each a request of its own, never fit in at once."""
    return InvalidRequest(
        f"{prompts} prompts are {prompts} requests that are served together; {limit}. Send fewer "
        "prompts in one request.",
        param="prompt",
        code="too_many_prompts",
    )


def _overload_message(reject: Reject, choices: int, model: str) -> str:
    """What was measured, what the limit is, and what to change."""
    told = _late(reject, model) or _queue(reject, choices, model) or _tenant(reject)
    if told is not None:
        return f"{told} {_again(reject)}".rstrip()
    match reject.reason:
        case "not_ready":
            return f"No replica of {model} is ready. {_again(reject)}".rstrip()
        case "not_held" | "held_full":
            return f"{_not_held(reject, model)} {_again(reject)}".rstrip()
        case "upstream_busy":
            return (
                f"The engines of {model} ask to be left alone for {reject.measured:.3g} s, and a "
                f"request waits {reject.threshold:.3g} s at most. {_again(reject)}"
            ).rstrip()
        case "load_failed":
            return (
                f"{model} could not be loaded; the server's log says why. Sending the request "
                "again cannot help before that is mended."
            )
        case "draining":
            return "This server is shutting down. Send the request to another one."
        case _:
            return f"{model} refused the request: {reject.reason}."


def _not_held(reject: Reject, model: str) -> str:
    """Why a request does not wait for a replica that is being started."""
    none = f"No replica of {model} is ready, and one is being started"
    if reject.reason == "held_full":
        measured, threshold = round(reject.measured), round(reject.threshold)
        return (
            f"{none}: {measured} places would wait for it with this request, and "
            f"{threshold} may (autoscale.hold_requests_max)."
        )
    measured_s, threshold_s = _told_apart(reject.measured, reject.threshold)
    return (
        f"{none}: it is predicted to be ready in {measured_s}, and requests are held for "
        f"{threshold_s} at most (autoscale.hold_max)."
    )


def _queue(reject: Reject, choices: int, model: str) -> str | None:
    """Refusals for want of room to wait."""
    measured, threshold = round(reject.measured), round(reject.threshold)
    match reject.reason:
        case "queue_full":
            return (
                f"No place of {model} is free: with this request {measured} would be in use, or "
                f"kept for clients that were told to come now, and {threshold} exist "
                f"(n={choices} takes {choices})."
            )
        case "no_free_place":
            return (
                f"{model} cannot start the request at once and its class does not wait: with this "
                f"request {measured} places would be in use or waited for, and {threshold} are "
                f"for requests like it (n={choices} takes {choices})."
            )
        case "gives_way":
            return (
                f"The request gives way to another one of {model}, which beside it would be late, "
                f"or without room, by {_seconds(reject.measured)}."
            )
        case "queue_tokens":
            return (
                f"The queue of {model} holds too many prompt tokens: with this request it would "
                f"be {measured} of {threshold}. A shorter prompt may fit."
            )
        case "queue_bytes":
            return (
                f"The requests that wait for {model} take up their memory: with this one it would "
                f"be {measured} of {threshold} bytes. A shorter request may fit."
            )
        case _:
            return None


def _late(reject: Reject, model: str) -> str | None:
    """Refusals of what would not be in time."""
    measured, threshold = _told_apart(reject.measured, reject.threshold)
    match reject.reason:
        case "predicted_late":
            return (
                f"The first token from {model} is predicted {measured} after the request's "
                f"arrival; the target of its class is {threshold}. Allow more time by another "
                "class."
            )
        case "deadline_infeasible":
            return (
                f"The answer from {model} is predicted to take {measured}; until its deadline "
                f"there are {threshold}. Lower max_tokens or allow more time."
            )
        case "deadline_past":
            return (
                f"The deadline of the request passed {measured} before it could be looked at. "
                "Allow more time."
            )
        case "queue_deadline":
            return f"The request waited {measured} for {model}; the limit is {threshold}."
        case _:
            return None


def _tenant(reject: Reject) -> str | None:
    """Refusals by the limits of a tenant."""
    measured, threshold = round(reject.measured), round(reject.threshold)
    match reject.reason:
        case "requests_per_minute":
            return (
                f"With this request it would be {measured} requests within a minute; the limit of "
                f"this account is {threshold}."
            )
        case "tokens_per_minute":
            return (
                f"With this request, its prompt and all that it may generate, it would be "
                f"{measured} tokens within a minute; the limit of this account is {threshold}. A "
                "lower max_tokens reserves less."
            )
        case "concurrency":
            return (
                f"With this request it would be {measured} requests at the same time; the limit "
                f"of this account is {threshold}."
            )
        case _:
            return None


def _again(reject: Reject) -> str:
    """Whether and when to come back."""
    if reject.retry_after_s is None:
        match reject.reason:
            case "tokens_per_minute" | "deadline_past":
                return "Sending it again unchanged cannot help."
            case "predicted_late" | "deadline_infeasible":
                return "It would be late with nothing else to serve, too."
            case _:
                return "When to come back cannot be told."
    if not reject.should_retry:
        return "There is no room for longer than a client should wait."
    return "Retry after the given time."


def _told_apart(measured_s: float, threshold_s: float) -> tuple[str, str]:
    """Two times that were compared, with so many digits that they differ in words."""
    told = _seconds(measured_s, 0), _seconds(threshold_s, 0)
    for more in range(1, _DIGITS_MAX):
        if told[0] != told[1] or measured_s == threshold_s:
            break
        told = _seconds(measured_s, more), _seconds(threshold_s, more)
    return told


def _seconds(measured_s: float, more: int = 0) -> str:
    """A time in words, with as many digits as say something, and some more."""
    if abs(round(measured_s, 3 + more)) < 1:
        return f"{measured_s * 1e3:.{more}f} ms"
    return f"{measured_s:.{1 + more}f} s"
