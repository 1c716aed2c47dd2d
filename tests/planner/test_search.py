"""The search by simulation: monotone shares give the rate at which they cross the target."""

from dataclasses import replace

import pytest

from sluice.planner.estimate import Load, Targets
from sluice.planner.outcome import BATCHES, Outcome
from sluice.planner.plan import plan
from sluice.planner.question import Question
from sluice.planner.replicas import simulated_replica
from sluice.planner.search import RUNS_MAX, search, simulated
from sluice.planner.simulation import Span, one_model_fleet, simulate
from sluice.planner.steady import Lengths
from sluice.planner.tables import own_tables
from sluice.workload.lengths import Fixed, Separate
from sluice.workload.synthetic import Synthetic


def outcome(share, requests=1000, spread=0.0):
    """A run in which ``share`` of the requests met their targets, batches apart by ``spread``."""
    each = requests // BATCHES
    batches = [
        (each, round(each * share + (spread * each if number % 2 else -spread * each)))
        for number in range(BATCHES)
    ]
    found = Outcome(batches=batches)
    found.whole.requests = each * BATCHES
    found.whole.met = sum(met for _, met in batches)
    return found


def cliff(at, asked):
    def played(rate):
        asked.append(rate)
        return outcome(min(1.0, max(0.0, 0.95 + 0.5 * (at - rate) / at)))

    return played


@pytest.mark.parametrize("start", [1.0, 4.0, 9.0])
def test_the_search_finds_where_the_share_is_crossed_from_either_side(start):
    asked: list[float] = []
    found = search(cliff(4.0, asked), start, 0.95)
    assert found.slo_rps.estimate == pytest.approx(4.0, rel=0.15)
    assert found.slo_rps.low <= found.slo_rps.estimate <= found.slo_rps.high
    assert len(asked) == len(set(asked)) == RUNS_MAX
    assert [rate for rate, _, _ in found.runs] == sorted(asked)


def test_a_rate_that_is_never_reached_is_zero():
    assert search(lambda _rate: outcome(0.0), 4.0, 0.95).slo_rps.estimate == 0.0


def test_shares_that_scatter_make_the_interval_wide():
    def played(rate):
        return outcome(0.95 + 0.1 * (4.0 - rate) / 4.0, spread=0.03)

    wide = search(played, 4.0, 0.95).slo_rps
    assert wide.low < wide.estimate < wide.high


def test_a_simulated_plan_says_its_runs_and_keeps_the_band_of_the_closed_form():
    tables = own_tables()
    question = Question(
        shape=tables.model("llama-3.1-8b"),
        accelerator=tables.accelerator("h100"),
        rate_rps=100.0,
        load=Load(Lengths(200, 16)),
        targets=Targets(1.0, 0.05),
        tensor=1,
    )
    closed = plan(question)
    found = simulated(closed, 60, seed=3)
    assert found == simulated(closed, 60, seed=3)
    rate = found.replica.slo_rps
    assert rate.high / rate.low >= closed.replica.slo_rps.high / closed.replica.slo_rps.low * 0.99
    assert "60 requests a run" in found.notes[-1]
    assert "20,480 requests" in found.notes[-1]
    assert found.replicas * rate.estimate * 0.75 >= 130.0


def test_a_replica_more_never_lowers_the_share_of_good_requests():
    tables = own_tables()
    load, targets = Load(Lengths(400, 16)), Targets(0.2, 0.02)
    question = Question(
        shape=tables.model("llama-3.1-8b"),
        accelerator=tables.accelerator("h100"),
        rate_rps=100.0,
        load=load,
        targets=targets,
        tensor=1,
    )
    replica = simulated_replica(plan(question).model, load)
    workload = Synthetic(220.0, Separate(Fixed(400), Fixed(16)))
    shares = [
        simulate(workload, one_model_fleet(replica, count, targets), seed=5, span=Span(200))
        for count in (1, 2, 3)
    ]
    assert [each.attainment for each in shares] == sorted(each.attainment for each in shares)
    assert shares[0].attainment < shares[-1].attainment


def test_a_replica_that_holds_fewer_requests_never_has_a_higher_simulated_rate():
    tables = own_tables()
    question = Question(
        shape=tables.model("llama-3.1-8b"),
        accelerator=tables.accelerator("h100"),
        rate_rps=100.0,
        load=Load(Lengths(400, 16), batch_max=4),
        targets=Targets(0.5, 0.02),
        tensor=1,
    )
    rates = []
    for batch in (4, 16):
        found = plan(replace(question, load=replace(question.load, batch_max=batch)))
        rates.append(simulated(found, 60).replica.slo_rps.estimate)
    assert rates[0] <= rates[1]
