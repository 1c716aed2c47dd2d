"""The commands of ``docs/measuring.md`` ask for what the page says."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.truth.queue import QueueEngine, QueueRunner, QueueStimulus
from sluice.cli import bench
from sluice.cli.bench_progress import BenchProgress
from sluice.cli.bench_report import markdown
from sluice.cli.bench_search import search_wanted, searched
from sluice.cli.bench_search_report import (
    interval_words,
    rate_words,
    search_plots,
    search_rows,
)
from sluice.cli.main import run
from sluice.loadtest.document import manifest, trial_document
from sluice.loadtest.run_search import player
from sluice.loadtest.trial import (
    CannotMeasure,
    Metric,
    Objective,
    TrialOutcome,
    Void,
    VoidCause,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "measuring.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
TTFT = Objective(Metric.TTFT, 0.3)
ASKED = {"budget": "400s", "quick": False, "seed": 1, "resume": None}


@pytest.mark.parametrize(
    ("command", "kind"), list(zip(COMMANDS, ["search", "search", "load"], strict=True))
)
def test_a_command_of_the_page_measures_what_it_says(command, kind, monkeypatch):
    asked: list[str] = []

    def measuring(name):
        def measured(session, options, outputs):
            asked.append(name)
            return {"valid": True, "slo_rps": None, "capacity_rps": {}}

        return measured

    monkeypatch.setattr(bench, "_session", lambda url, options: None)
    monkeypatch.setattr(bench, "_searched", measuring("search"))
    monkeypatch.setattr(bench, "_measured", measuring("load"))
    monkeypatch.setattr(bench, "print_result", lambda result: None)
    program, *words = shlex.split(command)
    assert program == "sluice"
    assert run(words) == 0
    assert asked == [kind]


def wanted_of(asked):
    wanted = search_wanted(asked, [TTFT])
    return replace(wanted, question=replace(wanted.question, client_rps=5000.0))


@pytest.fixture(scope="module")
def found():
    """A search on a queue, as the command has it."""
    engine = QueueEngine("many short prompts", prefill_s=0.02, twice_at=150.0)
    document = searched(
        wanted_of(ASKED),
        player(QueueRunner(engine)),
        QueueStimulus(),
        lambda outcome: trial_document(outcome, [TTFT], 0.01),
        BenchProgress(),
    )
    endpoint = {"address": "127.0.0.1:1", "model": "m"}
    return {**document, "notes": [], "manifest": manifest([], {}, endpoint)}


def test_the_report_has_both_rates_and_what_binds(found):
    rows = dict(search_rows(found))
    assert set(rows) >= {"capacity", "SLO rate", "certified", "binding", "client", "search"}
    assert "SLO rate" in interval_words(found)
    assert "- binding: " in markdown(found)
    assert found["binding"] == "ttft"


@pytest.mark.parametrize(
    ("rate", "words"), [(None, "unknown"), (0.5, "0.5"), (404.26, "404"), (2048.0, "2,048")]
)
def test_rates_are_told_without_exponents(rate, words):
    assert rate_words(rate) == words


def test_shares_are_plotted_with_the_limit_and_the_interval(found):
    (plot,) = search_plots(found)
    assert "Share that missed" in plot
    assert "SLO rate" in plot


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ({"valid": True, "slo_rps": {"certified": 3.0}}, 0),
        ({"valid": True, "slo_rps": {"certified": None}}, 1),
        ({"valid": True, "slo_rps": None}, 0),
        ({"valid": False, "slo_rps": None}, 2),
    ],
)
def test_exit_codes_of_a_search(result, code):
    assert bench.exit_code({"capacity_rps": {}, "trials": [], **result}) == code


def test_a_budget_that_is_too_short_is_refused_in_words(monkeypatch, capsys):
    monkeypatch.setattr(bench, "_session", lambda url, options: None)
    assert run(["bench", "http://127.0.0.1:1", "--budget", "5s"]) == 2
    assert "--budget must be 30s or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "other", [{"url": "http://b:2"}, {"model": "large"}], ids=["endpoint", "model"]
)
def test_resuming_with_another_endpoint_or_model_is_refused(other, tmp_path):
    def begun(**of):
        asked = {**ASKED, "url": "http://a:1", "model": "small", "resume": tmp_path / "t", **of}
        return search_wanted(asked, [TTFT]).record

    assert begun() is not None
    with pytest.raises(CannotMeasure, match=rf"another search \({next(iter(other))} differ"):
        begun(**other)


def test_void_trials_are_kept_so_that_a_search_resumes_where_it_was(tmp_path):
    queue = QueueRunner(QueueEngine("many short prompts", prefill_s=0.02, twice_at=150.0))
    played: list[int] = []

    def play(wish, plan, watch):
        played.append(wish.number)
        if len(played) == 9:
            return TrialOutcome(plan, [], 1.0, void=Void(VoidCause.CLIENT_LIMITED, "late"))
        if len(played) == 12:
            return TrialOutcome(plan, [], 1.0, void=Void(VoidCause.INTERRUPTED, "now"))
        return queue.run(plan, watch)

    asked = {**ASKED, "resume": tmp_path / "trials"}
    first, found = (
        searched(
            wanted_of(asked), play, QueueStimulus(), lambda one: trial_document(one, [TTFT], 0.01),
            BenchProgress(),
        )
        for _ in range(2)
    )  # fmt: skip
    assert not first["complete"]
    assert played[:12] == list(range(12))
    assert played[12] == 11, "the trial that was broken off is the first"
    assert len(set(played)) == len(played) - 1
    assert found["complete"]
