"""How steps are filled under each policy."""

from itertools import pairwise

import pytest

from sluice.core.batching import ALONE_TOKENS, LEAN_TOKENS
from sluice.core.costmodel import Coefficients, FixedCostModel, Load
from sluice.core.request import Request, SequenceId
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.core.step import Plan
from sluice.executors.simulated import SimulatedExecutor, load_of
from sluice.testing.executors import FakeExecutor
from sluice.testing.replicas import ReplicaRun, executor_limits

MS = 1_000_000
S = 1_000_000_000
COEFFICIENTS = Coefficients(10e6, 0.5e6, 1e6, 0.0, 0.0)  # 10 ms + 0.5 ms per token + 1 ms per row


def limits_of(policy=BatchingPolicy.SLO, **fields):
    return BatchingLimits(4096, 32, 512, policy=policy, **fields)


def run_of(limits):
    executor = SimulatedExecutor(executor_limits(limits), COEFFICIENTS)
    return ReplicaRun(limits, executor, FixedCostModel(COEFFICIENTS))


def distinct(number, tokens):
    return tuple(range(number * 10_000, number * 10_000 + tokens))


def chunks_of(run, name):
    """Per step: (start, tokens of ``name``, decode rows beside them)."""
    found = []
    for start_ns, plan in run.steps:
        for row in plan.rows:
            if row.sequence.request_id == name and len(row.tokens) > 1:
                decodes = sum(len(other.tokens) == 1 for other in plan.rows)
                found.append((start_ns, len(row.tokens), decodes))
    return found


def test_every_decode_is_in_every_step_before_any_prefill():
    run = run_of(limits_of())
    for number in range(3):
        run.submit(Request(f"d{number}", 0, distinct(number, 10), 200))
    run.submit(Request("p", S, distinct(9, 600), 5), S)
    run.run()
    for start_ns, plan in run.steps:
        if S <= start_ns < run.token_ns[SequenceId("p", 0)][0]:
            assert [len(row.tokens) for row in plan.rows[:3]] == [1, 1, 1]


def test_prefill_chunk_fills_the_step_time_and_no_more():
    run = run_of(limits_of(step_ns_max=60 * MS))
    run.submit(Request("p", 0, distinct(1, 400), 1))
    run.run()
    sizes = [tokens for _, tokens, _ in chunks_of(run, "p")]
    assert sizes[0] == 96  # (60 - 10) / 0.5 = 100 tokens, in sixteens
    assert sum(sizes) == 400


def lone_prompt_run(chunk_context_ns):
    """A prompt with nobody beside it, where each token attends to its context so expensively."""
    coefficients = Coefficients(18e6, 0.45e6, 0.9e6, 1500.0, chunk_context_ns)
    limits = limits_of()
    executor = SimulatedExecutor(executor_limits(limits), coefficients)
    run = ReplicaRun(limits, executor, FixedCostModel(coefficients))
    run.submit(Request("p", 0, distinct(1, 3000), 1))
    run.run()
    return run


def test_lone_prompt_is_computed_in_useful_chunks_however_slow_the_machine_is():
    """64 tokens behind 3,000 take 160 ms; 100 ms would have given 31."""
    sizes = [tokens for _, tokens, _ in chunks_of(lone_prompt_run(600.0), "p")]
    assert min(sizes[:-1]) == ALONE_TOKENS
    assert max(sizes) > 2 * ALONE_TOKENS


def test_chunk_of_a_lone_prompt_takes_twice_the_step_time_at_most():
    run = lone_prompt_run(3000.0)
    assert max(plan.predicted_ns for _, plan in run.steps) <= 200 * MS
    sizes = [tokens for _, tokens, _ in chunks_of(run, "p")]
    assert LEAN_TOKENS <= min(sizes[:-1]) < ALONE_TOKENS


