"""Ways in which schedulers of other engines stood still or turned in circles; ours must not.

``ReplicaRun`` fails where residents stand still, where the waiting stand still beside an empty
batch, or where a request is left without an ending.
"""

import pytest

from sluice.core.events import Report, RunStep
from sluice.core.request import EndReason, Request, SequenceId
from sluice.core.residency import PREEMPTIONS_MAX
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.testing.replicas import ReplicaRun

MS = 1_000_000
EACH_POLICY = pytest.mark.parametrize("policy", BatchingPolicy)


def limits_of(policy, blocks, **fields):
    return BatchingLimits(
        context_tokens_max=400, block_size=4, blocks_total=blocks, policy=policy, **fields
    )


def distinct(number, tokens):
    return tuple(range(number * 1000, number * 1000 + tokens))


def short_sighted(run):
    """Make the replica believe that outputs are short, so that it admits too many."""
    for _ in range(60):
        run.replica.roster.lengths.observe(2)
    for _ in range(6):
        run.replica.roster.lengths.observe(300)
    return run


@EACH_POLICY
def test_request_larger_than_the_pool_blocks_nobody(policy):
    """Between the pool and the context: never scheduled elsewhere, and everyone behind it waits."""
    run = ReplicaRun(limits_of(policy, blocks=10))
    run.submit(Request("huge", 0, distinct(1, 50), 5))
    run.submit(Request("small", 1, distinct(2, 8), 5), 1)
    run.run()
    assert run.ends["huge"].reason is EndReason.FAILED
    assert run.ends["small"].reason is EndReason.LENGTH


@EACH_POLICY
def test_request_that_fills_the_pool_exactly_runs(policy):
    """No block is set aside: capacity is what is advertised."""
    run = ReplicaRun(limits_of(policy, blocks=10))
    run.submit(Request("exact", 0, distinct(1, 39), 1))
    run.submit(Request("next", 1, distinct(2, 30), 10), 1)
    run.run()
    assert run.ends["exact"].usage.completion_tokens == 1
    assert run.ends["next"].usage.completion_tokens == 10


@EACH_POLICY
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_two_residents_that_both_need_the_last_block_finish(policy, prefix_cache):
    limits = limits_of(policy, blocks=9, prefix_cache=prefix_cache)
    run = short_sighted(ReplicaRun(limits))
    for number in range(2):
        run.submit(Request(f"r{number}", number, distinct(number, 12), 20), number)
    run.run()
    for number in range(2):
        assert run.ends[f"r{number}"].usage.completion_tokens == 20


@EACH_POLICY
def test_preempted_requests_do_not_push_each_other_out_for_ever(policy):
    """Over-admission under pressure: each is preempted at most twice, then has all it needs."""
    run = short_sighted(ReplicaRun(limits_of(policy, blocks=24, sequences_max=8)))
    for number in range(12):
        run.submit(Request(f"r{number}", number, distinct(number, 8), 60), number)
    run.run()
    for end in run.ends.values():
        assert (end.reason, end.usage.completion_tokens) == (EndReason.LENGTH, 60)
        assert end.preemptions <= PREEMPTIONS_MAX
    if policy is not BatchingPolicy.STATIC:
        assert sum(end.preemptions for end in run.ends.values()) > 0
        assert any(end.phases.preempted_ns for end in run.ends.values())


@EACH_POLICY
def test_output_after_preemption_equals_the_undisturbed_output(policy):
    alone = ReplicaRun(limits_of(policy, blocks=100))
    alone.submit(Request("r3", 0, distinct(3, 8), 60))
    alone.run()
    run = short_sighted(ReplicaRun(limits_of(policy, blocks=24, sequences_max=8)))
    for number in range(8):
        run.submit(Request(f"r{number}", number, distinct(number, 8), 60), number)
    run.run()
    assert run.tokens[SequenceId("r3", 0)] == alone.tokens[SequenceId("r3", 0)]


