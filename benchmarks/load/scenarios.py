"""The scenarios: which runs each one needs of one engine.

Every run is taken from the store where it is there. What the runs show is in ``tables.py``.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean

from benchmarks.load.backends import Backend
from benchmarks.load.engines import CONTEXT_TOKENS, SEQUENCES
from benchmarks.load.measures import token_rate
from benchmarks.load.outcomes import Run, Targets
from benchmarks.load.plans import (
    CHAT_OUTPUT_TOKENS,
    Ask,
    Lengths,
    Plan,
    Span,
    azure,
    poisson,
    trace,
)
from benchmarks.load.store import Store

MIXES = ("poisson", "azure")
# Offered load in multiples of capacity, by engine. A peer's are of its own capacity.
STEPS = (0.75, 1.0, 1.5, 2.0, 4.0)
LIVE_STEPS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "slo": {"poisson": STEPS, "azure": STEPS},
    "fcfs": {"poisson": (0.75, 1.0, 2.0, 4.0), "azure": (0.75, 2.0)},
    "static": {"poisson": (0.75, 2.0), "azure": (0.75, 2.0)},
    "vllm": {"poisson": (0.75, 1.0, 2.0, 4.0), "azure": (2.0,)},
    "llama": {"poisson": (0.75, 1.0, 2.0, 4.0), "azure": (2.0,)},
}
VIRTUAL_STEPS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
SATURATED_S = {"poisson": (5.0, 15.0), "azure": (5.0, 20.0)}
CHATS = 10
CHAT_STREAM_TOKENS = 2200
LONG_PROMPT_TOKENS = 4000
LONG_OUTPUT_TOKENS = 16
OVER_SHARE = 10.0  # times its share that the greedy tenant sends
MODEST_SHARE = 0.5  # of its share that the other one sends
FAIRNESS_S_MIN = {"live": 60.0, "virtual": 400.0}
RETRY_LOAD = 1.5
ROUNDS = 5
ROUND_STEPS = (1.5, 2.0, 4.0)
ROUND_S = 12.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line chooses, and a name for calibration and code.

    ``counted_s`` is the counted part of a run by world, ``length_scale`` is for the trace's token
    lengths.
    """

    trace: Path
    seed: int
    counted_s: Mapping[str, float]
    length_scale: float
    targets: Targets
    version: str

    def key(self, world: str, engine: str, what: str) -> str:
        """Under which a run is kept. Virtual ones depend on calibration and code."""
        parts = [world, engine, what, f"seed{self.seed}"]
        return "-".join([*parts, self.version] if world == "virtual" else parts)


@dataclass(frozen=True, slots=True)
class Session:
    """One engine that is ready to be measured."""

    world: str  # "live" or "virtual"
    engine: str
    backend: Backend
    store: Store
    settings: Settings

    @property
    def span(self) -> Span:
        """How long a goodput run is: those that a claim is made of are the longest."""
        counted_s = self.settings.counted_s[self.world]
        if self.world == "live" and self.engine != "slo":
            counted_s /= 2
        return Span(counted_s)

    def key(self, what: str) -> str:
        """Under which a run is kept."""
        return self.settings.key(self.world, self.engine, what)

    def played(self, what: str, plan: Plan, *, retry: bool = False) -> Run:
        """A run of a plan."""
        return self.kept(what, lambda: self.backend.play(self._named(what, plan), retry=retry))

    def kept(self, what: str, make: Callable[[], Run]) -> Run:
        """A run, told about on standard error when it is made now."""
        began_s = time.monotonic()
        run = self.store.cached(self.key(what), make)
        took_s = time.monotonic() - began_s
        if took_s > 0.5:
            sys.stderr.write(f"{self.key(what)}: {took_s:.0f} s\n")
        return run

    def _named(self, what: str, plan: Plan) -> Plan:
        """The plan with prompts of its own, so that no run finds those of another one cached.

        ``fcfs`` and ``static`` know no targets, so their requests name no class.
        """
        slo_known = self.engine == "slo"
        asks = (
            replace(ask, id=f"{ask.id}:{what}", slo=ask.slo if slo_known else "")
            for ask in plan.asks
        )
        return replace(plan, asks=tuple(asks))


# ---------------------------------------------------------------------------------------- capacity


def measure_capacity(session: Session) -> None:
    """Saturate the engine, then see whether it stays level at a little less than that."""
    if session.engine in {"fcfs", "static"}:
        return  # the same engine as under slo, and loads are compared at the same rate
    for mix in MIXES:
        session.kept(f"capacity-{mix}", lambda mix=mix: _saturate(session, mix))  # type: ignore[misc]
    rate = 0.9 * capacity_of(session, "poisson")
    if rate < 0.05:
        raise RuntimeError("it answered next to nothing while it was saturated")
    span = Span(10.0, warm_s=4.0, tail_s=0.0, drain_s=10.0)
    session.played("level", span.plan(poisson(rate, span, session.settings.seed, prefix="level")))


def _saturate(session: Session, mix: str) -> Run:
    concurrency = SEQUENCES[session.engine]
    asks = chat_forever(concurrency) if mix == "poisson" else trace_forever(session.settings)
    return session.backend.saturate(asks, concurrency, SATURATED_S[mix])


def chat_forever(concurrency: int) -> Iterator[Ask]:
    """Chat requests without end or class.

    The first ones have outputs of all lengths, so that they do not go on in step: prompts are then
    computed beside decoding all the time, as under open load.
    """
    for number in count():
        part = min(1.0, (number + 1) / concurrency)
        yield Ask(f"sat-{number}", 0.0, output_tokens=round(CHAT_OUTPUT_TOKENS * part), slo="")


