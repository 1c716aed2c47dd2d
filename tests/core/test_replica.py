"""The replica: one request's life, endings in every phase, drains, failures."""

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.errors import InternalError
from sluice.core.events import (
    Drained,
    End,
    Report,
    RunStep,
    StepDone,
    StepFailed,
    Submitted,
    Woken,
)
from sluice.core.replica import Replica
from sluice.core.request import EndReason, PhaseTimes, Request, SequenceId, Usage
from sluice.core.roster import BatchingLimits
from sluice.core.step import Sampled, StopReason
from sluice.executors.base import StepError
from sluice.testing.executors import FakeExecutor
from sluice.testing.replicas import ReplicaRun, executor_limits

MS = 1_000_000
LIMITS = BatchingLimits(context_tokens_max=256, block_size=4, blocks_total=64, sequences_max=4)


def request(name="a", prompt=8, output=5, **fields):
    return Request(name, fields.pop("arrived_ns", 0), tuple(range(prompt)), output, **fields)


def steps_of(run, name):
    return [plan for _, plan in run.steps if any(r.sequence.request_id == name for r in plan.rows)]


def test_one_request_from_prompt_to_limit():
    run = ReplicaRun(LIMITS)
    run.submit(request(prompt=8, output=3))
    run.run()
    rows = [plan.rows[0] for _, plan in run.steps]
    assert [(len(r.tokens), r.past_tokens, r.sample) for r in rows] == [
        (8, 0, True),
        (1, 8, True),
        (1, 9, True),
    ]
    tokens = run.tokens[SequenceId("a", 0)]
    assert [r.tokens[0] for r in rows[1:]] == tokens[:2]
    end = run.ends["a"]
    assert end.reason is EndReason.LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (8, 3)
    assert run.sequence_ends == {SequenceId("a", 0): EndReason.LENGTH}


def test_stop_seen_by_the_runtime_ends_the_sequence():
    limits = executor_limits(LIMITS)
    run = ReplicaRun(
        LIMITS, FakeExecutor(limits, scripts={"a": [5, 6, 2]}), end_tokens=frozenset({2})
    )
    run.submit(request(output=50))
    run.run()
    assert run.tokens[SequenceId("a", 0)] == [5, 6, 2]
    assert run.ends["a"].reason is EndReason.STOP
    assert run.ends["a"].usage.completion_tokens == 3


def test_request_that_fills_the_context_exactly_runs_to_its_end():
    run = ReplicaRun(LIMITS)
    run.submit(request(prompt=250, output=6))
    run.run()
    assert run.ends["a"].reason is EndReason.LENGTH
    assert run.ends["a"].usage.completion_tokens == 6


def test_phases_are_exact():
    limits = BatchingLimits(
        context_tokens_max=256, block_size=4, blocks_total=64, sequences_max=1, chunk_tokens_max=4
    )
    run = ReplicaRun(limits)
    run.submit(request("first", prompt=3, output=3), at_ns=0)
    run.submit(request("a", prompt=8, output=3, arrived_ns=2 * MS), at_ns=5 * MS)
    run.run()
    # "first" takes three steps of 10 ms; then "a" takes two chunks and two decode steps.
    assert run.ends["a"].phases == PhaseTimes(
        admission_ns=3 * MS, queue_ns=25 * MS, prefill_ns=20 * MS, decode_ns=20 * MS
    )


@pytest.mark.parametrize(
    ("prompt", "output", "choices", "words"),
    [
        (256, 1, 1, ("256", "context")),
        (250, 7, 1, ("257", "256", "context")),
        (0, 5, 1, ("prompt",)),
        (8, 0, 1, ("output",)),
        (8, 5, 0, ("choice",)),
        (8, 5, 99, ("99", "choices")),
    ],
)
def test_what_can_never_run_ends_at_once_with_a_reason(prompt, output, choices, words):
    run = ReplicaRun(LIMITS)
    run.submit(request("other"))
    run.submit(request("a", prompt=prompt, output=output, choices=choices))
    run.run()
    assert run.ends["a"].reason is EndReason.FAILED
    assert all(word in run.ends["a"].error for word in words)
    assert run.computed_tokens("a") == 0
    assert run.ends["a"].usage == Usage(0, 0, 0)
    assert run.ends["other"].reason is EndReason.LENGTH


def test_prompt_larger_than_the_pool_is_refused_with_both_numbers():
    run = ReplicaRun(BatchingLimits(context_tokens_max=256, block_size=4, blocks_total=5))
    run.submit(request(prompt=21, output=1))
    run.run()
    assert "21" in run.ends["a"].error
    assert "20" in run.ends["a"].error