@EACH_POLICY
def test_long_prompts_are_admitted_whole_or_not_at_all(policy):
    """Four prompts of a quarter of the pool each, and a fifth that does not fit beside them."""
    limits = limits_of(policy, blocks=100, chunk_tokens_max=32)
    run = ReplicaRun(limits)
    for number in range(5):
        run.submit(Request(f"r{number}", number, distinct(number, 90), 8), number)
    run.run()
    assert sum(end.preemptions for end in run.ends.values()) == 0
    assert run.computed_tokens("r4") == 90 + 7


@EACH_POLICY
def test_waiting_choices_hold_no_place(policy):
    """Choices that wait for their first one take neither blocks nor a place among the residents."""
    run = ReplicaRun(limits_of(policy, blocks=30, sequences_max=4))
    run.submit(Request("many", 0, distinct(1, 40), 4, choices=4))
    for number in range(5):
        run.submit(Request(f"r{number}", 1, distinct(2 + number, 8), 4), 1)
    run.run()
    assert len(run.sequence_ends) == 9


def test_full_pool_with_a_prefill_in_it_still_preempts():
    """A resident whose prompt is half computed holds blocks that decodes need."""
    limits = limits_of(BatchingPolicy.FCFS, blocks=26, chunk_tokens_max=5)
    run = ReplicaRun(limits)
    for number in range(3):
        run.submit(Request(f"r{number}", number, distinct(number, 6), 60), number)
    run.submit(Request("prompt", 55 * MS, distinct(7, 50), 3), 55 * MS)
    run.run()
    assert all(end.reason is EndReason.LENGTH for end in run.ends.values())


def test_small_requests_pass_a_large_one_only_without_delaying_it():
    limits = limits_of(BatchingPolicy.SLO, blocks=20, sequences_max=8)

    def large_start_ns(smalls):
        run = ReplicaRun(limits)
        run.submit(Request("first", 0, distinct(1, 40), 21))
        run.submit(Request("large", MS, distinct(2, 60), 10), MS)
        for number in range(smalls):
            at_ns = 2 * MS + number
            run.submit(Request(f"s{number}", at_ns, distinct(10 + number, 4), 4, tier=2), at_ns)
        run.run()
        first = {name: run.token_ns[SequenceId(name, 0)][0] for name in run.ends}
        return first["large"], sum(first[f"s{n}"] < first["large"] for n in range(smalls))

    undisturbed_ns, _ = large_start_ns(0)
    start_ns, passed = large_start_ns(12)
    assert start_ns <= undisturbed_ns + 10 * MS
    assert passed > 0


def test_request_preempted_as_often_as_allowed_is_no_victim_again():
    run = ReplicaRun(limits_of(BatchingPolicy.FCFS, blocks=9))
    for number in range(2):
        run.submit(Request(f"r{number}", number, distinct(number, 12), 20), number)
    run.run(until_ns=30 * MS)
    last = run.replica.roster.residents[1]  # the one that this policy would take
    last.preemptions = PREEMPTIONS_MAX
    run.run()
    assert run.ends[last.id.request_id].preemptions == PREEMPTIONS_MAX
    assert run.ends["r0"].preemptions == 1


def test_small_request_that_would_outlast_the_wait_of_a_large_one_stays_behind():
    limits = limits_of(BatchingPolicy.SLO, blocks=24, sequences_max=8)
    run = ReplicaRun(limits)
    run.submit(Request("first", 0, distinct(1, 40), 21))
    run.submit(Request("large", MS, distinct(2, 80), 10), MS)
    run.submit(Request("lasting", 2 * MS, distinct(3, 4), 40, tier=2), 2 * MS)
    run.submit(Request("brief", 3 * MS, distinct(4, 4), 4, tier=2), 3 * MS)
    run.run()
    assert run.steps_first_ns("large") == run.end_ns["first"]
    assert run.steps_first_ns("brief") < run.end_ns["first"] <= run.steps_first_ns("lasting")