def trace_forever(settings: Settings) -> Iterator[Ask]:
    """The requests of the trace in their order."""
    lengths = Lengths(settings.length_scale, CONTEXT_TOKENS)
    for number, (_, prompt, output) in enumerate(trace(settings.trace)):
        yield Ask(f"sat-a{number}", 0.0, *lengths.of(prompt, output), slo="")


def capacity_of(session: Session, mix: str) -> float:
    """Requests per second that the engine can do of a mix. Raises ``RuntimeError`` before."""
    engine = "slo" if session.engine in {"fcfs", "static"} else session.engine
    run = session.store.need(session.settings.key(session.world, engine, f"capacity-{mix}"))
    return requests_per_s(run, mix, session.settings)


def requests_per_s(run: Run, mix: str, settings: Settings) -> float:
    """The token rate of a saturated engine over the tokens of a request of the mix.

    Requests that ended within a short run are the short ones, so they are not what is counted.
    """
    if mix == "poisson":
        return token_rate(run) / CHAT_OUTPUT_TOKENS
    lengths = Lengths(settings.length_scale, CONTEXT_TOKENS)
    return token_rate(run) / fmean(lengths.of(*both)[1] for _, *both in trace(settings.trace))


# ----------------------------------------------------------------------------------------- goodput


def measure_goodput(session: Session) -> None:
    """All loads of both mixes."""
    for mix in MIXES:
        for step in steps_of(session, mix):
            plan = goodput_plan(session, mix, step)
            session.played(f"goodput-{mix}-{step:g}x", plan)


def steps_of(session: Session, mix: str) -> tuple[float, ...]:
    """The loads of an engine, in multiples of its capacity."""
    return LIVE_STEPS[session.engine][mix] if session.world == "live" else VIRTUAL_STEPS


def goodput_plan(session: Session, mix: str, step: float) -> Plan:
    """The requests of one load."""
    settings, span = session.settings, session.span
    rate = step * capacity_of(session, mix)
    if mix == "poisson":
        return span.plan(poisson(rate, span, settings.seed))
    lengths = Lengths(settings.length_scale, CONTEXT_TOKENS)
    return span.plan(azure(settings.trace, rate, span, settings.seed, lengths))


# ---------------------------------------------------------------- long prompts, tenants and retries


def measure_long(session: Session) -> None:
    """Chat streams alone, long prompts alone, and both."""
    chats = [
        Ask(f"stream-{number}", 0.3 * number, output_tokens=CHAT_STREAM_TOKENS, slo="stream")
        for number in range(CHATS)
    ]

    def longs(first_s: float, every_s: float, number: int) -> list[Ask]:
        return [
            Ask(
                f"long-{index}", first_s + every_s * index, LONG_PROMPT_TOKENS,
                LONG_OUTPUT_TOKENS, "long",
            )
            for index in range(number)
        ]  # fmt: skip

    session.played("long-chats", Plan(tuple(chats), 5.0, 18.0, 18.0))
    session.played("long-alone", Plan(tuple(longs(0.0, 12.0, 2)), 0.0, 24.0, 26.0))
    # Two cores take about 8 s for such a prompt beside the chats: more often and they would queue.
    beside = Plan((*chats, *longs(5.0, 9.0, 3)), 5.0, 32.0, 36.0)
    session.played("long-beside", beside)


def measure_fairness(session: Session) -> None:
    """A tenant within its share, alone and beside one that sends ten times its own."""
    session.played("fairness-alone", tenants_plan(session, over_share=0.0))
    session.played("fairness-beside", tenants_plan(session, over_share=OVER_SHARE))


def tenants_plan(session: Session, *, over_share: float) -> Plan:
    """Tenant ``modest`` at half of its half of capacity, ``greedy`` at so many halves."""
    share = capacity_of(session, "poisson") / 2
    span = replace(session.span, drain_s=6.0)
    # The p99 of a few requests per second needs many seconds.
    span = replace(span, counted_s=max(span.counted_s, FAIRNESS_S_MIN[session.world]))
    seed = session.settings.seed
    asks = poisson(MODEST_SHARE * share, span, seed, prefix="modest", tenant="modest")
    if over_share:
        asks += poisson(over_share * share, span, seed, prefix="greedy", tenant="greedy")
    return span.plan(asks)


def measure_retry(session: Session) -> None:
    """More than capacity for a while; every client that is refused does as it is told."""
    span = replace(session.span, warm_s=0.0, tail_s=0.0, drain_s=45.0)
    rate = RETRY_LOAD * capacity_of(session, "poisson")
    plan = span.plan(poisson(rate, span, session.settings.seed, prefix="retry"))
    session.played("retry", plan, retry=True)


def measure_rounds(session: Session) -> None:
    """Loads in turn and several times: a machine whose speed moves is as fast for all of them."""
    settings, span = session.settings, Span(ROUND_S, warm_s=4.0, tail_s=2.0, drain_s=6.0)
    for number in range(ROUNDS):
        for step in ROUND_STEPS:
            rate = step * capacity_of(session, "poisson")
            plan = span.plan(poisson(rate, span, settings.seed + number))
            session.played(round_key(number, step), plan)


def round_key(number: int, step: float) -> str:
    """Under which one load of one round is kept."""
    return f"round{number}-{step:g}x"


MEASURE: Mapping[str, Callable[[Session], None]] = {
    "capacity": measure_capacity,
    "goodput": measure_goodput,
    "long": measure_long,
    "fairness": measure_fairness,
    "retry": measure_retry,
    "rounds": measure_rounds,
}
# Scenarios that only sluice with its slo policy can show.
SLO_ONLY = frozenset({"fairness", "retry", "rounds"})