def test_cancel_in_the_queue_computes_nothing():
    run = ReplicaRun(BatchingLimits(256, 4, 64, sequences_max=1))
    run.submit(request("first", output=20))
    run.submit(request("a"), at_ns=1)
    run.cancel("a", at_ns=15 * MS)
    run.run()
    assert run.ends["a"].reason is EndReason.CANCELLED
    assert run.end_ns["a"] == 15 * MS
    assert run.computed_tokens("a") == 0
    assert run.ends["a"].usage == Usage(0, 0, 0)


def test_cancel_between_chunks_of_the_prompt_ends_after_the_running_one():
    run = ReplicaRun(BatchingLimits(256, 4, 64, chunk_tokens_max=16))
    run.submit(request(prompt=100))
    run.cancel("a", at_ns=15 * MS)
    run.run()
    assert run.end_ns["a"] == 20 * MS
    assert run.computed_tokens("a") == 32
    assert run.ends["a"].usage.completion_tokens == 0


def test_cancel_in_decode_frees_blocks_after_the_step_and_emits_nothing_of_it():
    run = ReplicaRun(LIMITS)
    run.submit(request(output=100))
    run.cancel("a", at_ns=35 * MS)
    run.run()
    assert run.end_ns["a"] == 40 * MS
    assert len(run.tokens[SequenceId("a", 0)]) == 3
    assert run.ends["a"].usage.completion_tokens == 3
    assert run.replica.roster.ledger.used == 0


def test_cancel_of_one_leaves_the_others_as_they_would_be_alone():
    alone = ReplicaRun(LIMITS)
    alone.submit(request("a", output=12))
    alone.run()
    run = ReplicaRun(LIMITS)
    run.submit(request("a", output=12))
    run.submit(request("b", output=30))
    run.cancel("b", at_ns=35 * MS)
    run.run()
    assert run.tokens[SequenceId("a", 0)] == alone.tokens[SequenceId("a", 0)]


def test_cancel_of_an_unknown_request_is_ignored():
    run = ReplicaRun(LIMITS)
    run.submit(request())
    run.cancel("nobody", at_ns=1)
    run.cancel("a", at_ns=500 * MS)
    run.run()
    assert run.ends["a"].reason is EndReason.LENGTH


def test_deadline_of_the_request_ends_it_in_the_queue():
    run = ReplicaRun(BatchingLimits(256, 4, 64, sequences_max=1))
    run.submit(request("first", output=20))
    run.submit(request("later", deadline_ns=95 * MS), at_ns=1)
    run.submit(request("a", deadline_ns=45 * MS), at_ns=2)
    run.run()
    assert run.ends["a"].reason is run.ends["later"].reason is EndReason.EXPIRED
    assert (run.end_ns["a"], run.end_ns["later"]) == (45 * MS, 95 * MS)
    assert run.ends["first"].reason is EndReason.LENGTH


def test_deadline_of_the_request_ends_it_wherever_it_is():
    run = ReplicaRun(LIMITS)
    run.submit(request(output=100, deadline_ns=45 * MS))
    run.run()
    assert run.ends["a"].reason is EndReason.EXPIRED
    assert run.end_ns["a"] == 50 * MS


def test_failed_step_ends_the_blamed_and_computes_the_others_again():
    alone = ReplicaRun(LIMITS)
    alone.submit(request("a", output=6))
    alone.run()
    failure = StepError("bad token", (SequenceId("b", 0),))
    run = ReplicaRun(LIMITS, FakeExecutor(executor_limits(LIMITS), failures={3: failure}))
    run.submit(request("a", output=6))
    run.submit(request("b", output=6))
    run.run()
    assert (run.ends["b"].reason, run.ends["b"].error) == (EndReason.FAILED, "bad token")
    assert run.ends["a"].reason is EndReason.LENGTH
    assert run.tokens[SequenceId("a", 0)] == alone.tokens[SequenceId("a", 0)]


@pytest.mark.parametrize("blamed", [(), (SequenceId("not in the plan", 0),)])
def test_failed_step_without_a_culprit_ends_all_its_sequences(blamed):
    failures = {3: StepError("out of memory", blamed)}
    run = ReplicaRun(LIMITS, FakeExecutor(executor_limits(LIMITS), failures=failures))
    run.submit(request("a"))
    run.submit(request("b"))
    run.submit(request("later"), at_ns=500 * MS)
    run.run()
    assert run.ends["a"].reason is run.ends["b"].reason is EndReason.FAILED
    assert run.ends["later"].reason is EndReason.LENGTH


