"""Searches against engines whose truth is known, in no time."""

import errno
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.truth.core import CoreEngine, CoreRunner, CoreStimulus
from benchmarks.truth.queue import QueueEngine, QueueRunner, QueueStimulus
from sluice.cli.bench_progress import BenchProgress
from sluice.cli.bench_search import SearchWanted, client_known
from sluice.cli.bench_search_report import interval_words, search_rows
from sluice.loadtest.client_limit import ClientLimit, client_limit, client_machine
from sluice.loadtest.run_search import player, run_search
from sluice.loadtest.sample import Count, Sample
from sluice.loadtest.search import Question, Search, Stage
from sluice.loadtest.search_document import search_document
from sluice.loadtest.search_record import SearchRecord
from sluice.loadtest.series import Slope
from sluice.loadtest.trial import (
    CannotMeasure,
    ClosedLoop,
    Ending,
    Metric,
    Objective,
    OpenLoop,
    Span,
    TrialOutcome,
    Void,
    VoidCause,
)

ENGINE = QueueEngine("many short prompts", prefill_s=0.02, twice_at=150.0)
TTFT = Objective(Metric.TTFT, 0.3)
# By runs of a million requests.
SLO_RPS, CAPACITY_RPS = 39.7, 50.0


def question(**changes):
    return replace(Question({"ttft": TTFT}), **changes)


def searched(asked, runner=None, **of):
    search = Search(asked)
    run_search(search, player(runner or QueueRunner(ENGINE)), QueueStimulus(), **of)
    return search


class Voided:
    """Plays, but calls trials void that ``void`` says so of."""

    def __init__(self, void):
        self.void, self.runner, self.plans = void, QueueRunner(ENGINE), []

    def run(self, plan, watch=None):
        self.plans.append(plan)
        void = self.void(plan)
        if void is None:
            return self.runner.run(plan, watch)
        return TrialOutcome(plan, [], 1.0, void=void)


def test_estimates_are_near_the_truth_and_intervals_hold_it():
    found = [searched(question(seed=seed)).found().slo for seed in (1, 2, 3)]
    assert all(one is not None and one.binding == "ttft" for one in found)
    near = [abs(one.estimate_rps / SLO_RPS - 1) <= 0.05 for one in found]
    assert sum(near) >= 2
    assert sum(one.low_rps <= SLO_RPS <= one.high_rps for one in found) >= 2
    assert all((one.certified_rps or 0) <= 1.02 * SLO_RPS for one in found)


@pytest.mark.parametrize("budget_s", [60.0, 300.0])
def test_a_search_keeps_to_its_budget(budget_s):
    search = searched(question(budget_s=budget_s, seed=3))
    assert search.spent_s <= 1.05 * budget_s


def test_the_same_seed_gives_the_same_search():
    asked = question(budget_s=300.0)
    first, second = (json.dumps(search_document(searched(asked))) for _ in range(2))
    assert first == second


def test_what_is_known_is_valid_at_any_moment():
    search = Search(question(budget_s=300.0))
    known = []

    def told(*_):
        known.append(search_document(search))

    run_search(search, player(QueueRunner(ENGINE)), QueueStimulus(), told)
    assert known[-1]["complete"]
    assert not known[0]["complete"]
    assert [one["slo_rps"] is None for one in known] == sorted(
        (one["slo_rps"] is None for one in known), reverse=True
    )
    json.dumps(known, allow_nan=False)


def test_without_targets_only_capacity_is_looked_for():
    search = searched(question(objectives={}, budget_s=600.0))
    found = search.found()
    assert found.slo is None
    assert set(search.stages) <= {Stage.LADDER, Stage.CAPACITY, Stage.REVISIT, Stage.OVERLOAD}
    assert found.throughput.estimate_rps == pytest.approx(CAPACITY_RPS, rel=0.12)
    assert found.capacity.high_rps is not None
    assert found.capacity.high_rps > CAPACITY_RPS


def test_capacity_has_an_upper_end_and_short_trials_do_not_put_it_below_the_truth():
    found = [searched(question(budget_s=300.0, seed=seed)).found().capacity for seed in range(8)]
    ends = [one.high_rps for one in found if one.high_rps is not None]
    assert len(ends) >= 2
    assert min(ends) > CAPACITY_RPS
    assert all(one.low_rps is None or one.low_rps < 1.02 * CAPACITY_RPS for one in found)


def test_d27_a_search_at_half_a_request_per_second_never_uses_a_rate_of_0():
    slow = QueueEngine("very slow", prefill_s=1.9, prefill_cv=0.2, output_tokens=10.0)
    runner = Voided(lambda plan: None)
    runner.runner = QueueRunner(slow)
    searched(question(objectives={"ttft": Objective(Metric.TTFT, 5.0)}), runner)
    rates = [plan.load.rate_rps for plan in runner.plans if isinstance(plan.load, OpenLoop)]
    assert len(rates) > 3
    assert all(0.05 < rate < 1.2 for rate in rates)


