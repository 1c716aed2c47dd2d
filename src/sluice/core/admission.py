"""What is refused, and what a refused client is told.

Pure judgements over what ``core/fleet.py`` hands in: whether a request can ever run on a replica,
and what a refusal says. No state of the fleet is changed here; ``runtime/refusals.py`` finds the
words.

How choices count: a request with ``n`` choices takes ``n`` places, both of the bound on places and
of a replica's ``sequences_max``.
"""

from dataclasses import dataclass
from random import Random

from sluice.core.events import Reject, ReplicaLimits
from sluice.core.request import Request

NS_PER_S = 1_000_000_000

# What a refusal can be for, with the unit of its ``measured`` and ``threshold``.
REASONS = {
    "queue_full": "places",
    "queue_tokens": "prompt tokens",
    "queue_bytes": "bytes",
    "no_free_place": "places",
    "gives_way": "seconds by which another request would be late or without room",
    "predicted_late": "seconds from arrival to first token",
    "deadline_infeasible": "seconds from now to the last token",
    "deadline_past": "seconds since the deadline",
    "queue_deadline": "seconds of waiting",
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "concurrency": "requests",
    "context_length_exceeded": "tokens",
    "too_many_choices": "choices",
    "upstream_busy": "seconds for which the engine asks to be left alone",
    "not_ready": "replicas",
    "not_held": "seconds until a replica is ready",
    "held_full": "places of requests that are held until a replica is ready",
    "load_failed": "replicas",
    "draining": "seconds",
}

# Retry-After is stretched by up to this share, so that refused clients do not return together.
RETRY_SPREAD = 0.25


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused: a code, the number measured and the limit it was compared with.

    ``wait_ns`` is the predicted time until it could be served, ``None`` where it never can.
    """

    status: int
    reason: str
    measured: float
    threshold: float
    wait_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Absence:
    """How a model stands of which no replica serves.

    One is predicted to be ready in ``ready_in_ns``, ``None`` where all failed. ``held`` says that a
    request which comes now waits for it and is not refused, ``resting`` that it may be without
    replicas: a request starts one.
    """

    ready_in_ns: int | None
    held: bool
    resting: bool


def tokens_max(limits: ReplicaLimits) -> int:
    """The longest sequence, prompt and output together, within these limits."""
    return min(limits.context_tokens_max, limits.block_size * limits.blocks_total)


def never_runs(request: Request, limits: ReplicaLimits) -> Refusal | None:
    """Why the request can never run within these limits, ``None`` if it can.

    A prompt needs room for itself and one token. ``output_tokens_max`` counts whole: a caller that
    sets none is given the rest of the context before it gets here, and one that asks for more than
    fits is refused, not cut short.
    """
    room = tokens_max(limits)
    prompt_tokens = request.prompt_tokens
    if prompt_tokens + 1 > room:
        return Refusal(400, "context_length_exceeded", prompt_tokens, room)
    asked = prompt_tokens + request.output_tokens_max
    if asked > room:
        return Refusal(400, "context_length_exceeded", asked, room)
    if request.choices > limits.sequences_max:
        return Refusal(400, "too_many_choices", request.choices, limits.sequences_max)
    return None


def unservable(request: Request, limits: ReplicaLimits) -> str:
    """Why a replica cannot serve what it was given, empty if it can. The fleet checks it first."""
    if not request.prompt or request.choices < 1 or request.output_tokens_max < 1:
        return "a request needs a prompt token, a choice and an output token at least"
    never = never_runs(request, limits)
    if never is None:
        return ""
    return f"{never.reason}: asked for {never.measured:.0f}, held are {never.threshold:.0f}"


def reject(request_id: str, refusal: Refusal, chance: Random) -> Reject:
    """The refusal as it is told to the client: its wait is stretched at random, never shortened."""
    retry_after_s = None
    if refusal.wait_ns is not None:
        retry_after_s = refusal.wait_ns / NS_PER_S * (1.0 + RETRY_SPREAD * chance.random())
    return Reject(
        request_id=request_id,
        status=refusal.status,
        reason=refusal.reason,
        measured=refusal.measured,
        threshold=refusal.threshold,
        retry_after_s=retry_after_s,
    )
