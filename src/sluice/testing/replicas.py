"""One replica in virtual time, with everything that a test wants to know about it written down.

After each event the invariants of the policy are checked, so that any test that runs a replica also
tests them.
"""

from collections import defaultdict
from collections.abc import Sequence

from sluice.core.costmodel import Coefficients, CostModel, FixedCostModel
from sluice.core.events import (
    Cancelled,
    Draining,
    Emit,
    End,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLimits,
    Report,
    RunStep,
    SequenceEnded,
    Submitted,
)
from sluice.core.lifecycle import SequenceState
from sluice.core.replica import Replica
from sluice.core.request import EndReason, Request, SequenceId
from sluice.core.residency import PREEMPTIONS_MAX
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.core.sampling import Sampling
from sluice.core.step import Plan
from sluice.executors.base import StepExecutor, check_plan
from sluice.runtime.virtual import GREEDY, STEP_BY_STEP, Stretching, VirtualDriver
from sluice.testing.executors import FakeExecutor
from sluice.testing.ledgers import check_ledger

REPLICA_ID = "replica"


def executor_limits(limits: BatchingLimits) -> ReplicaLimits:
    """What an executor that serves these limits reports."""
    return limits.replica


class ReplicaRun:
    """A replica, its executor and the virtual driver, with a record of what came out.

    ``tokens`` and ``token_ns`` hold the emitted tokens of each sequence and when they came,
    ``ends`` the ending of each request and ``end_ns`` its time, ``steps`` each plan with its start.
    """

    def __init__(
        self,
        limits: BatchingLimits,
        executor: StepExecutor | None = None,
        cost: CostModel | None = None,
        end_tokens: frozenset[int] = frozenset(),
        stretching: Stretching = STEP_BY_STEP,
    ) -> None:
        self.replica = Replica(limits, cost or FixedCostModel(Coefficients()))
        self.executor = executor or FakeExecutor(executor_limits(limits))
        self.executor.load()
        self.driver = VirtualDriver(
            end_tokens=end_tokens, observe=self._observe, stretching=stretching
        )
        self.driver.add(REPLICA_ID, self.replica, self.executor)
        self.tokens: dict[SequenceId, list[int]] = defaultdict(list)
        self.token_ns: dict[SequenceId, list[int]] = defaultdict(list)
        self.sequence_ends: dict[SequenceId, EndReason] = {}
        self.ends: dict[str, End] = {}
        self.end_ns: dict[str, int] = {}
        self.steps: list[tuple[int, Plan]] = []
        self.events: list[tuple[int, ReplicaEvent, Sequence[ReplicaEffect]]] = []
        self.submitted: dict[str, Request] = {}
        self.reports: list[Report] = []

    def submit(self, request: Request, at_ns: int = 0, sampling: Sampling = GREEDY) -> None:
        """Let a request arrive."""
        self.driver.submit(at_ns, REPLICA_ID, request, sampling)

    def cancel(self, request_id: str, at_ns: int) -> None:
        """Let the client of a request leave."""
        self.driver.at(at_ns, REPLICA_ID, Cancelled(request_id))

    def drain(self, at_ns: int, deadline_ns: int) -> None:
        """Let the replica be drained."""
        self.driver.at(at_ns, REPLICA_ID, Draining(deadline_ns))

    def run(self, until_ns: int | None = None) -> "ReplicaRun":
        """Let everything happen; without ``until_ns`` every request must have ended then."""
        self.driver.run(until_ns)
        if until_ns is None:
            assert set(self.ends) == set(self.submitted), "a request was left without an ending"
        return self

    def ttft_ns(self, request_id: str, choice: int = 0) -> int:
        """Time from arrival to the first token."""
        first_ns = self.token_ns[SequenceId(request_id, choice)][0]
        return first_ns - self.submitted[request_id].arrived_ns

    def steps_first_ns(self, request_id: str) -> int:
        """When the first step with a row of a request began."""
        return next(
            start_ns
            for start_ns, plan in self.steps
            if any(row.sequence.request_id == request_id for row in plan.rows)
        )

    def computed_tokens(self, request_id: str) -> int:
        """How many token positions of a request were computed, recomputed ones included."""
        return sum(
            len(row.tokens)
            for _, plan in self.steps
            for row in plan.rows
            if row.sequence.request_id == request_id
        )

    def _observe(
        self, _: str, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]
    ) -> None:
        self.events.append((now_ns, event, effects))
        if isinstance(event, Submitted):
            self.submitted[event.request.id] = event.request
        for effect in effects:
            if isinstance(effect, RunStep):
                self.steps.append((now_ns, effect.plan))
            elif isinstance(effect, Emit):
                for sampled in effect.sampled:
                    assert sampled.sequence.request_id not in self.ends, "a token after the end"
                    self.tokens[sampled.sequence].append(sampled.token)
                    self.token_ns[sampled.sequence].append(now_ns)
            elif isinstance(effect, SequenceEnded):
                self.sequence_ends[effect.sequence] = effect.reason
            elif isinstance(effect, End):
                self._ended(effect, now_ns)
            elif isinstance(effect, Report):
                self.reports.append(effect)
        check_invariants(self.replica)

    def _ended(self, end: End, now_ns: int) -> None:
        assert end.request_id not in self.ends, "a request ended twice"
        self.ends[end.request_id] = end
        self.end_ns[end.request_id] = now_ns
        phases = end.phases
        life_ns = now_ns - self.submitted[end.request_id].arrived_ns
        spent_ns = (
            phases.retrieval_ns
            + phases.admission_ns
            + phases.queue_ns
            + phases.prefill_ns
            + phases.decode_ns
            + phases.preempted_ns
        )
        assert spent_ns == life_ns, "the phases do not sum to the life of the request"


def check_invariants(replica: Replica) -> None:
    """What holds after every event; an error otherwise."""
    roster, limits = replica.roster, replica.limits
    check_ledger(roster.ledger, [sequence.table for sequence in roster.residents])
    assert len(roster.residents) <= limits.sequences_max
    for sequence in roster.waiting:
        assert sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
        assert not sequence.table.blocks
        assert sequence not in roster.residents
    for sequence in roster.residents:
        assert sequence.state in (SequenceState.PREFILL, SequenceState.DECODE)
        assert sequence.computed <= len(sequence.table.blocks) * limits.block_size
        assert (sequence.pending == 1) or sequence.state is SequenceState.PREFILL
    for sequence in (*roster.waiting, *roster.residents):
        assert sequence.preemptions <= PREEMPTIONS_MAX
        assert sequence.produced < sequence.output_limit
    plan = replica.running
    if roster.residents:
        assert plan is not None, "residents stand still"
        assert plan.tokens > 0, "a step computes nothing"
    elif roster.waiting:
        assert limits.policy is BatchingPolicy.STATIC, "the waiting stand still"
    if plan is not None:
        check_plan(plan, limits.replica)
        for row in plan.rows:
            assert len(set(row.blocks)) == len(row.blocks), "a block twice in one table"
        assert len({row.sequence for row in plan.rows}) == len(plan.rows), "a sequence in two rows"
