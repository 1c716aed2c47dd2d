"""A user's own measurement moves the plan, and what is no measurement is refused."""

import json

import pytest

from sluice.planner.estimate import Load, moment
from sluice.planner.formats import precision_named
from sluice.planner.names import CannotPlan
from sluice.planner.points import calibrated, points_of, surprises
from sluice.planner.predict import Point, StepModel, own_fit
from sluice.planner.steady import Lengths
from sluice.planner.tables import own_tables
from sluice.planner.work import Deployment, Layout
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter
from sluice.telemetry.records import RequestEnded, Step

LENGTHS = Lengths(1000, 300)


def model():
    tables = own_tables()
    deployment = Deployment(
        tables.model("llama-3.1-70b"),
        tables.accelerator("h100"),
        precision_named("fp8"),
        Layout(4),
    )
    return StepModel(deployment, "vllm", "fp8", own_fit("closed_loop"))


def test_a_rate_becomes_requests_in_a_replica_by_littles_law():
    (point,) = points_of("rate=2,tpot=30ms", LENGTHS)
    assert point.concurrency == pytest.approx(2 * 300 * 0.030)
    assert point.step_s == pytest.approx(0.030)
    assert point.ttft_s is None


def test_the_first_token_of_a_point_is_met_at_the_point():
    (point,) = points_of("concurrency=16,tpot=30ms,ttft=700ms", LENGTHS)
    load = Load(LENGTHS)
    found = calibrated(model(), load, [point])
    assert moment(found, load, 16.0, 0.5, 1.0).ttft_s == pytest.approx(0.7)
    assert found.step(LENGTHS, 16.0).estimate == pytest.approx(0.030)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate=2", "needs tpot and one of rate and concurrency"),
        ("rate=2,concurrency=3,tpot=30ms", "one of rate and concurrency"),
        ("rate=2,tpto=30ms", "did you mean tpot"),
        ("rate=2,tpot=30", "has no unit"),
        ("rate=-2,tpot=30ms", "rate .* must be above 0"),
        ("rate=nan,tpot=30ms", "rate .* must be above 0"),
        ("rate=2,rate=3,tpot=30ms", "has rate twice"),
        ("rate=2,tpot=0ms", "tpot .* must be above 0"),
        ("rate=many,tpot=30ms", "--calibrate rate"),
        ("nothing.json", "cannot read the calibration"),
    ],
)
def test_what_is_no_point_is_refused_with_the_form(text, words):
    with pytest.raises(CannotPlan, match=words):
        points_of(text, LENGTHS)


def test_more_requests_than_a_replica_holds_are_a_contradiction():
    with pytest.raises(CannotPlan, match="50,000 requests in a replica"):
        calibrated(model(), Load(LENGTHS), [Point(50000.0, 0.03)])


def test_a_point_far_from_what_was_expected_is_said():
    load = Load(LENGTHS)
    point = Point(16.0, 0.9, source="mine")
    found = calibrated(model(), load, [point])
    assert "mine: 900 ms per token" in surprises(found, load, [point], 3.0)[0]
    near = Point(16.0, model().step(LENGTHS, 16.0).estimate)
    assert surprises(found, load, [near], 3.0) == []


def test_results_of_a_load_test_give_a_point_each(tmp_path):
    def trial(rate, step_s):
        return {"completed_rps": rate, "tpot_s": {"p50": step_s}, "ttft_s": {"p50": 0.4}}

    file = tmp_path / "one.json"
    file.write_text(json.dumps(trial(2.0, 0.03)))
    (point,) = points_of(str(file), LENGTHS)
    assert (point.step_s, point.ttft_s) == (0.03, 0.4)
    file.write_text(json.dumps({"trials": [trial(1.0, 0.02), {}, trial(2.0, 0.03)]}))
    assert [each.step_s for each in points_of(str(file), LENGTHS)] == [0.02, 0.03]


@pytest.mark.parametrize("text", ["[]", "{}", '{"trials": []}', '{"completed_rps": 1}', "3", "{"])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    file = tmp_path / "one.json"
    file.write_text(text)
    with pytest.raises(CannotPlan, match=r"one\.json"):
        points_of(str(file), LENGTHS)


def journal(folder, records):
    clocks = Clocks(lambda: 1, lambda: 1)
    writer = JournalWriter(folder, "test", clocks, JournalLimits())
    for record in records:
        writer.append(record)
    writer.close()


def test_a_journal_gives_a_point_for_each_doubling_of_rows(tmp_path):
    steps = [
        Step(1, "r", number, 0, 20_000_000 * rows, tuple((str(row), 0) for row in range(rows)))
        for rows in (1, 4)
        for number in range(40)
    ]
    ended = RequestEnded(1, "a", "m", "stop", 0, prompt_tokens=400, completion_tokens=50)
    journal(tmp_path, [*steps, ended])
    one, four = points_of(str(tmp_path), LENGTHS)
    assert [one.concurrency, four.concurrency] == [1.0, 4.0]
    assert [one.step_s, four.step_s] == pytest.approx([0.020, 0.080])
    assert one.lengths == Lengths(400, 50)
    assert "80 steps" in one.source


def test_the_pause_between_steps_of_a_busy_replica_is_part_of_a_journals_step_time(tmp_path):
    steps = [
        Step(number * 25_000_000, "r", number, 0, 20_000_000, (("a", 0),))
        for number in range(1, 41)
    ]
    ended = RequestEnded(1, "a", "m", "stop", 0, prompt_tokens=400, completion_tokens=50)
    journal(tmp_path, [*steps, ended])
    (point,) = points_of(str(tmp_path), LENGTHS)
    assert point.step_s == pytest.approx(0.025)


def test_a_journal_with_few_steps_is_refused(tmp_path):
    with pytest.raises(CannotPlan, match="has no 30 steps"):
        points_of(str(tmp_path), LENGTHS)