@pytest.mark.parametrize("preemptions", [0, PREEMPTIONS_MAX])
def test_request_preempted_as_often_as_allowed_needs_room_for_all_it_can_become(preemptions):
    run = short_sighted(ReplicaRun(limits_of(BatchingPolicy.SLO, blocks=24)))
    run.submit(Request("first", 0, distinct(1, 8), 50))
    run.submit(Request("second", 5 * MS, distinct(2, 8), 50), 5 * MS)
    run.run(until_ns=6 * MS)
    for sequence in (*run.replica.roster.waiting, *run.replica.roster.residents):
        sequence.preemptions = preemptions
    run.run()
    at_once = run.steps_first_ns("second") == 10 * MS
    assert at_once == (preemptions == 0)


def test_prompt_of_many_chunks_is_not_promised_the_blocks_of_those_who_decode_meanwhile():
    """The second one's six chunks take longer than the first one's answer, which grows on."""
    limits = limits_of(BatchingPolicy.SLO, blocks=9, chunk_tokens_max=3, prefix_cache=False)
    run = ReplicaRun(limits)
    run.submit(Request("first", 0, distinct(1, 5), 13))
    run.submit(Request("second", 95 * MS, distinct(2, 18), 1), 95 * MS)
    run.run()
    assert run.replica.roster.preemptions == 0
    assert run.steps_first_ns("second") == run.end_ns["first"]


def test_preempted_sequence_does_not_come_back_in_the_same_step():
    """What was freed for 16 steps of the others would be taken again at once."""
    run = ReplicaRun(limits_of(BatchingPolicy.FCFS, blocks=13, prefix_cache=False))
    for number in range(3):
        run.submit(Request(f"r{number}", number, distinct(number, 12), 30), number)
    run.run()
    effects = next(
        effects
        for _, _, effects in run.events
        if any(isinstance(effect, Report) and effect.preemptions for effect in effects)
    )
    report = next(effect for effect in effects if isinstance(effect, Report))
    plan = next(effect.plan for effect in effects if isinstance(effect, RunStep))
    assert len(plan.rows) == 3 - report.preemptions
    assert all(len(row.tokens) == 1 for row in plan.rows)


@pytest.mark.parametrize(("blocks", "beside"), [(20, False), (21, True)])
def test_shared_blocks_count_once_in_looking_ahead(blocks, beside):
    """Two requests share 9 blocks; when the first ends they have 4 and 3 more, a third one 5."""
    run = ReplicaRun(limits_of(BatchingPolicy.SLO, blocks=blocks))
    run.submit(Request("a", 0, (*distinct(1, 39), 7), 10))
    run.submit(Request("b", 15 * MS, (*distinct(1, 39), 8), 10), 15 * MS)
    run.submit(Request("c", 25 * MS, distinct(2, 12), 9), 25 * MS)
    run.run()
    assert (run.steps_first_ns("c") == 30 * MS) == beside
    assert run.replica.roster.preemptions == 0


@EACH_POLICY
def test_blocks_of_one_that_left_during_a_step_go_to_the_waiting_right_after_it(policy):
    """The blocks come free only when the step is over, after the waiting were looked at."""
    run = ReplicaRun(limits_of(policy, blocks=12, static_sequences=1))
    run.submit(Request("first", 0, distinct(1, 30), 18))
    run.submit(Request("next", MS, distinct(2, 40), 5), MS)
    run.cancel("first", at_ns=45 * MS)
    run.run()
    assert run.steps_first_ns("next") == run.end_ns["first"] == 50 * MS


def test_preemption_upon_preemption_does_not_keep_new_requests_out():
    """Admitting nobody in a step that preempts must not mean nobody ever."""
    run = ReplicaRun(limits_of(BatchingPolicy.FCFS, blocks=24, sequences_max=8))
    for number in range(30):
        at_ns = number * 30 * MS
        run.submit(Request(f"r{number}", at_ns, distinct(number, 8), 60), at_ns)
    run.run()
    assert run.replica.roster.preemptions > 5
    waited_ns = [run.ends[f"r{number}"].phases.queue_ns for number in range(30)]
    assert all(end.reason is EndReason.LENGTH for end in run.ends.values())
    assert max(waited_ns) < 30 * 60 * 10 * MS  # what one at a time would take
    first_ns = [run.token_ns[SequenceId(f"r{number}", 0)][0] for number in range(30)]
    assert first_ns == sorted(first_ns)
