"""Refusals of admission as errors towards the client, in words it can act on.

Called by the gateway with what ``core.fleet`` decided. Which HTTP answer an error becomes is
decided in ``server/problems.py``.
"""

from sluice.core.errors import ContextExceeded, InvalidRequest, Overloaded, RequestError
from sluice.core.events import Reject
from sluice.core.request import Request


def refusal_error(reject: Reject, request: Request, model: str) -> RequestError | Overloaded:
    """The error that a refusal becomes towards the client, in words it can act on."""
    threshold = int(reject.threshold)
    match reject.reason:
        case "context_length_exceeded":
            return ContextExceeded(
                f"The prompt has {len(request.prompt)} tokens and max_tokens is "
                f"{request.output_tokens_max}; {model} holds {threshold} tokens for prompt and "
                "output together. Shorten the prompt or lower max_tokens.",
                param="messages" if len(request.prompt) + 1 > threshold else "max_tokens",
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
    return Overloaded(
        _overload_message(reject, choices, model),
        status=reject.status,
        reason=reject.reason,
        measured=reject.measured,
        threshold=reject.threshold,
        retry_after_s=reject.retry_after_s,
    )


def _overload_message(reject: Reject, choices: int, model: str) -> str:
    match reject.reason:
        case "queue_full":
            return (
                f"The queue of {model} is full: with this request {int(reject.measured)} places "
                f"would be in use and {int(reject.threshold)} exist (n={choices} takes "
                f"{choices}). Retry after the given time."
            )
        case "queue_deadline":
            return (
                f"The request waited {reject.measured:.1f} s for {model}; the limit is "
                f"{reject.threshold:.1f} s. Retry after the given time."
            )
        case "not_ready":
            return f"No replica of {model} is ready. Retry after the given time."
        case "load_failed":
            return (
                f"{model} could not be loaded; the server's log says why. Sending the request "
                "again cannot help before that is mended."
            )
        case "draining":
            return "This server is shutting down. Send the request to another one."
        case _:
            return f"{model} refused the request: {reject.reason}."