def test_long_prompt_beside_a_stream_keeps_to_the_step_time():
    coefficients = Coefficients(18e6, 0.45e6, 0.9e6, 1500.0, 600.0)
    limits = limits_of()
    executor = SimulatedExecutor(executor_limits(limits), coefficients)
    run = ReplicaRun(limits, executor, FixedCostModel(coefficients))
    run.submit(Request("d", 0, distinct(1, 10), 60))
    run.submit(Request("p", 10 * MS, distinct(2, 3000), 5), 10 * MS)
    run.run()
    assert max(plan.predicted_ns for _, plan in run.steps if len(plan.rows) == 2) <= 100 * MS


def test_chunk_is_bounded_in_tokens_too():
    run = run_of(limits_of(step_ns_max=10 * S, chunk_tokens_max=64))
    run.submit(Request("p", 0, distinct(1, 200), 1))
    run.run()
    assert [tokens for _, tokens, _ in chunks_of(run, "p")] == [64, 64, 64, 8]


def test_chunk_leaves_residents_their_time_per_token():
    """A stream that must have a token every 40 ms bounds the step although 100 ms are allowed."""
    run = run_of(limits_of())
    run.submit(Request("d", 0, distinct(1, 10), 60, ttft_due_ns=S, tpot_ns=40 * MS))
    run.submit(Request("p", 20 * MS, distinct(2, 900), 5), 20 * MS)
    run.run()
    times = run.token_ns[SequenceId("d", 0)]
    for number, at_ns in enumerate(times):
        assert at_ns <= times[0] + number * 40 * MS
    assert len(chunks_of(run, "p")) > 5


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_prefill_gets_its_share_of_the_time_however_little_the_residents_leave(share):
    """The stream's own step takes 11.5 ms of the 12 that a step may take."""
    run = run_of(limits_of(prefill_share=share, step_ns_max=12 * MS))
    run.submit(Request("d", 0, distinct(1, 10), 1000))
    run.submit(Request("p", S, distinct(2, 600), 5), S)
    run.run()
    sizes = [tokens for _, tokens, _ in chunks_of(run, "p")]
    assert min(sizes[:-1]) >= LEAN_TOKENS
    prefill_ns = 600 * COEFFICIENTS.token_ns
    assert run.ends["p"].phases.prefill_ns == pytest.approx(prefill_ns / share, rel=0.1)


def test_hopelessly_late_stream_holds_nobody_back():
    """Its target cannot be met even in steps without prefill: prompts get whole steps."""
    run = run_of(limits_of())
    run.submit(Request("d", 0, distinct(1, 10), 100, ttft_due_ns=S, tpot_ns=5 * MS))
    run.submit(Request("p", 500 * MS, distinct(2, 160), 5), 500 * MS)
    run.run()
    assert [tokens for _, tokens, _ in chunks_of(run, "p")] == [160]


def test_earlier_deadline_goes_first_within_a_tier():
    run = run_of(limits_of(sequences_max=1))
    run.submit(Request("first", 0, distinct(0, 10), 5))
    run.submit(Request("late", 1, distinct(1, 10), 5, ttft_due_ns=9 * S), 1)
    run.submit(Request("early", 2, distinct(2, 10), 5, ttft_due_ns=2 * S), 2)
    run.submit(Request("strict", 3, distinct(3, 10), 5, tier=1, ttft_due_ns=20 * S), 3)
    run.submit(Request("lower", 4, distinct(4, 10), 5, tier=2, ttft_due_ns=1 * S), 4)
    run.run()
    assert sorted(run.end_ns, key=run.end_ns.__getitem__) == [
        "first",
        "early",
        "late",
        "strict",
        "lower",
    ]


