"""The virtual backend: the same plans against the same policies, with no engine and no waiting.

``Fleet`` and ``Replica`` decide as they do live; steps take what the calibration says. Outcomes
have the form of live ones. HTTP, tokenising and the way between processes take no time here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any
from zlib import crc32

from benchmarks.load.facts import Calibration
from benchmarks.load.outcomes import Outcome, Run, Targets
from benchmarks.load.plans import Ask, Plan, again
from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.core.events import (
    Emit,
    End,
    Ended,
    Fail,
    FleetEffect,
    FleetEvent,
    Reject,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLimits,
    RunStep,
    Shorten,
    StepDone,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.request import COMPLETE, Request, SequenceId
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.core.sampling import Sampling
from sluice.core.step import Plan as StepPlan
from sluice.executors.base import Outcome as StepOutcome
from sluice.executors.base import StepExecutor, TokenMask
from sluice.executors.simulated import OutputTokens, SimulatedExecutor
from sluice.runtime.calibration import calibrate
from sluice.runtime.virtual_fleet import VirtualFleet

BEGAN_NS = 1_000_000_000
END_TOKEN = 0
Knobs = Mapping[str, float]


class NoisyExecutor:
    """A simulated executor whose steps scatter as measured ones do."""

    def __init__(
        self, calibration: Calibration, limits: ReplicaLimits, seed: int, lengths: OutputTokens
    ) -> None:
        self._executor = SimulatedExecutor(
            limits, calibration.coefficients, output_tokens=lengths, end_token=END_TOKEN
        )
        self._ratios = calibration.ratios
        self._draw = Random(seed)
        self.load = self._executor.load
        self.end_sequence = self._executor.end_sequence
        self.close = self._executor.close

    def open_sequence(
        self,
        sequence: SequenceId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        mask: TokenMask | None = None,
    ) -> None:
        """See ``StepExecutor``."""
        self._executor.open_sequence(sequence, sampling, prompt, mask)

    def run(self, plan: StepPlan) -> StepOutcome:
        """See ``StepExecutor``."""
        outcome = self._executor.run(plan)
        ratio = self._draw.choice(self._ratios)
        return replace(outcome, duration_ns=int(outcome.duration_ns * ratio))


@dataclass(slots=True)
class _Life:
    """What was seen of one request so far."""

    ask: Ask
    text_s: list[float]
    tokens: int = 0
    whole: bool = False
    refusal: Reject | None = None
    refused_s: float | None = None
    degraded: str = ""


class World:
    """One model with one replica, from its start to the end of one run."""

    def __init__(
        self,
        policy: str,
        calibration: Calibration,
        targets: Targets,
        *,
        seed: int = 1,
        knobs: Knobs | None = None,
    ) -> None:
        limits = calibration.limits
        batching = BatchingLimits(
            limits.context_tokens_max,
            limits.block_size,
            limits.blocks_total,
            sequences_max=limits.sequences_max,
            step_ns_max=80_000_000,  # the default of ``ModelSection.step_s_max``
            policy=BatchingPolicy(policy),
            static_sequences=limits.sequences_max,
        )
        self._batching, pool = _turned(batching, PoolLimits("m", ("m-0",)), knobs or {})
        self._calibration = calibration
        self._seed = seed
        self._classes = targets.classes
        self._lives: dict[str, _Life] = {}
        self._next: Iterator[Ask] = iter(())
        self._retry = False
        self._stop_s = 0.0
        self._busy: list[tuple[float, float, int]] = []
        self._rows: dict[int, int] = {}
        self._preemptions = 0
        self._fleet = VirtualFleet(
            Fleet([pool], chance=Random(seed)),
            self._make,
            end_tokens=frozenset({END_TOKEN}),
            watcher=self,
        )

    def play(self, plan: Plan, *, retry: bool = False) -> Run:
        """See ``client.Client.play``."""
        self._retry, self._stop_s = retry, plan.end_s
        for ask in plan.asks:
            self._arrive(ask)
        return self._run(plan.from_s, plan.to_s)

    def saturate(self, asks: Iterator[Ask], concurrency: int, span_s: tuple[float, float]) -> Run:
        """See ``client.Client.saturate``."""
        self._next, self._stop_s = asks, span_s[1]
        for _ in range(concurrency):
            self._arrive(next(asks))
        return self._run(*span_s)

    # --------------------------------------------------------------------------------- watching

    def fleet_event(self, event: FleetEvent, now_ns: int, effects: Sequence[FleetEffect]) -> None:
        """See ``virtual_fleet.Watcher``."""
        now_s = (now_ns - BEGAN_NS) / 1e9
        if isinstance(event, Ended):
            self._lives[event.request_id].whole = event.reason in COMPLETE
            self._follow(now_s)
        for effect in effects:
            if isinstance(effect, Reject):
                self._refused(effect, now_s)
            elif isinstance(effect, Fail):
                self._follow(now_s)
            elif isinstance(effect, Shorten):
                self._lives[effect.request_id].degraded = "shorten"

    def replica_event(
        self,
        replica_id: str,  # noqa: ARG002
        event: ReplicaEvent,
        now_ns: int,
        effects: Sequence[ReplicaEffect],
    ) -> None:
        """See ``virtual_fleet.Watcher``."""
        now_s = (now_ns - BEGAN_NS) / 1e9
        if isinstance(event, StepDone):
            rows = self._rows.pop(event.step, 0)
            self._busy.append((now_s, event.duration_ns / 1e9, rows))
        for effect in effects:
            if isinstance(effect, Emit):
                for one in effect.sampled:
                    life = self._lives[one.sequence.request_id]
                    life.text_s.append(now_s)
                    life.tokens += 1
            elif isinstance(effect, End):
                self._preemptions += effect.preemptions
            elif isinstance(effect, RunStep):
                self._rows = {
                    effect.plan.step: sum(len(row.tokens) == 1 for row in effect.plan.rows)
                }

    # --------------------------------------------------------------------------------- internals

    def _make(self, replica_id: str) -> tuple[Replica, StepExecutor]:  # noqa: ARG002
        cost = LinearCostModel(Coefficients())
        limits = self._batching.replica
        executor = NoisyExecutor(self._calibration, limits, self._seed, self._output_tokens)
        calibrate(executor, limits, cost)
        return Replica(self._batching, cost), executor

    def _output_tokens(self, sequence: SequenceId) -> int | None:
        """After how many tokens a sequence ends of itself."""
        life = self._lives.get(sequence.request_id)
        if life is None or life.ask.limit_tokens is None:
            return None
        return life.ask.output_tokens

    def _arrive(self, ask: Ask) -> None:
        at_ns = BEGAN_NS + int(ask.at_s * 1e9)
        self._lives[ask.id] = _Life(ask, [])
        self._fleet.arrive(at_ns, "m", request_of(ask, at_ns, self._classes))

    def _follow(self, now_s: float) -> None:
        """In a closed loop the next request takes the place of one that is over."""
        ask = next(self._next, None)
        if ask is not None and now_s < self._stop_s:
            self._arrive(replace(ask, at_s=now_s))

    def _refused(self, refusal: Reject, now_s: float) -> None:
        life = self._lives[refusal.request_id]
        life.refusal, life.refused_s = refusal, now_s - life.ask.at_s
        self._follow(now_s)
        if self._retry and refusal.retry_after_s is not None:
            attempt = int(life.ask.id.partition("~")[2] or 0) + 1
            self._arrive(again(life.ask, now_s + refusal.retry_after_s, attempt))

    def _run(self, from_s: float, to_s: float) -> Run:
        self._fleet.run(BEGAN_NS + int(self._stop_s * 1e9))
        outcomes = tuple(
            _outcome(life) for life in self._lives.values() if life.ask.at_s <= self._stop_s
        )
        return Run(outcomes, from_s, to_s, self._stop_s, self._facts(from_s, to_s))

    def _facts(self, from_s: float, to_s: float) -> dict[str, float]:
        inside = [one for one in self._busy if from_s <= one[0] < to_s]
        busy_s = sum(duration_s for _, duration_s, _ in inside)
        rows = sum(duration_s * rows for _, duration_s, rows in inside)
        return {
            "preemptions": float(self._preemptions),
            "busy_share": busy_s / (to_s - from_s),
            "rows_mean": rows / busy_s if busy_s else 0.0,
            "output_tokens_per_s": sum(rows for _, _, rows in inside) / (to_s - from_s),
        }


def request_of(ask: Ask, at_ns: int, classes: Mapping[str, tuple[float, float]]) -> Request:
    """What the fleet is told of a request of a plan."""
    start = crc32(ask.id.partition("~")[0].encode())
    ttft_s, tpot_s = classes.get(ask.slo, (None, None))
    return Request(
        id=ask.id,
        arrived_ns=at_ns,
        prompt=tuple(range(start, start + ask.prompt_tokens)),
        output_tokens_max=ask.limit_tokens or ask.output_tokens,
        tenant=ask.tenant,
        slo_class=ask.slo,
        ttft_due_ns=None if ttft_s is None else at_ns + int(ttft_s * 1e9),
        tpot_ns=None if tpot_s is None else int(tpot_s * 1e9),
    )


def _outcome(life: _Life) -> Outcome:
    ask, refusal = life.ask, life.refusal
    status = 200 if life.text_s else 0
    return Outcome(
        id=ask.id,
        at_s=ask.at_s,
        slo=ask.slo,
        tenant=ask.tenant,
        status=status if refusal is None else refusal.status,
        whole=life.whole,
        prompt_tokens=ask.prompt_tokens,
        tokens=life.tokens,
        text_s=tuple(life.text_s),
        refused_s=life.refused_s,
        reason="" if refusal is None else refusal.reason,
        degraded=life.degraded,
        retry_after_s=None if refusal is None else refusal.retry_after_s,
    )


def _turned(
    batching: BatchingLimits, pool: PoolLimits, knobs: Knobs
) -> tuple[BatchingLimits, PoolLimits]:
    """The limits with settings changed; ``batching.NAME`` and ``pool.NAME`` say whose."""
    for name, value in knobs.items():
        owner, _, field = name.partition(".")
        change: dict[str, Any] = {field: int(value) if value == int(value) and value > 1 else value}
        if owner == "batching":
            batching = replace(batching, **change)
        else:
            pool = replace(pool, **change)
    return batching, pool


def known_knobs() -> frozenset[str]:
    """The settings that can be turned: ``batching.NAME`` and ``pool.NAME``."""
    return frozenset(
        [f"batching.{one.name}" for one in fields(BatchingLimits)]
        + [f"pool.{one.name}" for one in fields(PoolLimits)]
    )
