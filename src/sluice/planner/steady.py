"""The steady state of a replica with a fixed number of requests in it.

Each of ``concurrency`` requests is replaced by a new one when it ends, as closed-loop benchmarks
do and as a saturated replica does by itself. Prefill is mixed into decode steps in chunks, so its
time is what the mixed steps take longer. All in closed form; queueing is in ``estimate.py``.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sluice.planner.coefficients import Coefficients
from sluice.planner.work import Batch, Deployment, Work, work_of

# What engines on large GPUs take where nobody says otherwise.
CHUNK_TOKENS_MAX = 8192


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean prompt and output of the requests, in tokens, and the share of the prompt that the
    prefix cache holds already.

    ``output_variation`` is the standard deviation of outputs over their mean.
    """

    prompt: float
    output: float
    cached: float = 0.0
    output_variation: float = 0.0

    @property
    def computed(self) -> float:
        """Prompt tokens that are computed."""
        return self.prompt * (1.0 - self.cached)

    @property
    def past(self) -> float:
        """Prompt tokens that are cached: what is computed attends to them."""
        return self.prompt * self.cached

    @property
    def resident_tokens(self) -> float:
        """Mean tokens that a request holds while it decodes.

        Averaged over time, in which long outputs are seen more often: E[n^2] / (2 E[n]).
        """
        return self.prompt + self.output / 2.0 * (1.0 + self.output_variation**2)


class Steady(NamedTuple):
    """The two kinds of steps in a steady state and the share of those with prefill."""

    decode: Work
    mixed: Work
    mixed_share: float

    def step_s(self, coefficients: Coefficients) -> float:
        """Mean time from a token of a request to its next."""
        decode = coefficients.step_duration_s(self.decode)
        mixed = coefficients.step_duration_s(self.mixed)
        return decode + self.mixed_share * (mixed - decode)


def steady_state(
    deployment: Deployment,
    lengths: Lengths,
    concurrency: float,
    *,
    others: float = 1.0,
    chunk_tokens: float = CHUNK_TOKENS_MAX,
) -> Steady:
    """Steps of a replica with ``concurrency`` requests in it, and prefill in chunks of at most
    ``chunk_tokens`` where that keeps up with the arrivals.

    ``others`` requests do not count into the prefill that a request sees while it decodes: its
    own is over by then.
    """
    rows = concurrency / deployment.layout.groups
    context = lengths.resident_tokens
    decode = work_of(deployment, Batch(rows, context))
    prefill = max(0.0, rows - others / deployment.layout.groups) * lengths.computed
    if prefill <= 0.0:
        return Steady(decode, decode, 0.0)
    chunk = max(min(lengths.computed, chunk_tokens), prefill / lengths.output)
    batch = Batch(rows, context, chunk, lengths.computed, lengths.past)
    return Steady(decode, work_of(deployment, batch), prefill / chunk / lengths.output)
