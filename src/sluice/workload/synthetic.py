"""A workload drawn from distributions: arrivals, lengths, names, and conversations.

Every property has a random stream of its own, so that changing one leaves the others as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from sluice.workload.arrivals import Arrivals, Poisson, checked_rate
from sluice.workload.asks import NS_PER_S, Ask, Part, own_text, shared_text
from sluice.workload.lengths import Lengths
from sluice.workload.mixes import Mix


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations: each turn asks with all that came before it.

    ``turns`` is the mean number of requests of a session, geometric; ``think_s`` the mean time from
    one to the next, exponential. All sessions begin with the same ``system_tokens``.
    """

    turns: float = 1.0
    think_s: float = 30.0
    system_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests at ``rate_rps`` on average. With sessions of several turns it is the rate of all
    turns together; the first one is as long as ``lengths`` say and each further one adds as much.

    ``output_tokens_max`` is the limit that clients set.
    """

    rate_rps: float
    lengths: Lengths
    arrivals: Arrivals = field(default_factory=Poisson)
    mix: Mix = field(default_factory=Mix)
    sessions: Sessions = field(default_factory=Sessions)
    output_tokens_max: int | None = None

    def asks(self, seed: int) -> Iterator[Ask]:
        """See ``Workload``; endless."""
        rate_rps = checked_rate(self.rate_rps)
        if self.sessions.turns <= 1.0:
            return self._single(rate_rps, seed)
        return self._conversations(rate_rps / self.sessions.turns, seed)

    def _single(self, rate_rps: float, seed: int) -> Iterator[Ask]:
        names, sizes = Names(self.mix, seed), Random(f"{seed}/lengths")
        times = self.arrivals.seconds(rate_rps, Random(f"{seed}/arrivals"))
        system = Part(shared_text(0), self.sessions.system_tokens)
        for number, at_s in enumerate(times):
            prompt, output = self.lengths.draw(sizes)
            own = Part(own_text(number), prompt)
            parts = (system, own) if system.tokens else (own,)
            yield self._ask(number, round(at_s * NS_PER_S), parts, output, names.draw())

    def _conversations(self, rate_rps: float, seed: int) -> Iterator[Ask]:
        """The turns of all sessions by time: those that are due before the next session begins."""
        sizes, turns = Random(f"{seed}/lengths"), Random(f"{seed}/turns")
        names = Names(self.mix, seed)
        numbers = count()
        pending: list[tuple[int, int, int, tuple[str, str, str]]] = []
        starts = self.arrivals.seconds(rate_rps, Random(f"{seed}/arrivals"))
        for session, at_s in enumerate(starts, 1):
            start_ns = round(at_s * NS_PER_S)
            heappush(pending, (start_ns, session, 0, names.draw()))
            while pending and pending[0][0] <= start_ns:
                at_ns, of, history, named = heappop(pending)
                prompt, output = self.lengths.draw(sizes)
                own = Part(shared_text(of), history + prompt)
                system = Part(shared_text(0), self.sessions.system_tokens)
                parts = (system, own) if system.tokens else (own,)
                yield self._ask(next(numbers), at_ns, parts, output, named)
                more = turns.random() >= 1.0 / self.sessions.turns
                think_ns = round(turns.expovariate(1.0) * self.sessions.think_s * NS_PER_S)
                if more:
                    heappush(pending, (at_ns + think_ns, of, own.tokens + output, named))

    def _ask(
        self,
        number: int,
        at_ns: int,
        parts: tuple[Part, ...],
        output: int,
        named: tuple[str, str, str],
    ) -> Ask:
        return Ask(number, at_ns, parts, output, self.output_tokens_max, *named)


class Names:
    """Draws model, class and tenant of each request from streams of their own."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._shares = (mix.models, mix.classes, mix.tenants)
        kinds = ("models", "classes", "tenants")
        self._draws = tuple(Random(f"{seed}/{kind}") for kind in kinds)

    def draw(self) -> tuple[str, str, str]:
        """Model, class and tenant of the next request."""
        model, slo, tenant = (
            shares.draw(draw) for shares, draw in zip(self._shares, self._draws, strict=True)
        )
        return model, slo, tenant