def test_a_search_goes_on_from_recorded_trials(tmp_path):
    path, trials = tmp_path / "trials.jsonl", []
    whole = searched(question(budget_s=400.0), told=lambda *trial: trials.append(trial))
    record = SearchRecord(path, {"ttft": "300ms"})
    for wish, sample, _ in trials[:6]:
        record.add(wish, sample, {})
    with path.open("a") as file:
        file.write('{"torn')
    again = SearchRecord(path, {"ttft": "300ms"})
    runner = Voided(lambda plan: None)
    recorded = [(wish, sample) for wish, sample, _ in again.trials]
    resumed = searched(question(budget_s=400.0), runner, recorded=recorded)
    assert len(runner.plans) == len(trials) - 6
    assert resumed.found().slo == whole.found().slo
    with pytest.raises(CannotMeasure, match=r"another search \(ttft differ\)"):
        SearchRecord(path, {"ttft": "1s"})


def test_what_the_client_can_send_is_kept_with_the_trials(tmp_path):
    path, asked = tmp_path / "trials.jsonl", {"ttft": "300ms"}
    here, elsewhere = client_machine(1), {**client_machine(1), "host": "another"}
    progress, measured = BenchProgress(), []

    def known(processes=1, rps=512.0):
        def measure():
            measured.append(rps)
            return rps

        wanted = SearchWanted(question(), SearchRecord(path, asked))
        return client_known(wanted, processes, measure, progress).question.client_rps

    assert (known(), measured) == (512.0, [512.0])
    assert (known(rps=256.0), measured) == (512.0, [512.0])
    assert known(processes=2, rps=900.0) == 900.0
    assert SearchRecord(path, asked).client == ClientLimit(900.0, client_machine(2))
    assert here != elsewhere
    SearchRecord(path, asked).add_client(ClientLimit(64.0, elsewhere))
    assert known(rps=128.0) == 128.0
    assert known(rps=None) == 128.0


def test_a_disk_that_is_full_tears_no_line_of_the_trials(tmp_path, monkeypatch):
    path, asked = tmp_path / "trials.jsonl", {"ttft": "300ms"}
    record, limit = SearchRecord(path, asked), ClientLimit(64.0, client_machine(1))

    class Full(io.FileIO):
        def write(self, data):
            if self.tell() > size:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(bytes(data)[:20])

    size = path.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda self, *_, **__: Full(self, "ab"))
        with pytest.raises(OSError, match="No space"):
            record.add_client(limit)
    assert path.stat().st_size == size
    record.add_client(limit)
    assert SearchRecord(path, asked).client == limit


def test_rates_that_the_client_cannot_send_are_not_tried():
    runner = Voided(lambda plan: None)
    search = searched(question(client_rps=30.0, budget_s=600.0), runner)
    rates = [plan.load.rate_rps for plan in runner.plans if isinstance(plan.load, OpenLoop)]
    assert max(rates) <= 0.7 * 30.0
    assert any("the client keeps its schedule to 21" in note for note in search.found().notes)


def test_a_client_that_cannot_keep_its_schedule_bounds_the_search():
    def late(plan):
        fast = isinstance(plan.load, OpenLoop) and plan.load.rate_rps > 25.0
        return Void(VoidCause.CLIENT_LIMITED, "late") if fast else None

    found = searched(question(budget_s=600.0), Voided(late)).found()
    assert found.slo is None or found.slo.high_rps is None
    assert found.notes


def test_an_endpoint_that_answers_nothing_ends_the_search_in_words():
    down = Void(VoidCause.NOTHING_ANSWERED, "connection refused")
    search = searched(question(), Voided(lambda plan: down))
    document = search_document(search)
    assert not document["valid"]
    assert document["search_notes"] == ["nothing_answered: connection refused"]


@pytest.mark.parametrize("cause", [VoidCause.INTERRUPTED, VoidCause.NOTHING_ANSWERED])
def test_a_search_that_is_broken_off_or_whose_server_dies_keeps_what_it_knows(cause):
    count = 0

    def broken_off(_):
        nonlocal count
        count += 1
        return Void(cause, "after 3 s") if count >= 12 else None

    document = search_document(searched(question(), Voided(broken_off)))
    assert document["valid"]
    assert not document["complete"]
    assert document["slo_rps"]["low"] is not None
    assert document["search_notes"][0] == f"{cause}: after 3 s"
    assert count == 12


def test_a_target_that_no_rate_keeps_gives_no_estimate_and_names_it():
    hopeless = Objective(Metric.TPOT, 0.001)
    search = searched(question(objectives={"ttft": TTFT, "tpot": hopeless}, budget_s=900.0))
    slo = search.found().slo
    assert slo.estimate_rps is None
    assert slo.certified_rps is None
    assert slo.binding == "tpot"


def test_a_server_that_fails_is_bound_by_failures():
    class Failing(Voided):
        def run(self, plan, watch=None):
            outcome = self.runner.run(plan, watch)
            if not isinstance(plan.load, OpenLoop) or plan.load.rate_rps < 20.0:
                return outcome
            ending = type(outcome.requests[0].ending).REFUSED
            requests = [
                replace(one, ending=ending) if one.number % 5 == 0 else one
                for one in outcome.requests
            ]
            return replace(outcome, requests=requests)

    slo = searched(question(budget_s=600.0), Failing(None)).found().slo
    assert slo.binding == "failures"


