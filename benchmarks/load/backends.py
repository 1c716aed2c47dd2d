"""The two ways to play a plan: against an engine's process, and in virtual time."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.load.client import Client
from benchmarks.load.engines import Engine
from benchmarks.load.facts import Calibration, facts_of, read_records, speed_of
from benchmarks.load.outcomes import Run, Targets
from benchmarks.load.plans import Ask, Plan
from benchmarks.load.virtual import Knobs, World
from sluice.runtime.clock import wall_s

SETTLE_S_MAX = 30.0


class Backend(Protocol):
    """Plays plans."""

    def play(self, plan: Plan, *, retry: bool = False) -> Run:
        """Send every request at its time."""
        ...

    def saturate(self, asks: Iterator[Ask], concurrency: int, span_s: tuple[float, float]) -> Run:
        """Keep so many requests under way until the end of the span, and count within it."""
        ...


@dataclass(slots=True)
class VirtualBackend:
    """Each run has a world of its own."""

    policy: str
    calibration: Calibration
    targets: Targets
    seed: int
    knobs: Knobs = field(default_factory=dict)

    def play(self, plan: Plan, *, retry: bool = False) -> Run:
        """See ``Backend``."""
        return self._world().play(plan, retry=retry)

    def saturate(self, asks: Iterator[Ask], concurrency: int, span_s: tuple[float, float]) -> Run:
        """See ``Backend``."""
        return self._world().saturate(asks, concurrency, span_s)

    def _world(self) -> World:
        return World(self.policy, self.calibration, self.targets, seed=self.seed, knobs=self.knobs)


class LiveBackend:
    """All runs go to one process, each after it has come to rest.

    ``start`` starts it, which happens with the first run: where all runs are kept, none is started.
    """

    def __init__(self, start: Callable[[], Engine]) -> None:
        self._start = start
        self._settled = 0
        self._client: Client | None = None
        self.engine: Engine | None = None

    def play(self, plan: Plan, *, retry: bool = False) -> Run:
        """See ``Backend``."""
        client = self._settle()
        outcomes = asyncio.run(client.play(plan, retry=retry))
        facts = self._facts(client, plan.from_s, plan.to_s)
        return Run(tuple(outcomes), plan.from_s, plan.to_s, plan.end_s, facts)

    def saturate(self, asks: Iterator[Ask], concurrency: int, span_s: tuple[float, float]) -> Run:
        """See ``Backend``."""
        client = self._settle()
        outcomes = asyncio.run(client.saturate(asks, concurrency, span_s[1]))
        return Run(tuple(outcomes), *span_s, span_s[1], self._facts(client, *span_s))

    def stop(self) -> None:
        """Stop the process, where it was started."""
        if self.engine is not None:
            self.engine.stop()

    def _facts(self, client: Client, from_s: float, to_s: float) -> dict[str, float]:
        assert self.engine is not None
        if self.engine.process.poll() is not None:
            raise RuntimeError(f"{self.engine.name} ended during a run, see {self.engine.log}")
        facts = {"client_cpu_share": client.cpu_share}
        if self.engine.journal is None:
            return facts
        time.sleep(1.0)  # the journal is flushed every half second
        since_ns = int((wall_s() - (time.monotonic() - client.began_s) - 1.0) * 1e9)
        records = read_records(self.engine.journal, since_ns)
        began_ns = int(client.began_s * 1e9)
        span_ns = (began_ns + int(from_s * 1e9), began_ns + int(to_s * 1e9))
        return facts | facts_of(records, *span_ns) | speed_of(records, *span_ns)

    def _settle(self) -> Client:
        """Wait until a short request is answered quickly twice: nothing old is left then."""
        if self.engine is None or self._client is None:
            self.engine = self._start()
            self._client = Client(self.engine.target)
        began_s, quick = time.monotonic(), 0
        while quick < 2:
            self._settled += 1
            ask = Ask(f"settle-{self._settled}", 0.0, output_tokens=2, slo="")
            outcome = asyncio.run(self._client.play(Plan((ask,), 0.0, 1.0, 10.0)))[0]
            took_s = outcome.ttft_s
            quick = quick + 1 if outcome.whole and took_s is not None and took_s < 1.0 else 0
            if time.monotonic() - began_s > SETTLE_S_MAX:
                sys.stderr.write(f"{self.engine.name} does not come to rest\n")
                break
        return self._client
