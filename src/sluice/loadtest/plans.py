"""Draws trials from a workload: the ``Stimulus`` of live runs.

The workload says what is asked for and in which pattern (``sluice.workload``); here are the rate,
the length of the trial, what comes in addition for a while, and what caches may know of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import merge
from itertools import islice, takewhile

from sluice.loadtest.trial import ClosedLoop, OpenLoop, Span, TrialPlan
from sluice.workload.asks import Ask, BadWorkload
from sluice.workload.servegen import ServeGen
from sluice.workload.synthetic import Synthetic
from sluice.workload.traces import Trace

NS = 1_000_000_000
ASKS_MAX = 5_000_000
CLIENTS_MAX = 100_000
# Texts of each addition begin here, so that they are nobody else's.
_TEXTS_APART = 1 << 50
_ASKS_PER_CLIENT = 50
_ASKS_LEAST = 2_000

Scaled = Synthetic | Trace | ServeGen


class CachePolicy(StrEnum):
    """What the server's prefix cache knows of the prompts of a trial."""

    COLD = "cold"  # nothing: every trial has texts of its own
    WARM = "warm"  # all: they are sent once before the trial
    AS_IS = "as-is"  # whatever earlier runs with these texts left there


@dataclass(frozen=True, slots=True)
class Addition:
    """Requests beside the others from ``from_s`` of the counted part on for ``for_s``, as a spike
    of the same tenant or the load of another one."""

    name: str
    workload: Scaled
    rate_rps: float
    from_s: float
    for_s: float
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic; see ``Stimulus``. ``run`` tells runs apart whose caches must not."""

    workload: Scaled
    cache: CachePolicy = CachePolicy.COLD
    run: str = ""
    additions: Sequence[Addition] = ()
    choices: int = 1

    def open_loop(self, rate_rps: float, span: Span, seed: int) -> TrialPlan:
        """See ``Stimulus``. Raises ``BadWorkload``."""
        rates_rps = [rate_rps, *(addition.rate_rps for addition in self.additions)]
        most = sum(rates_rps) * span.arriving_s
        if most > ASKS_MAX:
            raise BadWorkload(
                f"{sum(rates_rps):g} requests/s for {span.arriving_s:g} s are {most:,.0f}, more "
                f"than the {ASKS_MAX:,} that one trial may have; ask for less time"
            )
        streams = [_until(replace(self.workload, rate_rps=rate_rps).asks(seed), span.arriving_s)]
        streams += [
            self._added(number, addition, span, seed)
            for number, addition in enumerate(self.additions, 1)
        ]
        asks = merge(*streams, key=lambda ask: ask.at_ns)
        numbered = tuple(self._numbered(asks))
        if not numbered:
            raise BadWorkload(
                f"at {rate_rps:g} requests/s none is planned within {span.arriving_s:g} s; ask for "
                f"a longer --duration"
            )
        salt = self._salt(f"open {rate_rps!r} {seed}")
        return TrialPlan(OpenLoop(rate_rps), span, numbered, seed, salt)

    def closed_loop(self, concurrency: int, span: Span, seed: int) -> TrialPlan:
        """See ``Stimulus``. Raises ``BadWorkload``."""
        if not 1 <= concurrency <= CLIENTS_MAX:
            raise BadWorkload(f"the concurrency must be 1 to {CLIENTS_MAX:,}, not {concurrency}")
        if self.additions:
            raise BadWorkload("spikes and adversaries belong to an open loop: give --rate")
        count = max(_ASKS_LEAST, _ASKS_PER_CLIENT * concurrency)
        asks = islice(replace(self.workload, rate_rps=1.0).asks(seed), count)
        salt = self._salt(f"closed {concurrency} {seed}")
        return TrialPlan(ClosedLoop(concurrency), span, tuple(self._numbered(asks)), seed, salt)

    def _numbered(self, asks: Iterator[Ask]) -> Iterator[Ask]:
        for number, ask in enumerate(asks):
            yield replace(ask, number=number, choices=self.choices)

    def _added(self, number: int, addition: Addition, span: Span, seed: int) -> Iterator[Ask]:
        begin_ns = round((span.from_s + addition.from_s) * NS)
        apart = number * _TEXTS_APART
        workload = replace(addition.workload, rate_rps=addition.rate_rps)
        length_s = min(addition.for_s, max(0.0, span.arriving_s - span.from_s - addition.from_s))
        for ask in _until(workload.asks(seed + number), length_s):
            prompt = tuple(part._replace(text=part.text + apart) for part in ask.prompt)
            at_ns = ask.at_ns + begin_ns
            yield replace(ask, at_ns=at_ns, prompt=prompt, tenant=addition.tenant or ask.tenant)

    def _salt(self, trial: str) -> str:
        match self.cache:
            case CachePolicy.COLD:
                return f"{self.run} {trial}"
            case CachePolicy.WARM:
                return f"{self.run} warm"
            case CachePolicy.AS_IS:
                return ""


def priming(plan: TrialPlan, concurrency: int = 4) -> TrialPlan:
    """The prompts of a plan once, with the shortest answers: what makes caches warm for it."""
    asks = tuple(replace(ask, output_tokens=1) for ask in plan.asks)
    return replace(plan, load=ClosedLoop(concurrency, once=True), asks=asks)


def _until(asks: Iterator[Ask], end_s: float) -> Iterator[Ask]:
    end_ns = round(end_s * NS)
    return takewhile(lambda ask: ask.at_ns < end_ns, asks)


def cached_share_max(plan: TrialPlan, frame_tokens: int) -> float:
    """The largest share of prompt tokens that a cache which knew none of the texts before can have
    had: the template's and what earlier requests of the trial began with."""
    seen: dict[int, int] = {}
    known = whole = 0
    for ask in plan.asks:
        whole += ask.prompt_tokens
        shared = frame_tokens
        for part in ask.prompt:
            had = min(seen.get(part.text, 0), part.tokens)
            shared += had
            seen[part.text] = max(seen.get(part.text, 0), part.tokens)
            if had < part.tokens:
                break
        known += min(shared, ask.prompt_tokens)
    return known / whole if whole else 0.0