def test_a_closed_loop_too_large_does_not_say_how_long_answers_take():
    """Of servers that do less the more they are asked."""

    class Retrograde(Voided):
        def run(self, plan, watch=None):
            outcome = self.runner.run(plan, watch)
            if not isinstance(plan.load, ClosedLoop) or plan.load.concurrency < 256:
                return outcome
            requests = [
                replace(one, at_s=one.at_s - 40.0)
                if one.number % 5 == 0
                else replace(one, ending=Ending.REFUSED)
                for one in outcome.requests
            ]
            return replace(outcome, requests=requests)

    search = searched(question(budget_s=300.0), Retrograde(None))
    assert max(sample.concurrency or 0 for sample in search.samples) >= 256
    took_s = [
        sample.took_s
        for stage, sample in zip(search.stages, search.samples, strict=True)
        if stage is Stage.BRACKET
    ]
    assert max(took_s) < 40.0


def trial(rate_rps, missed=0, trend="stable", clients=None):
    """A trial of ten seconds, as it is kept."""
    drift = {"stable": Slope(0.0, 0.001), "unstable": Slope(0.5, 0.01)}[trend]
    requests = round(10 * rate_rps)
    batches = tuple(Count(requests // 10, missed // 10) for _ in range(10))
    return Sample(
        0.0 if clients else rate_rps, clients, 10.0, 14.0, None, False, requests, 0,
        rate_rps, 1.0, 0.1, 10.0, 0.1, {"ttft": batches}, drift,
    )  # fmt: skip


def known_of(*open_loop):
    search = Search(question())
    search.samples = [trial(100.0, clients=16), *open_loop]
    search.stages = [Stage.LADDER] + [Stage.FIT] * len(open_loop)
    return search_document(search)


MET = (trial(60.0), trial(100.0), trial(120.0, trend="unstable"), trial(145.0))


@pytest.mark.parametrize("beyond", [(), (trial(170.0, trend="unstable"),)], ids=["calm", "grows"])
def test_where_no_trial_missed_a_target_the_slo_rate_is_a_lower_bound(beyond):
    document = known_of(*MET, *beyond)
    slo = document["slo_rps"]
    assert (slo["estimate"], slo["high"], slo["resolved"]) == (None, None, False)
    assert slo["low"] <= 145.0
    assert slo["low"] > (140.0 if not beyond else 60.0)
    assert document["binding"] == ("capacity" if beyond else None)
    words = f"at least {slo['low']:.3g}/s"
    assert f"SLO rate {words}" in interval_words(document)
    # The rows of the terminal, of Markdown and of the page.
    assert ("SLO rate", words) in search_rows({**document, "trials": []})


def test_one_trial_that_missed_makes_it_an_estimate():
    slo = known_of(*MET, trial(170.0, missed=800))["slo_rps"]
    assert slo["low"] < slo["estimate"] < slo["high"]
    assert 140.0 < slo["estimate"] < 170.0


def test_a_step_of_the_ladder_in_which_nothing_was_answered_is_tried_once_more_and_longer():
    def silent(plan):
        return isinstance(plan.load, ClosedLoop) and plan.load.concurrency >= 64

    class Silent(Voided):
        def run(self, plan, watch=None):
            outcome = super().run(plan, watch)
            return replace(outcome, requests=[]) if silent(plan) else outcome

    runner = Silent(lambda _: None)
    assert searched(question(budget_s=300.0), runner).found().throughput is not None
    first, second = [plan.span for plan in runner.plans if silent(plan)]
    assert second.counted_s > first.counted_s


def test_the_client_is_measured_until_it_is_late():
    def late(plan):
        return Void(VoidCause.CLIENT_LIMITED, "late") if plan.load.rate_rps > 300.0 else None

    assert client_limit(Voided(late), QueueStimulus(), seed=1) == 256.0


def test_the_core_in_virtual_time_keeps_a_closed_loop_busy_and_an_open_one_on_time():
    engine = CoreEngine()
    runner, stimulus = CoreRunner(engine), CoreStimulus(engine.lengths)
    closed = runner.run(stimulus.closed_loop(8, Span(10.0, 2.0), seed=1), lambda at: at.at_s >= 12)
    assert closed.stopped_s == 12.0
    assert sum(one.done for one in closed.counted) > 30
    plan = stimulus.open_loop(5.0, Span(20.0, 2.0, 5.0), seed=1)
    outcome = runner.run(plan)
    due = [ask.at_ns / 1e9 for ask in plan.asks[: len(outcome.requests)]]
    assert [one.at_s for one in outcome.requests] == due
    assert due[-1] >= plan.span.to_s - 1.0
    assert all(one.done and (one.ttft_s or 0.0) > 0.0 for one in outcome.counted)
