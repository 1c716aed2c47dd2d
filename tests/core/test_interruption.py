"""When a running step is given up for a request that has just come, and what becomes of it."""

import pytest

from sluice.core.events import Interrupt, StepGivenUp
from sluice.core.interruption import LEFT_NS_MIN, LOST_NS_MAX, LOST_SHARE
from sluice.core.request import EndReason, Request, SequenceId
from sluice.core.roster import BatchingPolicy
from sluice.testing.replicas import REPLICA_ID
from tests.core.test_batching import GIVE_UP_NS, MS, S, distinct, limits_of, run_of

ROWS = 24
STEP_MS = 10 + 0.5 * ROWS + 1 * ROWS


def crowd(policy=BatchingPolicy.SLO, output=300, **fields):
    """A batch of tier 5 that decodes, in steps of about ``STEP_MS``."""
    run = run_of(limits_of(policy))
    for number in range(ROWS):
        run.submit(Request(f"d{number}", 0, distinct(number, 4), output, tier=5, **fields))
    return run


def begun_ns(run, at_ns):
    """When the step that runs at ``at_ns`` began."""
    return max(start_ns for start_ns, _ in run.steps if start_ns <= at_ns)


def mid_step_ns(part, **fields):
    """An instant at which so much of a step of the crowd is over."""
    probe = crowd(**fields)
    probe.run(until_ns=2 * S)
    return begun_ns(probe, S) + round(part * STEP_MS * MS)


def with_newcomer(at_ns, tier=1, **fields):
    run = crowd(**fields)
    run.submit(Request("new", at_ns, distinct(99, 40), 5, tier=tier), at_ns)
    return run.run()


def given_up(run):
    return [event for _, event, _ in run.events if isinstance(event, StepGivenUp)]


def test_a_stricter_prompt_starts_at_once_and_nobody_loses_a_token():
    at_ns = mid_step_ns(0.2)
    run = with_newcomer(at_ns)
    assert run.steps_first_ns("new") == at_ns + GIVE_UP_NS
    assert len(given_up(run)) == 1
    plain = crowd().run()
    for number in range(ROWS):
        sequence = SequenceId(f"d{number}", 0)
        assert run.tokens[sequence] == plain.tokens[sequence]
        assert run.ends[f"d{number}"].reason is EndReason.LENGTH


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        (0.2, {"tier": 5}),
        (0.2, {"tier": 6}),
        (0.6, {"tier": 1}),  # more was spent than is to come
        (0.2, {"tier": 1, "policy": BatchingPolicy.FCFS}),
    ],
    ids=["its own tier", "a lower tier", "nearly over", "fcfs"],
)
def test_a_step_runs_to_its_end(part, fields):
    at_ns = mid_step_ns(part, **{k: v for k, v in fields.items() if k == "policy"})
    run = with_newcomer(at_ns, **fields)
    assert not given_up(run)
    assert not any(isinstance(e, Interrupt) for _, _, effects in run.events for e in effects)


def test_a_step_with_a_prompt_of_the_same_tier_runs_to_its_end():
    at_ns = mid_step_ns(0.1)
    run = crowd()
    run.submit(Request("first", at_ns, distinct(98, 300), 5, tier=1), at_ns)
    second_ns = at_ns + GIVE_UP_NS + LEFT_NS_MIN // 4
    run.submit(Request("second", second_ns, distinct(99, 40), 5, tier=1), second_ns)
    run.run()
    assert len(given_up(run)) == 1


def test_where_steps_cannot_be_given_up_they_run_to_their_end():
    run = crowd()
    run.driver.remove(REPLICA_ID)
    run.executor.give_up_ns = None
    run.driver.add(REPLICA_ID, run.replica, run.executor)
    for number in range(ROWS):
        run.submit(Request(f"e{number}", 0, distinct(number, 4), 300, tier=5))
    at_ns = mid_step_ns(0.2)
    run.submit(Request("new", at_ns, distinct(99, 40), 5, tier=1), at_ns)
    run.driver.run()
    assert any(isinstance(e, Interrupt) for _, _, effects in run.events for e in effects)
    assert not given_up(run)


def test_no_more_than_a_share_of_the_time_is_lost_however_many_come():
    run = crowd(output=600)
    for number in range(400):
        at_ns = S + number * 37 * MS
        run.submit(Request(f"n{number}", at_ns, distinct(100 + number, 20), 1, tier=1), at_ns)
    run.run()
    lost_ns = sum(event.duration_ns for event in given_up(run))
    end_ns = max(run.end_ns.values())
    assert len(given_up(run)) > 20
    assert lost_ns <= LOST_SHARE * end_ns + LOST_NS_MAX + len(given_up(run)) * GIVE_UP_NS


def test_a_request_that_is_cancelled_in_a_step_that_is_given_up_ends_once():
    at_ns = mid_step_ns(0.2)
    run = crowd()
    run.cancel("d3", at_ns - MS)
    run.submit(Request("new", at_ns, distinct(99, 40), 5, tier=1), at_ns)
    run.run()
    assert len(given_up(run)) == 1
    assert run.ends["d3"].reason is EndReason.CANCELLED
    assert run.end_ns["d3"] == at_ns + GIVE_UP_NS


def test_a_prompt_goes_before_rows_of_a_tenant_that_is_ahead_of_its_share():
    def shared():
        run = crowd(tenant="greedy")
        early = Request("early", 100 * MS, distinct(97, 10), 400, tier=5, tenant="modest")
        run.submit(early, 100 * MS)
        return run

    probe = shared()
    probe.run(until_ns=2 * S)
    at_ns = begun_ns(probe, S) + 5 * MS
    for tenant, steps in (("modest", 1), ("greedy", 0)):
        run = shared()
        run.submit(Request("new", at_ns, distinct(99, 40), 5, tier=5, tenant=tenant), at_ns)
        run.run()
        assert len(given_up(run)) == steps
