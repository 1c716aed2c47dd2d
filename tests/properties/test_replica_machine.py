"""A replica under arbitrary events: the invariants hold after each of them, and replay is exact.

The executor keeps token ids in its KV cells, so every sampled token also proves that the blocks of
its sequence held exactly its own context.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.core.costmodel import Coefficients, FixedCostModel, LinearCostModel
from sluice.core.events import (
    Cancelled,
    Draining,
    Emit,
    End,
    ReplicaEffect,
    ReplicaEvent,
    RunStep,
    SequenceEnded,
    StepDone,
    StepFailed,
    Submitted,
    WakeAt,
    Woken,
)
from sluice.core.lengths import HISTORY_MIN
from sluice.core.replica import Replica
from sluice.core.request import EndReason, Request, SequenceId
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.core.step import Sampled, StopReason
from sluice.runtime.virtual import GREEDY
from sluice.testing.executors import FakeExecutor, hashed
from sluice.testing.replicas import check_invariants, executor_limits

MS = 1_000_000


class ReplicaMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(BatchingPolicy),
        blocks=st.integers(6, 24),
        sequences=st.integers(1, 5),
        chunk=st.sampled_from([3, 16, 64]),
        prefix_cache=st.booleans(),
        optimistic=st.booleans(),
        learning=st.booleans(),
    )
    def start(self, policy, blocks, sequences, chunk, prefix_cache, optimistic, learning):
        self.limits = BatchingLimits(
            context_tokens_max=60,
            block_size=4,
            blocks_total=blocks,
            sequences_max=sequences,
            chunk_tokens_max=chunk,
            policy=policy,
            static_sequences=3,
            static_wait_ns=50 * MS,
            prefix_cache=prefix_cache,
        )
        self.optimistic = optimistic
        self.learning = learning
        self.replica = self.fresh()
        self.executor = FakeExecutor(executor_limits(self.limits))
        self.executor.load()
        self.now_ns = 0
        self.names = 0
        self.requests: dict[str, Request] = {}
        self.output: dict[SequenceId, list[int]] = {}
        self.ends: dict[str, End] = {}
        self.log: list[tuple[ReplicaEvent, int, list[ReplicaEffect]]] = []
        self.wake_ns: int | None = None

    def fresh(self) -> Replica:
        cost = LinearCostModel(Coefficients()) if self.learning else FixedCostModel(Coefficients())
        replica = Replica(self.limits, cost)
        if self.optimistic:  # a history that makes every prediction too short: preemptions follow
            for _ in range(60):
                replica.roster.lengths.observe(1)
            for _ in range(6):
                replica.roster.lengths.observe(30)
        return replica

    def handle(self, event) -> None:
        effects = self.replica.handle(event, self.now_ns)
        self.log.append((event, self.now_ns, effects))
        for effect in effects:
            match effect:
                case Emit(sampled):
                    for token in sampled:
                        self.output[token.sequence].append(token.token)
                case End():
                    assert effect.request_id not in self.ends
                    self.check_end(effect)
                case SequenceEnded(sequence, reason):
                    assert reason in (EndReason.STOP, EndReason.LENGTH)
                    self.executor.end_sequence(sequence)
                case WakeAt(at_ns):
                    assert at_ns > self.now_ns
                    self.wake_ns = at_ns
        assert sum(isinstance(e, RunStep) for e in effects) <= 1
        if self.limits.policy is not BatchingPolicy.FCFS and not self.optimistic:
            # With a thin history outputs count with their limits: nothing is ever promised twice.
            assert len(self.ends) >= HISTORY_MIN or self.replica.roster.preemptions == 0

    def check_end(self, end: End) -> None:
        self.ends[end.request_id] = end
        request = self.requests[end.request_id]
        spent = end.phases
        assert self.now_ns - request.arrived_ns == (
            spent.admission_ns
            + spent.queue_ns
            + spent.prefill_ns
            + spent.decode_ns
            + spent.preempted_ns
        )
        emitted = sum(len(t) for s, t in self.output.items() if s.request_id == request.id)
        assert end.usage.completion_tokens == emitted
        assert end.preemptions <= 2 * request.choices

    @rule(
        common=st.sampled_from([0, 0, 9, 17]),
        own=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        output=st.integers(1, 50),
        choices=st.sampled_from([1, 1, 1, 1, 2, 3]),
        tier=st.integers(0, 2),
        timed=st.booleans(),
        patience_ms=st.one_of(st.none(), st.none(), st.integers(1, 9000)),
    )
    def submit(self, common, own, output, choices, tier, timed, patience_ms):
        self.names += 1
        deadline_ns = None if patience_ms is None else self.now_ns + patience_ms * MS
        request = Request(
            f"r{self.names}",
            self.now_ns,
            (3,) * common + tuple(own),
            output,
            choices,
            tier,
            ttft_due_ns=self.now_ns + 500 * MS if timed else None,
            tpot_ns=40 * MS if timed else None,
            deadline_ns=deadline_ns,
        )
        self.requests[request.id] = request
        for choice in range(choices):
            sequence = SequenceId(request.id, choice)
            self.output[sequence] = []
            self.executor.open_sequence(sequence, GREEDY, request.prompt)
        self.handle(Submitted(request))

    def running(self) -> bool:
        return self.replica.running is not None

    @precondition(running)
    @rule(count=st.integers(1, 12), took_ms=st.integers(1, 60), stop=st.integers(0, 80))
    def steps(self, count, took_ms, stop):
        for _ in range(count):
            if self.running():
                self.step(took_ms, stop)
                check_invariants(self.replica)

    def step(self, took_ms, stop):
        plan = self.replica.running
        assert plan is not None
        self.now_ns += took_ms * MS
        sampled = []
        for token in self.executor.run(plan).sampled:
            prompt = self.requests[token.sequence.request_id].prompt
            assert token.token == hashed([*prompt, *self.output[token.sequence]], 0)
            stops = StopReason.END_TOKEN if token.token % 80 == stop else None
            sampled.append(Sampled(token.sequence, token.token, stops))
        self.handle(StepDone(plan.step, tuple(sampled), took_ms * MS))

    @precondition(running)
    @rule(which=st.one_of(st.none(), st.integers(0, 9)), chance=st.integers(0, 3))
    def fail(self, which, chance):
        plan = self.replica.running
        if plan is None or chance:
            return
        rows = plan.rows
        blamed = () if which is None else (rows[which % len(rows)].sequence,)
        self.handle(StepFailed(plan.step, blamed, "scripted"))

    @rule(which=st.integers(0, 40))
    def cancel(self, which):
        self.handle(Cancelled(f"r{which}"))

    @rule(waited_ms=st.integers(0, 800))
    def wait(self, waited_ms):
        self.now_ns += waited_ms * MS
        if self.wake_ns is not None and self.wake_ns <= self.now_ns:
            self.wake_ns = None
            self.handle(Woken())

    @rule(grace_ms=st.integers(0, 3000))
    @precondition(lambda self: len(self.log) > 150)
    def drain(self, grace_ms):
        self.handle(Draining(self.now_ns + grace_ms * MS))

    @invariant()
    def invariants_hold(self):
        check_invariants(self.replica)

    def teardown(self):
        """Everything comes to its end, and the log gives the same effects in a fresh replica."""
        if not hasattr(self, "log"):
            return
        for _ in range(3000):
            if self.running():
                self.step(20, -1)
            elif len(self.ends) < len(self.requests):
                assert self.wake_ns is not None, "somebody waits and nothing will happen"
                self.now_ns = max(self.now_ns, self.wake_ns)
                self.wake_ns = None
                self.handle(Woken())
            else:
                break
            check_invariants(self.replica)
        assert set(self.ends) == set(self.requests)
        assert self.replica.roster.ledger.used == 0
        replica = self.fresh()
        for event, now_ns, effects in self.log:
            assert replica.handle(event, now_ns) == effects


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