def test_few_prompts_are_half_computed_at_a_time():
    """Each prompt is shorter than those before it and would go first; two are open at most."""
    run = run_of(limits_of(sequences_max=16))
    for number, tokens in enumerate((3000, 2000, 1000, 500)):
        at_ns = number * 150 * MS
        run.submit(Request(f"p{number}", at_ns, distinct(number, tokens), 2), at_ns)
    run.run()
    left: dict[str, int] = {}
    most = 0
    for _, plan in run.steps:
        for row in plan.rows:
            name = row.sequence.request_id
            prompt = len(run.submitted[name].prompt)
            left[name] = prompt - row.past_tokens - len(row.tokens)
        most = max(most, sum(tokens > 0 for tokens in left.values()))
    assert most == 2


def test_fcfs_takes_a_fixed_number_of_tokens_in_order_of_arrival():
    run = run_of(limits_of(BatchingPolicy.FCFS, chunk_tokens_max=100))
    run.submit(Request("long", 0, distinct(1, 250), 50))
    run.submit(Request("short", 1, distinct(2, 20), 5, tier=0), 1)
    run.run()
    assert [tokens for _, tokens, _ in chunks_of(run, "long")] == [100, 100, 50]
    assert chunks_of(run, "short")[0][0] == chunks_of(run, "long")[2][0]


def test_static_waits_for_a_batch_and_runs_it_to_its_end():
    limits = limits_of(BatchingPolicy.STATIC, static_sequences=2, static_wait_ns=10 * S)
    run = run_of(limits)
    for number in range(4):
        at_ns = number * 100 * MS
        run.submit(
            Request(f"r{number}", at_ns, distinct(number, 20), 10 + 30 * (number % 2)), at_ns
        )
    run.run()
    first = {name: run.steps_first_ns(name) for name in run.ends}
    assert first["r0"] == first["r1"] == 100 * MS
    assert first["r2"] == first["r3"] == run.end_ns["r1"]
    assert run.end_ns["r0"] < run.end_ns["r1"]


def test_static_starts_a_smaller_batch_after_its_wait():
    limits = limits_of(BatchingPolicy.STATIC, static_sequences=8, static_wait_ns=2 * S)
    run = run_of(limits)
    run.submit(Request("a", 0, distinct(1, 20), 5), at_ns=0)
    run.submit(Request("b", 0, distinct(2, 20), 5), at_ns=S)
    run.run()
    assert run.steps_first_ns("a") == run.steps_first_ns("b") == 2 * S


def test_continuous_policies_answer_a_burst_sooner_than_static():
    ends = {}
    for policy in BatchingPolicy:
        run = run_of(limits_of(policy, static_sequences=4, sequences_max=4))
        for number in range(12):
            output = 10 if number % 4 else 100
            run.submit(Request(f"r{number}", 0, distinct(number, 30), output))
        run.run()
        ends[policy] = max(run.end_ns.values())
    assert ends[BatchingPolicy.SLO] < 0.75 * ends[BatchingPolicy.STATIC]
    assert ends[BatchingPolicy.FCFS] < 0.75 * ends[BatchingPolicy.STATIC]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_further_choices_wait_for_the_first_only_to_share_its_prompt(prefix_cache):
    run = run_of(limits_of(prefix_cache=prefix_cache))
    run.submit(Request("a", 0, distinct(1, 96), 4, choices=3))
    run.run()
    first = run.steps[0][1]
    assert len(first.rows) == (1 if prefix_cache else 2)
    again = 32 if prefix_cache else 96  # the last block's worth holds the last prompt token
    assert run.computed_tokens("a") == (96 + 3) + 2 * (again + 3)


def test_prediction_in_the_plan_is_the_cost_of_its_load():
    run = run_of(limits_of())
    run.submit(Request("a", 0, distinct(1, 50), 3))
    run.run()
    model = FixedCostModel(COEFFICIENTS)
    assert run.steps[0][1].predicted_ns == model.step_ns(Load().with_chunk(0, 50))
    assert run.steps[1][1].predicted_ns == model.step_ns(Load(1, 1, 51))


