"""Facts about one generation request, as the policy sees them.

Text never enters here: a prompt is token ids, an ending is a reason from a closed set. Sampling
parameters, stop strings and grammars belong to the runtime; the policy needs none of them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class EndReason(StrEnum):
    """Why a request, or one sequence of it, ended. Every accepted request gets exactly one."""

    STOP = "stop"  # end-of-sequence token, stop string, stop token or completed grammar
    LENGTH = "length"  # output_tokens_max or the context was reached
    CANCELLED = "cancelled"  # the client left or asked to stop
    EXPIRED = "expired"  # the queue deadline or the request's own deadline passed
    FAILED = "failed"  # the step that held it failed, or its replica was lost
    SHUTDOWN = "shutdown"  # the grace period of a drain ran out


# The endings of a whole answer; with any other reason something is missing.
COMPLETE = (EndReason.STOP, EndReason.LENGTH)


class Phase(StrEnum):
    """Exclusive stages of a request's life; their durations sum to the whole."""

    RETRIEVAL = "retrieval"
    ADMISSION = "admission"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


class Rung(StrEnum):
    """What may become of a request that cannot start at once, in the order its SLO class names."""

    SHORTEN = "shorten"  # its output is limited to fewer tokens than it asked for
    SMALLER = "smaller"  # the smaller model that its model names answers it
    QUEUE = "queue"  # it waits, where it is predicted to be on time all the same
    REFUSE = "refuse"  # it is refused at once
    # Never in a ladder: its model cannot serve at all, and names another one for that.
    FALLBACK = "fallback"


# The ladder of a request whose class names none, or whose client forbids degrading.
LADDER_DEFAULT = (Rung.QUEUE, Rung.REFUSE)
# Tiers run from 0, the strictest, to this one; lower is more urgent everywhere.
TIER_MAX = 9
TIER_DEFAULT = 1
# Lets requests without a first token target be ordered among those with one.
TTFT_NS_DEFAULT = 1_000_000_000


class SequenceId(NamedTuple):
    """One choice of one request."""

    request_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class Request:
    """One generation asked for, checked and tokenised.

    ``arrived_ns`` is the instant at which the first byte of the request was accepted, before
    tokenising. ``ttft_due_ns`` and ``tpot_ns`` are the targets of its SLO class, ``None`` where it
    has none; ``quantile`` is the share of requests that are to meet them. ``deadline_ns`` is the
    instant after which an answer is worthless to the caller, ``queue_due_ns`` the one at which its
    class ends its wait. Tier 0 is the strictest.

    ``overload`` is what may become of it when it cannot start at once, in order; ``SHORTEN``
    limits its output to ``shorten_tokens``. ``degraded`` holds the rungs that were taken already.
    ``weight`` is its tenant's share against the other tenants'. ``body_bytes`` is the memory that
    it holds while it waits. ``likeness`` is equal for requests that ask for the same and known
    before they are tokenised, 0 where nobody computed it. ``may_fall_back`` allows another model to
    answer where its own cannot serve.

    A request whose prompt is tokenised elsewhere has none: ``prompt_estimate`` is then the number
    of its tokens as far as it is known, and ``prefixes`` stand for the blocks of its prompt, as
    ``routing.block_chain`` makes them of tokens.
    """

    id: str
    arrived_ns: int
    prompt: tuple[int, ...]
    output_tokens_max: int
    choices: int = 1
    tier: int = TIER_DEFAULT
    tenant: str = ""
    weight: float = 1.0
    slo_class: str = ""
    ttft_due_ns: int | None = None
    tpot_ns: int | None = None
    quantile: float = 0.95
    deadline_ns: int | None = None
    queue_due_ns: int | None = None
    overload: tuple[Rung, ...] = LADDER_DEFAULT
    shorten_tokens: int | None = None
    degraded: tuple[Rung, ...] = ()
    body_bytes: int = 0
    likeness: int = 0
    may_fall_back: bool = True
    prompt_estimate: int = 0
    prefixes: tuple[int, ...] = ()
    prompt_tokens: int = field(init=False)
    """Tokens of the prompt, estimated where it is not tokenised here."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", len(self.prompt) or self.prompt_estimate)

    @property
    def tokens_asked(self) -> int:
        """The most tokens that it may take, its prompt counted once."""
        return self.prompt_tokens + self.choices * self.output_tokens_max


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. The prompt counts once, however many choices share it."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Nanoseconds spent in each phase; the sum is the time from arrival to ending."""

    retrieval_ns: int = 0
    admission_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    preempted_ns: int = 0
