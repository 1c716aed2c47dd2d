"""What is refused, and what a refused client is told.

Pure judgements over numbers that ``core/fleet.py`` hands in: whether a request can ever run on a
replica, and how long the places in use are predicted to take. No state of the fleet is changed
here; ``runtime/refusals.py`` finds the words.

How choices count: a request with ``n`` choices takes ``n`` places, both of the bound on places and
of a replica's ``sequences_max``.
"""

from dataclasses import dataclass
from random import Random

from sluice.core.events import Reject, ReplicaLimits, Report
from sluice.core.request import PhaseTimes, Request, Usage

NS_PER_S = 1_000_000_000

# Weight of the past against one completed request: about ten requests make the memory.
KEPT_SHARE = 0.9
# Stand-ins until the first completion or report; Retry-After needs some number from the start.
SERVICE_NS_UNKNOWN = 1 * NS_PER_S
OUTPUT_TOKENS_UNKNOWN = 256
# A request that outlived its prediction is taken to need at least this share of it again.
OVERDUE_SHARE = 0.1
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
    prompt_tokens = len(request.prompt)
    if prompt_tokens + 1 > room:
        return Refusal(400, "context_length_exceeded", prompt_tokens, room)
    asked = prompt_tokens + request.output_tokens_max
    if asked > room:
        return Refusal(400, "context_length_exceeded", asked, room)
    if request.choices > limits.sequences_max:
        return Refusal(400, "too_many_choices", request.choices, limits.sequences_max)
    return None


class ServiceTimes:
    """Learns from completed requests how long requests of a model take once they run.

    Prefill and decode are learned apart, as time per token, so that a request is predicted from its
    own prompt and from the output lengths seen of late. Load reports stand in until the first
    completion.
    """

    def __init__(self) -> None:
        self._prefill_ns = 0.0
        self._prefill_tokens = 0.0
        self._decode_ns = 0.0
        self._output_tokens = 0.0
        self._requests = 0.0
        self._report: Report | None = None

    def reported(self, report: Report) -> None:
        """Take a load report as a stand-in for what completions will teach."""
        self._report = report

    def completed(self, usage: Usage, phases: PhaseTimes, choices: int) -> None:
        """Learn from one request that ran to its end."""
        computed = max(1, usage.prompt_tokens - usage.cached_tokens)
        self._prefill_ns = KEPT_SHARE * self._prefill_ns + phases.prefill_ns
        self._prefill_tokens = KEPT_SHARE * self._prefill_tokens + computed
        decode_ns = phases.decode_ns + phases.preempted_ns
        self._decode_ns = KEPT_SHARE * self._decode_ns + decode_ns
        self._output_tokens = KEPT_SHARE * self._output_tokens + usage.completion_tokens / choices
        self._requests = KEPT_SHARE * self._requests + 1.0

    def predict_output_tokens(self, output_tokens_max: int) -> int:
        """Predicted output of one choice."""
        if not self._requests:
            return min(output_tokens_max, OUTPUT_TOKENS_UNKNOWN)
        return min(output_tokens_max, round(self._output_tokens / self._requests))

    def predict_ns(self, prompt_tokens: int, output_tokens_max: int) -> int:
        """Predicted time from the start of prefill to the last token, for one sequence."""
        output = self.predict_output_tokens(output_tokens_max)
        if self._requests:
            per_prefill = self._prefill_ns / self._prefill_tokens
            per_decode = self._decode_ns / max(1.0, self._output_tokens)
            return round(prompt_tokens * per_prefill + output * per_decode)
        report = self._report
        if report is None or report.step_ns <= 0 or report.prefill_tokens_per_s <= 0:
            return SERVICE_NS_UNKNOWN
        prefill_ns = prompt_tokens * NS_PER_S / report.prefill_tokens_per_s
        return round(prefill_ns + output * report.step_ns)


def remaining_ns(predicted_ns: int, run_ns: int) -> int:
    """What is left of a predicted time after ``run_ns`` of it."""
    return max(predicted_ns - run_ns, round(OVERDUE_SHARE * predicted_ns))


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
