"""Ten thousand random schedules of one replica: what always holds, replayed and with stretches.

A schedule is a string of bytes: many are drawn in short time, and one that fails shrinks.
``test_replica_machine.py`` looks at fewer, longer ones whose executor notices a wrong block.
"""

from dataclasses import dataclass

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sluice.core.batch import Stretch
from sluice.core.batching import LATE_DIVISOR
from sluice.core.costmodel import Coefficients, FixedCostModel, LinearCostModel
from sluice.core.events import (
    Cancelled,
    End,
    ReplicaEffect,
    ReplicaEvent,
    RunStep,
    StepDone,
    StepFailed,
    Submitted,
    WakeAt,
    Woken,
)
from sluice.core.lifecycle import SequenceState
from sluice.core.replica import Replica
from sluice.core.request import Request
from sluice.core.residency import PREEMPTIONS_MAX
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.core.sequence import Sequence
from sluice.core.step import Plan, Sampled, StopReason
from sluice.testing.replicas import check_invariants

MS = 1_000_000
SCHEDULES = max(10_000, 50 * settings().max_examples)
HEAD_BYTES, EVENT_BYTES = 4, 5
REQUESTS_MIN = 3
EVENTS_MAX = 600
COEFFICIENTS = Coefficients(10e6, 1e6, 1e6, 1000.0, 1000.0)
POLICIES = (BatchingPolicy.SLO, BatchingPolicy.SLO, BatchingPolicy.FCFS, BatchingPolicy.STATIC)

Entry = tuple[ReplicaEvent, int, list[ReplicaEffect]]


@dataclass(frozen=True)
class Setting:
    """How the replica of a schedule is made: two made alike behave alike."""

    limits: BatchingLimits
    short_sighted: bool
    learning: bool

    def replica(self) -> Replica:
        make = LinearCostModel if self.learning else FixedCostModel
        replica = Replica(self.limits, make(COEFFICIENTS))
        if self.short_sighted:  # every prediction is too short: preemptions follow
            for length in (*(1,) * 50, *(30,) * 6):
                replica.roster.lengths.observe(length)
        return replica


