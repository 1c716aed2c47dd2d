"""Retrieval before a request: the time that it takes and the tokens that it adds to the prompt.

Lognormal times, as those of searches over a network are, or one time for all. Used by ``sluice
plan``, which takes a percentile of it, and by ``sluice simulate``, which draws it for each request.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random
from statistics import NormalDist

from sluice.workload.asks import Ask, BadWorkload, Part, Workload

NS_PER_S = 1_000_000_000
_P99 = NormalDist().inv_cdf(0.99)
_PASSAGES_MAX, _TOKENS_MAX = 1000, 100_000


@dataclass(frozen=True, slots=True)
class RetrievalTime:
    """Its median and its 99th percentile, which are equal where it does not vary.

    After ``within_s`` nobody waits any more, and the prompt goes on without passages.
    """

    p50_s: float
    p99_s: float
    within_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.p50_s <= self.p99_s <= 86400.0:
            raise BadWorkload("retrieval must have 0s <= p50 <= p99 <= 24h")
        if self.p99_s and not self.p50_s:
            raise BadWorkload("retrieval whose p99 is above 0s needs a p50 above 0s")
        if self.within_s is not None and self.within_s <= 0:
            raise BadWorkload("retrieval must be waited for longer than 0s: within")

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p99_s / self.p50_s) / _P99 if self.p50_s else 0.0

    def quantile_s(self, share: float) -> float:
        """The time that this share of retrievals does not exceed."""
        found_s = self.p50_s * math.exp(self.sigma * NormalDist().inv_cdf(share))
        return found_s if self.within_s is None else min(found_s, self.within_s)

    def draw_s(self, chance: Random) -> float:
        """One retrieval, however long it takes."""
        return self.p50_s * math.exp(self.sigma * chance.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Retrieving:
    """Another workload whose requests are retrieved for before they come to the fleet.

    ``tokens`` are those of all passages of a request. The time counts from when the request would
    have come, as part of its TTFT.
    """

    workload: Workload
    time: RetrievalTime
    tokens: int = 0

    def asks(self, seed: int) -> Iterator[Ask]:
        """The requests in the order in which retrieval lets them go on, numbered in that order."""
        chance, number = Random(f"{seed}/retrieval"), 0
        waiting: list[tuple[int, int, Ask]] = []
        for ask in self.workload.asks(seed):
            while waiting and waiting[0][0] <= ask.at_ns:
                yield replace(heappop(waiting)[2], number=number)
                number += 1
            made = self._retrieved(ask, self.time.draw_s(chance))
            heappush(waiting, (made.at_ns, ask.number, made))
        while waiting:
            yield replace(heappop(waiting)[2], number=number)
            number += 1

    def _retrieved(self, ask: Ask, took_s: float) -> Ask:
        within_s, prompt = self.time.within_s, ask.prompt
        if within_s is not None and took_s > within_s:
            took_s = within_s
        elif self.tokens:
            # In front of the question, which is the last part, and its own as that is.
            *shared, question = prompt
            prompt = (*shared, Part(question.text, question.tokens + self.tokens))
        took_ns = round(took_s * NS_PER_S)
        leaves_ns = None if ask.leaves_ns is None else max(1, ask.leaves_ns - took_ns)
        return replace(
            ask,
            at_ns=ask.at_ns + took_ns,
            read_ns=ask.read_ns + took_ns,
            prompt=prompt,
            leaves_ns=leaves_ns,
        )


def passages_of(text: str) -> int:
    """The tokens of ``COUNTxTOKENS``, for example ``8x300``. Raises ``BadWorkload``."""
    count, x, tokens = text.partition("x")
    if not (x and text.isascii() and count.isdecimal() and tokens.isdecimal() and len(text) < 20):
        raise BadWorkload(f'passages must be COUNTxTOKENS, for example "8x300", not "{text}"')
    if not (int(count) <= _PASSAGES_MAX and int(tokens) <= _TOKENS_MAX):
        raise BadWorkload(f"passages are at most {_PASSAGES_MAX}x{_TOKENS_MAX}, not {text}")
    return int(count) * int(tokens)
