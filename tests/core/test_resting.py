"""Who stays out of a step so that a prompt of a smaller class is computed sooner."""

from sluice.core.policies import RESTS_MAX
from sluice.core.request import Request, SequenceId
from tests.core.test_batching import MS, S, distinct, limits_of, run_of

ROW = SequenceId("row", 0)


def beside(prompt_tier, at_ns=S, **row):
    """A row of tier 5 in decode, and a prompt of several steps that comes later.

    For each step with a part of the prompt: whether the row is in it.
    """
    run = run_of(limits_of(step_ns_max=20 * MS))
    run.submit(Request("row", 0, distinct(1, 10), 400, tier=5, **row))
    run.submit(Request("prompt", at_ns, distinct(2, 400), 5, tier=prompt_tier), at_ns)
    run.run(until_ns=3 * S)
    steps = [
        [planned.sequence for planned in plan.rows]
        for _, plan in run.steps
        if any(row.sequence.request_id == "prompt" and len(row.tokens) > 1 for row in plan.rows)
    ]
    assert len(steps) > 2 * RESTS_MAX
    return [ROW in sequences for sequences in steps]


def test_a_row_rests_for_a_prompt_of_a_stricter_tier_and_not_for_long():
    present = beside(prompt_tier=1)
    assert present[:RESTS_MAX] == [False] * RESTS_MAX
    assert all(any(present[n : n + RESTS_MAX + 1]) for n in range(len(present) - RESTS_MAX))


def test_a_row_does_not_rest_for_a_prompt_of_its_own_or_a_lower_tier():
    assert all(beside(prompt_tier=5))
    assert all(beside(prompt_tier=6))


def test_a_row_whose_next_token_is_due_soon_does_not_rest():
    assert all(beside(prompt_tier=1, at_ns=100 * MS, ttft_due_ns=S, tpot_ns=14 * MS))


def test_a_row_that_rested_rests_again_after_steps_without_prompts():
    run = run_of(limits_of())
    run.submit(Request("row", 0, distinct(1, 10), 400, tier=5))
    for number in range(3):
        prompt = Request(f"prompt{number}", 0, distinct(2 + number, 60), 1, tier=1)
        run.submit(prompt, S + number * 200 * MS)
    run.run(until_ns=2 * S)
    beside = [
        [planned.sequence for planned in plan.rows]
        for _, plan in run.steps
        if any(row.sequence.request_id.startswith("prompt") for row in plan.rows)
    ]
    assert len(beside) == 3
    assert not any(ROW in sequences for sequences in beside)
