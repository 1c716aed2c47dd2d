"""The search by simulation: monotone shares give the rate at which they cross the target."""

from dataclasses import replace

import pytest

from sluice.planner.candidates import Candidates
from sluice.planner.estimate import Load, Targets
from sluice.planner.names import NoFleet
from sluice.planner.outcome import BATCHES, Outcome
from sluice.planner.plan import plan, with_slo_rate
from sluice.planner.predict import Band
from sluice.planner.question import Question
from sluice.planner.replicas import simulated_replica
from sluice.planner.search import RUNS_MAX, search, simulated, with_simulation
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


def test_a_rate_that_is_never_reached_is_zero_and_was_looked_for_down_to_lone_requests():
    found = search(lambda _rate: outcome(0.0), 4.0, 0.95)
    assert found.slo_rps.estimate == 0.0
    assert found.runs[0][0] < 4.0 / 10_000


def test_a_rate_far_below_the_start_is_found():
    found = search(cliff(0.05, []), 40.0, 0.95)
    assert found.slo_rps.estimate == pytest.approx(0.05, rel=0.15)


def test_no_rate_above_the_highest_one_is_tried():
    asked: list[float] = []
    found = search(cliff(40.0, asked), 4.0, 0.95, 6.0)
    assert found.slo_rps.estimate == max(asked) == 6.0


def test_a_rate_at_which_the_queue_grows_is_too_high():
    def played(rate):
        found = outcome(1.0)
        found.queued_at_half, found.queued_at_end = 100, 100 if rate < 3.0 else 300
        return found

    assert 1.5 < search(played, 4.0, 0.95).slo_rps.estimate < 3.0


def question_of(targets, **changes):
    tables = own_tables()
    question = Question(
        shape=tables.model("llama-3.1-8b"),
        accelerator=tables.accelerator("h100"),
        rate_rps=100.0,
        load=Load(Lengths(200, 16)),
        targets=targets,
        tensor=1,
    )
    return replace(question, **changes)


def test_the_simulated_replica_takes_the_chunks_that_were_asked_for(monkeypatch):
    chunks = set()

    def played(_workload, fleet, **_more):
        chunks.add(fleet.pools[0].batching.chunk_tokens_max)
        return outcome(1.0)

    monkeypatch.setattr("sluice.planner.search.simulate", played)
    for chunk in (512.0, 8192.0):
        simulated(plan(question_of(Targets(1.0, 0.05), chunk_tokens=chunk)), 500)
    assert chunks == {512, 8192}


def test_a_plan_that_simulation_refutes_is_refused_with_what_lone_requests_have(monkeypatch):
    closed = plan(question_of(Targets(1.0, 0.05)))
    misses = outcome(0.5)
    for _ in range(10):
        misses.whole.ttft_s.add(0.25)
        misses.whole.e2e_s.add(0.5)
    monkeypatch.setattr("sluice.planner.search.simulate", lambda *_args, **_more: misses)
    with pytest.raises(NoFleet, match=r"50\.0% meet them and it has TTFT 250 ms"):
        simulated(closed, 500)
    with pytest.raises(NoFleet, match="no rate meets the targets on 1 x h100"):
        with_simulation(Candidates(closed, (), ()), 500)


def test_a_simulated_rate_that_needs_too_many_replicas_is_no_plan():
    closed = plan(question_of(Targets(1.0, 0.05), rate_rps=1e7))
    with pytest.raises(NoFleet, match="more than 1,000,000 replicas"):
        with_slo_rate(closed, Band(1.0, 1.0, 1.0), "runs")


def test_shares_that_scatter_make_the_interval_wide():
    def played(rate):
        return outcome(0.95 + 0.1 * (4.0 - rate) / 4.0, spread=0.03)

    wide = search(played, 4.0, 0.95).slo_rps
    assert wide.low < wide.estimate < wide.high


def test_a_simulated_plan_says_its_runs_and_keeps_the_band_of_the_closed_form():
    closed = plan(question_of(Targets(1.0, 0.05)))
    found = simulated(closed, 60, seed=3)
    assert found == simulated(closed, 60, seed=3)
    rate = found.replica.slo_rps
    assert rate.high / rate.low >= closed.replica.slo_rps.high / closed.replica.slo_rps.low * 0.99
    assert "60 requests a run" in found.notes[-1]
    assert "20,480 requests" in found.notes[-1]
    assert found.replicas * rate.estimate * 0.75 >= 130.0


def test_a_replica_more_never_lowers_the_share_of_good_requests():
    load, targets = Load(Lengths(400, 16)), Targets(0.2, 0.02)
    question = question_of(targets, load=load)
    replica = simulated_replica(plan(question).model, load)
    workload = Synthetic(220.0, Separate(Fixed(400), Fixed(16)))
    shares = [
        simulate(workload, one_model_fleet(replica, count, targets), seed=5, span=Span(200))
        for count in (1, 2, 3)
    ]
    assert [each.attainment for each in shares] == sorted(each.attainment for each in shares)
    assert shares[0].attainment < shares[-1].attainment


def test_a_replica_that_holds_fewer_requests_never_has_a_higher_simulated_rate():
    question = question_of(Targets(0.5, 0.02), load=Load(Lengths(400, 16), batch_max=4))
    rates = []
    for batch in (4, 16):
        found = plan(replace(question, load=replace(question.load, batch_max=batch)))
        rates.append(simulated(found, 60).replica.slo_rps.estimate)
    assert rates[0] <= rates[1]
