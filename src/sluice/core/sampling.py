"""How tokens of a sequence are to be chosen, and log-probabilities of those that were.

Values only: the policy never reads them, executors carry them out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one sequence are chosen. Defaults are plain sampling at temperature 1.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 switch their filter
    off. Penalties follow the OpenAI definition (presence, frequency: over generated tokens) and the
    usual one (repetition: divides or multiplies logits of tokens in prompt and output).
    ``logit_bias`` maps token ids to additions. ``seed`` makes the sequence reproducible whatever
    shares its batch; ``None`` lets the executor choose. ``logprobs_top`` is ``None`` for no
    log-probabilities, else the number of alternatives (0 to 20) beside the sampled token's own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs_top: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the model, before temperature and filters."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The sampled token's log-probability and the most likely alternatives, best first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]
