"""A workload drawn from distributions: arrivals, lengths, names, and conversations.

Every property has a random stream of its own, so that changing one leaves the others as they are;
each conversation has its own, so that it is the same one at any rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from itertools import count
from math import log
from operator import itemgetter
from random import Random

from sluice.core.admission import NS_PER_S
from sluice.workload.arrivals import Arrivals, Poisson, checked_rate
from sluice.workload.asks import Ask, Part, own_text, shared_text
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
    turns together, from the beginning on: it begins with as many sessions under way as there are
    later. The first turn is as long as ``lengths`` say and each further one adds as much.

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

    def mean_prompt_tokens(self, prompt: float, output: float) -> float:
        """Mean prompt of all turns where ``lengths`` have these means: at a random turn of sessions
        with a geometric number of turns, ``turns - 1`` were before it on average."""
        return (
            self.sessions.system_tokens + prompt + (self.sessions.turns - 1.0) * (prompt + output)
        )

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
        numbers = count()
        pending: list[tuple[int, int, _Session]] = []
        starts = self.arrivals.seconds(rate_rps, Random(f"{seed}/arrivals"))
        fresh = zip(starts, self._sessions(seed, 2), strict=False)
        for at_s, session in merge(self._under_way(rate_rps, seed), fresh, key=itemgetter(0)):
            start_ns = round(at_s * NS_PER_S)
            heappush(pending, (start_ns, session.text, session))
            while pending and pending[0][0] <= start_ns:
                at_ns, text, of = heappop(pending)
                own, output = of.turn(self.lengths)
                system = Part(shared_text(0), self.sessions.system_tokens)
                parts = (system, own) if system.tokens else (own,)
                yield self._ask(next(numbers), at_ns, parts, output, of.named)
                more, think_s = of.after(self.sessions)
                if more:
                    heappush(pending, (at_ns + round(think_s * NS_PER_S), text, of))

    def _sessions(self, seed: int, first: int) -> Iterator["_Session"]:
        """Sessions with every second number from ``first``, each with a text and names of its own;
        0 is the system's text."""
        names = Names(self.mix, f"{seed}/{first}")
        return (_Session(f"{seed}/{number}", number, names.draw()) for number in count(first, 2))

    def _under_way(self, rate_rps: float, seed: int) -> Iterator[tuple[float, "_Session"]]:
        """The next turns of the sessions that began before, by time.

        As many as there are on average (Little's law), Poisson. Exponential times have no memory:
        at any time a session has as long to think as from the start.
        """
        mean = rate_rps * (self.sessions.turns - 1.0) * self.sessions.think_s
        sessions = self._sessions(seed, 1)
        for unit in Poisson().seconds(1.0, Random(f"{seed}/under-way")):
            if unit >= mean:
                return
            session = next(sessions)
            more = True
            while more:
                session.turn(self.lengths)
                more, _ = session.after(self.sessions)
            yield -self.sessions.think_s * log(1.0 - unit / mean), session

    def _ask(
        self,
        number: int,
        at_ns: int,
        parts: tuple[Part, ...],
        output: int,
        named: tuple[str, str, str],
    ) -> Ask:
        return Ask(number, at_ns, parts, output, self.output_tokens_max, *named)


class _Session:
    """One conversation while it goes on, with random streams of its own."""

    def __init__(self, seed: str, number: int, named: tuple[str, str, str]) -> None:
        self.text, self.named = shared_text(number), named
        self._sizes, self._turns = Random(f"{seed}/lengths"), Random(f"{seed}/turns")
        self._history = 0

    def turn(self, lengths: Lengths) -> tuple[Part, int]:
        """Its next question with all that came before, and the length of the answer."""
        prompt, output = lengths.draw(self._sizes)
        own = Part(self.text, self._history + prompt)
        self._history = own.tokens + output
        return own, output

    def after(self, sessions: Sessions) -> tuple[bool, float]:
        """Whether another turn follows, and in how many seconds."""
        more = self._turns.random() >= 1.0 / sessions.turns
        return more, self._turns.expovariate(1.0) * sessions.think_s


class Names:
    """Draws model, class and tenant of each request from streams of their own."""

    def __init__(self, mix: Mix, seed: int | str) -> None:
        self._shares = (mix.models, mix.classes, mix.tenants)
        kinds = ("models", "classes", "tenants")
        self._draws = tuple(Random(f"{seed}/{kind}") for kind in kinds)

    def draw(self) -> tuple[str, str, str]:
        """Model, class and tenant of the next request."""
        model, slo, tenant = (
            shares.draw(draw) for shares, draw in zip(self._shares, self._draws, strict=True)
        )
        return model, slo, tenant
