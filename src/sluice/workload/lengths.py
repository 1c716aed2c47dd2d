"""How long prompts and answers are, drawn one request after the other.

A distribution draws as many random numbers for each request whatever its parameters are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, isfinite, log, sqrt
from random import Random

from sluice.workload.asks import BadWorkload

TOKENS_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class Fixed:
    """All have the same length."""

    tokens: int

    def draw(self, draw: Random) -> int:
        """One length."""
        draw.random()
        return self.tokens


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal of this mean and coefficient of variation, cut off at ``tokens_max``.

    Prompt and answer lengths of chat services are near to it.
    """

    mean: float
    cv: float
    tokens_max: int = TOKENS_MAX

    def draw(self, draw: Random) -> int:
        """One length."""
        variance = log(1.0 + self.cv**2)
        tokens = exp(log(self.mean) - variance / 2.0 + sqrt(variance) * draw.gauss(0.0, 1.0))
        return max(1, min(self.tokens_max, round(tokens)))


@dataclass(frozen=True, slots=True)
class Empirical:
    """A distribution by its quantiles: ``(share, tokens)`` in rising order, straight between."""

    quantiles: tuple[tuple[float, float], ...]

    def draw(self, draw: Random) -> int:
        """One length."""
        at = draw.random()
        low_share, low = self.quantiles[0]
        for share, tokens in self.quantiles:
            if at <= share:
                part = (at - low_share) / (share - low_share) if share > low_share else 1.0
                return max(1, round(low + part * (tokens - low)))
            low_share, low = share, tokens
        return max(1, round(low))

    @property
    def mean(self) -> float:
        """The mean of what is drawn."""
        steps = pairwise(self.quantiles)
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2.0 for a, b in steps)


Distribution = Fixed | Lognormal | Empirical


@dataclass(frozen=True, slots=True)
class Separate:
    """Prompt and answer drawn apart."""

    prompt: Distribution
    output: Distribution

    def draw(self, draw: Random) -> tuple[int, int]:
        """Prompt and answer tokens of one request."""
        return self.prompt.draw(draw), self.output.draw(draw)


@dataclass(frozen=True, slots=True)
class Joint:
    """Pairs of prompt and answer as they were seen together; each is as likely."""

    pairs: Sequence[tuple[int, int]]

    def draw(self, draw: Random) -> tuple[int, int]:
        """Prompt and answer tokens of one request."""
        return self.pairs[draw.randrange(len(self.pairs))]


Lengths = Separate | Joint


def lengths_of(prompt: float, output: float, spread: float = 0.0) -> Separate:
    """Lengths with these means; ``spread`` is their coefficient of variation, 0 for fixed ones.

    Raises ``BadWorkload``.
    """
    for what, value in (("input", prompt), ("output", output)):
        if not isfinite(value) or not 1 <= value <= TOKENS_MAX:
            raise BadWorkload(f"{what} must be 1 to {TOKENS_MAX:,} tokens, not {value:g}")
    if not isfinite(spread) or not 0.0 <= spread <= 10.0:
        raise BadWorkload(f"the spread of lengths must be 0 to 10, not {spread:g}")
    if spread == 0.0:
        return Separate(Fixed(round(prompt)), Fixed(round(output)))
    return Separate(Lognormal(prompt, spread), Lognormal(output, spread))