def test_choices_share_the_prompt_and_end_one_by_one():
    executor = FakeExecutor(executor_limits(LIMITS))
    run = ReplicaRun(LIMITS, executor)
    run.submit(request(prompt=40, output=4, choices=3))
    run.run()
    assert run.computed_tokens("a") == (40 + 3) + 2 * (4 + 3)
    assert len(run.sequence_ends) == 3
    end = run.ends["a"]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (40, 12)
    tokens = [run.tokens[SequenceId("a", choice)] for choice in range(3)]
    assert tokens[0] == tokens[1] == tokens[2]


def test_request_of_a_stopped_and_a_cut_choice_counts_as_cut():
    limits = executor_limits(LIMITS)
    replica = Replica(LIMITS, FixedCostModel(Coefficients()))
    effects = replica.handle(Submitted(request(output=2, choices=2)), 0)
    stops = {0: StopReason.STOP_STRING, 1: None}
    for now_ns in range(1, 9):
        plan = next((e.plan for e in effects if isinstance(e, RunStep)), None)
        if plan is None:
            break
        sampled = tuple(
            Sampled(r.sequence, 7, stops[r.sequence.choice]) for r in plan.rows if r.sample
        )
        effects = replica.handle(StepDone(plan.step, sampled, MS), now_ns)
    end = next(e for e in effects if isinstance(e, End))
    assert end.reason is EndReason.LENGTH
    assert end.usage.completion_tokens == 3
    assert limits.blocks_total == next(e for e in effects if isinstance(e, Report)).blocks_free


def test_drain_finishes_what_runs_and_takes_nothing_more():
    run = ReplicaRun(LIMITS)
    run.submit(request("a", output=10))
    run.drain(at_ns=25 * MS, deadline_ns=10_000 * MS)
    run.submit(request("late"), at_ns=30 * MS)
    run.run()
    assert run.ends["a"].reason is EndReason.LENGTH
    assert run.ends["late"].reason is EndReason.SHUTDOWN
    assert [now for now, _, effects in run.events if Drained() in effects] == [100 * MS]


def test_drain_deadline_ends_what_is_left():
    run = ReplicaRun(LIMITS)
    run.submit(request("a", output=100))
    run.drain(at_ns=25 * MS, deadline_ns=45 * MS)
    run.run()
    assert run.ends["a"].reason is EndReason.SHUTDOWN
    assert run.end_ns["a"] == 50 * MS


def test_idle_replica_is_drained_at_once():
    replica = Replica(LIMITS, FixedCostModel(Coefficients()))
    run = ReplicaRun(LIMITS)
    run.drain(at_ns=5, deadline_ns=10)
    run.run()
    assert Drained() in run.events[0][2]
    assert not any(isinstance(e, RunStep) for e in replica.handle(Woken(), 7))


def test_driver_mistakes_raise_and_change_nothing():
    replica = Replica(LIMITS, FixedCostModel(Coefficients()))
    effects = replica.handle(Submitted(request()), 0)
    plan = next(e.plan for e in effects if isinstance(e, RunStep))
    with pytest.raises(InternalError, match="twice"):
        replica.handle(Submitted(request()), 1)
    with pytest.raises(InternalError, match="not running"):
        replica.handle(StepDone(plan.step + 1, (), MS), 1)
    with pytest.raises(InternalError, match="not running"):
        replica.handle(StepFailed(plan.step + 1, (), ""), 1)
    with pytest.raises(InternalError, match="other sequences"):
        replica.handle(StepDone(plan.step, (Sampled(SequenceId("x", 0), 1),), MS), 1)
    assert replica.running is plan
    sampled = (Sampled(SequenceId("a", 0), 1),)
    assert any(isinstance(e, RunStep) for e in replica.handle(StepDone(plan.step, sampled, MS), 2))


def test_report_counts_sequences_blocks_and_prefix_hits():
    limits = BatchingLimits(256, 4, 64, sequences_max=1)
    run = ReplicaRun(limits)
    run.submit(request("a", prompt=8, output=5))
    run.submit(request("b", prompt=8, output=5))
    run.submit(request("c", prompt=8, output=5))
    run.run(until_ns=25 * MS)
    report = run.reports[-1]
    assert (report.running, report.waiting) == (1, 2)
    assert report.blocks_total - report.blocks_free == 3
    run.run()
    report = run.reports[-1]
    assert (report.running, report.waiting) == (0, 0)
    assert (report.prefix_hit_tokens, report.prefix_query_tokens) == (8, 24)
    assert report.blocks_free == 64
