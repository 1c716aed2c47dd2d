"""The virtual backend plays plans as the live client does, and figures mean what they say."""

import pytest

from benchmarks.load.facts import UNCALIBRATED
from benchmarks.load.measures import goodput, jain, retries, token_rate
from benchmarks.load.outcomes import Outcome, Run, Targets
from benchmarks.load.plans import Ask, Span, poisson
from benchmarks.load.virtual import World

TARGETS = Targets()


def play(rate: float, *, seed: int = 1, policy: str = "slo", retry: bool = False) -> Run:
    span = Span(8.0, warm_s=2.0, tail_s=2.0)
    world = World(policy, UNCALIBRATED, TARGETS, seed=seed)
    return world.play(span.plan(poisson(rate, span, seed)), retry=retry)


def outcome(at_s: float, id_: str = "x", **fields: object) -> Outcome:
    known: dict[str, object] = {
        "slo": "chat", "tenant": "", "status": 200, "whole": True, "prompt_tokens": 80,
    }  # fmt: skip
    return Outcome(id=id_, at_s=at_s, **{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["slo", "fcfs", "static"])
def test_every_request_of_a_plan_has_one_outcome_with_all_its_tokens(policy):
    run = play(2.0, policy=policy)
    assert len({one.id for one in run.outcomes}) == len(run.outcomes)
    assert len(run.outcomes) == len(poisson(2.0, Span(8.0, 2.0, 2.0), 1))
    for one in run.outcomes:
        assert one.whole
        assert one.tokens == len(one.text_s) == 64
        assert one.text_s[0] > one.at_s


def test_the_same_seed_gives_the_same_run():
    assert play(8.0) == play(8.0)


def test_a_closed_loop_keeps_its_requests_under_way():
    world = World("fcfs", UNCALIBRATED, TARGETS)
    asks = (Ask(f"c{number}", 0.0, slo="") for number in range(1000))
    run = world.saturate(asks, 8, (2.0, 10.0))
    running = sum(not one.whole for one in run.outcomes)
    assert running == 8
    assert token_rate(run) > 50


def test_clients_that_retry_come_back_when_they_were_told_to():
    run = play(20.0, retry=True)
    told = {one.id: one for one in run.outcomes}
    second = next(one for one in run.outcomes if one.id.endswith("~1"))
    first = told[second.id.partition("~")[0]]
    assert first.status == 429
    assert first.retry_after_s is not None
    assert second.at_s >= first.at_s + first.retry_after_s - 1e-6


def test_refused_late_slow_and_unfinished_requests_are_not_good():
    late = outcome(0.0, text_s=(2.5, 2.6), tokens=2)
    slow = outcome(0.0, text_s=(0.5, 1.5), tokens=2)
    cut = outcome(0.0, text_s=(0.5, 0.6), tokens=2, whole=False)
    refused = outcome(0.0, status=429, refused_s=0.001)
    fine = outcome(0.0, text_s=(0.5, 0.6), tokens=2)
    figures = goodput(Run((late, slow, cut, refused, fine), 0.0, 2.0, 9.0), TARGETS)
    assert (figures.offered, figures.good) == (2.5, 0.5)
    assert (figures.met, figures.refused) == pytest.approx((0.25, 0.2))


def test_requests_before_and_after_the_counted_part_do_not_count():
    outcomes = tuple(outcome(at_s, text_s=(at_s + 1,), tokens=1) for at_s in (0.5, 1.5, 2.5))
    run = Run(outcomes, 1.0, 2.0, 9.0)
    assert goodput(run, TARGETS).good == 1.0


def test_a_request_that_was_never_answered_counts_with_what_it_waited():
    answered = outcome(0.0, text_s=(0.5, 0.6), tokens=2)
    figures = goodput(Run((answered, outcome(1.0, status=0, whole=False)), 0.0, 2.0, 9.0), TARGETS)
    assert figures.ttft_s_p99 == 8.0


def test_first_retries_are_what_the_share_is_made_of():
    refused = {"status": 429, "retry_after_s": 1.0}
    run = Run(
        (
            outcome(0.0, "a", **refused), outcome(1.0, "a~1"),
            outcome(0.0, "b", **refused), outcome(2.0, "b~1", **refused), outcome(3.0, "b~2"),
        ),
        0.0, 4.0, 9.0,
    )  # fmt: skip
    figures = retries(run)
    assert (figures.refused, figures.told, figures.first) == (2, 2, 0.5)
    assert figures.per_second == (1, 1, 1)


def test_jain_is_one_for_equal_shares_and_the_inverse_of_the_number_for_one_owner():
    assert jain([3, 3]) == 1.0
    assert jain([5, 0]) == 0.5
