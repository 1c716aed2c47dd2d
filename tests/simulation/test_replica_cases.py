"""Cases from public reports, one replica in virtual time (ids as in the list of cases)."""

from itertools import pairwise
from statistics import mean

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.request import EndReason, Request, SequenceId
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.executors.simulated import SimulatedExecutor
from sluice.testing.executors import FakeExecutor
from sluice.testing.replicas import ReplicaRun, executor_limits

MS = 1_000_000
S = 1_000_000_000


def distinct(number, tokens):
    """A prompt that shares no block with that of another number."""
    return tuple(range(number * 10_000, number * 10_000 + tokens))


def timed(limits, coefficients):
    executor = SimulatedExecutor(executor_limits(limits), coefficients)
    return ReplicaRun(limits, executor, FixedCostModel(coefficients))


def test_d06_queued_requests_of_gone_clients_cost_nothing():
    limits = BatchingLimits(4096, 32, 400, sequences_max=1)
    run = ReplicaRun(limits, FakeExecutor(executor_limits(limits), duration_ns=lambda _: 50 * MS))
    run.submit(Request("A", 0, distinct(0, 50), 100))
    for number, name in enumerate("BCDE", 1):
        run.submit(Request(name, number * MS, distinct(number, 50), 5), number * MS)
    for name in "BCD":
        run.cancel(name, at_ns=S)
    run.run(until_ns=S)
    assert run.reports[-1].waiting == 1
    run.run()
    for name in "BCD":
        assert run.ends[name].reason is EndReason.CANCELLED
        assert run.computed_tokens(name) == 0
        assert run.end_ns[name] == S
    started_ns = run.end_ns["E"] - run.ends["E"].phases.prefill_ns - run.ends["E"].phases.decode_ns
    assert started_ns == run.end_ns["A"]


@pytest.mark.parametrize("policy", BatchingPolicy)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_d09_overflow_of_the_shared_pool_hurts_nobody(policy, prefix_cache):
    limits = BatchingLimits(
        2048, 32, 32, sequences_max=4, policy=policy, prefix_cache=prefix_cache, static_sequences=4
    )
    alone = {}
    for number in range(4):
        solo = ReplicaRun(limits)
        solo.submit(Request("solo", 0, distinct(number, 200), 300))
        alone[number] = solo.run().tokens[SequenceId("solo", 0)]
    run = ReplicaRun(limits)
    for number in range(4):
        run.submit(Request(f"r{number}", 0, distinct(number, 200), 300))
    run.run()
    for number in range(4):
        end = run.ends[f"r{number}"]
        assert (end.reason, end.usage.completion_tokens) == (EndReason.LENGTH, 300)
        assert run.tokens[SequenceId(f"r{number}", 0)] == alone[number]


def long_prompt_run(shorts):
    """Three steady streams, then a prompt of 8,000 tokens, then short ones right behind it."""
    limits = BatchingLimits(16_384, 32, 1024, sequences_max=8)
    run = timed(limits, Coefficients())
    for number in range(3):
        run.submit(Request(f"stream{number}", 0, distinct(number, 20), 700))
    run.submit(Request("long", 2 * S, distinct(5, 8000), 5), 2 * S)
    for number in range(shorts):
        at_ns = 2 * S + (number + 1) * 10 * MS
        run.submit(Request(f"short{number}", at_ns, distinct(10 + number, 40), 5), at_ns)
    return run.run()


def test_d10_streams_go_on_while_a_long_prompt_is_computed():
    run = long_prompt_run(shorts=0)
    chunks = [
        (start_ns, plan)
        for start_ns, plan in run.steps
        if any(row.sequence.request_id == "long" and len(row.tokens) > 1 for row in plan.rows)
    ]
    assert len(chunks) > 20
    for _, plan in chunks:
        assert [row.sequence.request_id for row in plan.rows[:3]] == [
            f"stream{i}" for i in range(3)
        ]
        assert plan.predicted_ns <= 100 * MS
    steady_ns = 25 * MS
    for number in range(3):
        times = run.token_ns[SequenceId(f"stream{number}", 0)]
        gaps = sorted(b - a for a, b in pairwise(times))
        assert gaps[int(0.99 * len(gaps))] <= 100 * MS + 2 * steady_ns


def test_d10_long_prompt_is_hardly_slower_beside_the_streams():
    limits = BatchingLimits(16_384, 32, 1024, sequences_max=8)
    solo = timed(limits, Coefficients())
    solo.submit(Request("long", 0, distinct(5, 8000), 5))
    assert long_prompt_run(shorts=0).ttft_ns("long") <= 1.5 * solo.run().ttft_ns("long")


def test_d10_short_prompts_start_before_the_long_one_is_finished():
    run = long_prompt_run(shorts=3)
    for number in range(3):
        first_ns = run.token_ns[SequenceId(f"short{number}", 0)][0]
        assert first_ns < run.token_ns[SequenceId("long", 0)][0]
        assert run.ttft_ns(f"short{number}") < S


def test_d11_strict_tier_goes_next_and_order_within_a_tier_is_arrival():
    limits = BatchingLimits(4096, 32, 400, sequences_max=4)
    run = ReplicaRun(limits)
    for number in range(30):
        run.submit(Request(f"low{number}", number, distinct(number, 20), 20, tier=1), number)
    run.submit(Request("high", 50 * MS, distinct(99, 20), 20, tier=0), 50 * MS)
    run.run()
    first = {name: run.token_ns[SequenceId(name, 0)][0] for name in run.ends}
    earlier = [name for name in first if first[name] < first["high"]]
    assert sorted(earlier) == ["low0", "low1", "low2", "low3"]
    low = [first[f"low{number}"] for number in range(30)]
    assert low == sorted(low)


def test_d23_time_to_first_token_includes_the_queue():
    """One slot, prefill 0.2 s, decode 1.8 s, ten requests at once."""
    limits = BatchingLimits(4096, 32, 400, sequences_max=1)

    def duration_ns(plan):
        return 200 * MS if len(plan.rows[0].tokens) > 1 else 180 * MS

    run = ReplicaRun(limits, FakeExecutor(executor_limits(limits), duration_ns=duration_ns))
    for number in range(10):
        run.submit(Request(f"r{number}", 0, distinct(number, 50), 11))
    run.run()
    names = [f"r{number}" for number in range(10)]
    ttft_s = [run.ttft_ns(name) / S for name in names]
    assert ttft_s == pytest.approx([0.2 + 2 * number for number in range(10)])
    assert mean(ttft_s) == pytest.approx(9.2)
    assert mean(run.ends[n].phases.queue_ns / S for n in names) == pytest.approx(9.0)
    assert mean(run.ends[n].phases.prefill_ns / S for n in names) == pytest.approx(0.2)
    assert mean(run.ends[n].phases.decode_ns / S for n in names) == pytest.approx(1.8)


def test_d23_tokenising_time_counts():
    limits = BatchingLimits(4096, 32, 400)
    run = ReplicaRun(limits, FakeExecutor(executor_limits(limits)))
    run.submit(Request("a", 0, distinct(1, 50), 3), at_ns=S)
    run.run()
    assert run.ttft_ns("a") == S + 10 * MS
    assert run.ends["a"].phases.admission_ns == S