def test_prompt_in_time_is_begun_although_late_ones_are_half_computed():
    """Two prompts are open when a step of 5 s makes both late."""
    steps: list[Plan] = []

    def duration_ns(plan):
        steps.append(plan)
        return 5 * S if len(steps) == 5 else int(COEFFICIENTS.predict_ns(load_of(plan)))

    limits = limits_of()
    executor = FakeExecutor(executor_limits(limits), duration_ns=duration_ns)
    run = ReplicaRun(limits, executor, FixedCostModel(COEFFICIENTS))
    for number, tokens in enumerate((3000, 2000)):
        at_ns = number * 150 * MS
        prompt = distinct(number, tokens)
        run.submit(Request(f"p{number}", at_ns, prompt, 2, ttft_due_ns=at_ns + 3 * S), at_ns)
    run.submit(Request("urgent", 6 * S, distinct(9, 900), 2, ttft_due_ns=8 * S), 6 * S)
    run.run()
    assert {row.sequence.request_id for plan in steps[:5] for row in plan.rows} == {"p0", "p1"}
    assert run.steps_first_ns("urgent") <= 6 * S + 100 * MS
    assert run.token_ns[SequenceId("urgent", 0)][0] < run.token_ns[SequenceId("p1", 0)][0]


def test_step_leaves_no_gap_longer_than_one_token_of_time_however_much_is_in_hand():
    """After a second alone the stream is far ahead of its 40 ms per token."""
    run = run_of(limits_of())
    run.submit(Request("d", 0, distinct(1, 10), 200, ttft_due_ns=S, tpot_ns=40 * MS))
    run.submit(Request("p", S, distinct(2, 900), 5), S)
    run.run()
    times = run.token_ns[SequenceId("d", 0)]
    assert max(b - a for a, b in pairwise(times)) <= 40 * MS
    assert len(chunks_of(run, "p")) > 10


def blocked_at(run, at_ns):
    run.run(until_ns=at_ns)
    return run.reports[-1].waiting, run.reports[-1].blocked


def test_report_tells_those_that_do_not_fit_from_those_that_wait_for_their_prefill():
    run = run_of(BatchingLimits(4096, 32, 40))
    run.submit(Request("holder", 0, distinct(1, 600), 200))
    run.submit(Request("large", MS, distinct(2, 900), 20), MS)
    run.submit(Request("small", MS, distinct(3, 60), 200), MS)
    assert blocked_at(run, 2 * MS) == (2, 0)
    assert blocked_at(run, S) == (1, 1)  # the small one went ahead of it


def test_all_that_wait_are_blocked_where_no_place_is_left():
    run = run_of(limits_of(sequences_max=1))
    for number in range(3):
        run.submit(Request(f"r{number}", number, distinct(number, 60), 200), number)
    assert blocked_at(run, S) == (2, 2)


def test_stream_that_a_stall_made_late_catches_up_before_prompts_get_their_time_again():
    """One step beside a prompt of 3,000 tokens takes 300 ms; the target is 40 ms per token."""
    stalled: list[int] = []

    def duration_ns(plan):
        if len(plan.rows) == 2 and not stalled:
            stalled.append(plan.step)
            return 300 * MS
        return int(COEFFICIENTS.predict_ns(load_of(plan)))

    limits = limits_of()
    executor = FakeExecutor(executor_limits(limits), duration_ns=duration_ns)
    run = ReplicaRun(limits, executor, FixedCostModel(COEFFICIENTS))
    run.submit(Request("d", 0, distinct(1, 10), 60, ttft_due_ns=S, tpot_ns=40 * MS))
    run.submit(Request("p", 10 * MS, distinct(2, 3000), 5), 10 * MS)
    run.run()
    times = run.token_ns[SequenceId("d", 0)]
    late = [at_ns > times[0] + number * 40 * MS for number, at_ns in enumerate(times)]
    assert 1 <= sum(late) <= 15
    assert not any(late[20:])
    assert len(chunks_of(run, "p")) > 30