def setting_of(head: bytes) -> Setting:
    limits = BatchingLimits(
        context_tokens_max=40,
        block_size=4,
        blocks_total=10 + head[0] % 5,
        sequences_max=1 + head[1] % 5,
        chunk_tokens_max=(3, 16, 64)[head[1] // 5 % 3],
        step_ns_max=(20, 60, 200)[head[1] // 15 % 3] * MS,
        policy=POLICIES[head[2] % 4],
        static_sequences=2,
        static_wait_ns=30 * MS,
        prefix_cache=bool(head[2] & 4),
        prefill_share=(0.05, 0.2, 0.5)[head[3] % 3],
    )
    return Setting(limits, bool(head[2] & 8), head[2] & 0x30 == 0x30)


class Schedule:
    """Runs a schedule to its end; ``log`` holds each event with its time and effects."""

    def __init__(self, script: bytes) -> None:
        self.setting = setting_of(script[:HEAD_BYTES])
        self.replica = self.setting.replica()
        self.now_ns = 0
        self.log: list[Entry] = []
        self.ends: dict[str, End] = {}
        self.requests = 0
        self.wake_ns: int | None = None
        self.late_tokens = self.other_tokens = 0
        for start in range(HEAD_BYTES, len(script) - EVENT_BYTES + 1, EVENT_BYTES):
            self.happen(*script[start : start + EVENT_BYTES])
        self.finish()

    def happen(self, kind: int, a: int, b: int, c: int, d: int) -> None:
        match 0 if self.requests < REQUESTS_MIN else kind % 8:
            case 0 | 1:
                self.submit(a, b, c, d)
            case 2 | 3 if a % 2:
                self.handle(Cancelled(f"r{a % (self.requests + 1)}"))
            case 4:
                self.wait((a % 64) * 4 * MS)
            case 5 if a % 4 == 0 and (plan := self.replica.running) is not None:
                blamed = () if b % 3 == 0 else (plan.rows[b % len(plan.rows)].sequence,)
                self.handle(StepFailed(plan.step, blamed, "scripted"))
            case _:
                for number in range(1 + a % 4):
                    self.step((1 + b % 50) * MS, stop=number == 0 and c % 4 == 0)

    def submit(self, a: int, b: int, c: int, d: int) -> None:
        self.requests += 1
        own = self.requests if b & 1 else 0  # the others share prefixes
        ttft_ms = (None, 5, 60, 600)[c % 4]
        tpot_ms = (None, 8, 16, 40)[c // 32 % 4]
        request = Request(
            f"r{self.requests}",
            self.now_ns - (d % 3) * MS,
            (own,) * (1 + a % 20),
            1 + b // 2 % 10,
            choices=2 if c // 4 % 8 == 0 and self.setting.limits.sequences_max > 1 else 1,
            tier=d // 3 % 3,
            tenant="ab"[d // 9 % 2],
            slo_class="xy"[c % 2],
            ttft_due_ns=None if ttft_ms is None else self.now_ns + ttft_ms * MS,
            tpot_ns=None if tpot_ms is None else tpot_ms * MS,
            deadline_ns=self.now_ns + 300 * MS if d // 18 % 8 == 0 else None,
        )
        self.handle(Submitted(request))

    def step(self, duration_ns: int, *, stop: bool) -> None:
        plan = self.replica.running
        if plan is None:
            return
        self.now_ns += duration_ns
        stops = StopReason.END_TOKEN if stop else None
        sampled = [Sampled(row.sequence, 7) for row in plan.rows if row.sample]
        if sampled and stop:
            sampled[0] = Sampled(sampled[0].sequence, 7, stops)
        self.handle(StepDone(plan.step, tuple(sampled), duration_ns))

    def wait(self, waited_ns: int) -> None:
        self.now_ns += waited_ns
        if self.wake_ns is not None and self.wake_ns <= self.now_ns:
            self.wake_ns = None
            self.handle(Woken())

    def finish(self) -> None:
        while len(self.ends) < self.requests:
            assert len(self.log) < EVENTS_MAX, "nothing comes to an end"
            if self.replica.running is not None:
                self.step(20 * MS, stop=False)
            else:
                assert self.wake_ns is not None, "somebody waits and nothing will happen"
                self.wait(max(0, self.wake_ns - self.now_ns))

    # ------------------------------------------------------------------------------- what holds

    def handle(self, event: ReplicaEvent) -> None:
        residents = list(self.replica.roster.residents)
        effects = self.replica.handle(event, self.now_ns)
        self.log.append((event, self.now_ns, effects))
        check_invariants(self.replica)
        for effect in effects:
            if isinstance(effect, End):
                assert effect.request_id not in self.ends, "two endings"
                assert effect.preemptions <= 2 * PREEMPTIONS_MAX
                self.ends[effect.request_id] = effect
            elif isinstance(effect, WakeAt):
                self.wake_ns = effect.at_ns
            elif isinstance(effect, RunStep) and self.setting.limits.policy is BatchingPolicy.SLO:
                self.check_order(effect.plan, residents)

    def check_order(self, plan: Plan, residents: list[Sequence]) -> None:
        """Who is in tier 0 and on time waits for no late one, but for the share of those."""
        roster = self.replica.roster
        chunks = {row.sequence: len(row.tokens) for row in plan.rows}
        prefills = [s for s in roster.residents if s.state is SequenceState.PREFILL]
        late = sum(chunks.get(s.id, 0) for s in prefills if s.late)
        self.other_tokens += sum(chunks.get(s.id, 0) for s in prefills if not s.late)
        unfit = self.replica._batching._unfit
        full = len(roster.residents) >= self.setting.limits.sequences_max
        waiting = [] if full or not all(s.late for s in unfit) else roster.waiting
        strict = [s for s in (*waiting, *prefills) if urgent(s)]
        if any(chunks.get(s.id, 0) < s.pending for s in strict):
            self.late_tokens += late
            assert LATE_DIVISOR * self.late_tokens <= self.other_tokens


def urgent(sequence: Sequence) -> bool:
    request = sequence.generation.request
    return request.tier == 0 and not sequence.late and sequence.id.choice == 0


def replay(schedule: Schedule) -> None:
    """The same events have the same effects, also where steps are taken in stretches."""
    replica = schedule.setting.replica()
    log, place, wake_ns = schedule.log, 0, None
    while place < len(log):
        taken = stretch_of(log[place : place + replica.horizon()], wake_ns)
        if taken:
            rows = zip(*(event.sampled for event in taken), strict=True)
            tokens = tuple(tuple(sampled.token for sampled in row) for row in rows)
            run = replica.skip(Stretch(tokens, tuple(event.duration_ns for event in taken)))
            place += len(taken)
            assert run in log[place - 1][2]
            continue
        event, now_ns, effects = log[place]
        assert replica.handle(event, now_ns) == effects
        wake_ns = next((e.at_ns for e in effects if isinstance(e, WakeAt)), wake_ns)
        place += 1


def stretch_of(entries: list[Entry], wake_ns: int | None) -> list[StepDone]:
    """Steps from the first entry on, before anything else happens."""
    taken: list[StepDone] = []
    for event, now_ns, _ in entries:
        if not isinstance(event, StepDone) or any(s.stop is not None for s in event.sampled):
            break
        if wake_ns is not None and wake_ns <= now_ns:
            break
        taken.append(event)
    return taken


# A late prompt was given what one on time, that rested, had left of a step.
LATE_BESIDE_RESTING = bytes.fromhex("00c604000003000003000a000200007e00000002021900000003000200")

REPORT_AFTER_STRETCH = bytes.fromhex(
    "000030000000000000000000000000000400000202000000000000000002000001000000000000"
)


@example(LATE_BESIDE_RESTING)
@example(REPORT_AFTER_STRETCH)
@settings(max_examples=SCHEDULES, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=HEAD_BYTES + 4 * EVENT_BYTES, max_size=HEAD_BYTES + 7 * EVENT_BYTES))
def test_any_schedule_keeps_the_invariants_and_is_the_same_again(script):
    schedule = Schedule(script)
    assert set(schedule.ends) == {f"r{number + 1}" for number in range(schedule.requests)}
    assert schedule.replica.roster.ledger.used == 0
    replay(schedule)
