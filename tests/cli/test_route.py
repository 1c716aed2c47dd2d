"""``sluice route``: from a file of outcomes to a model, its worth, a score and a threshold."""

import csv
import io
import json

import pytest

from sluice.cli.main import run
from tests.complexity.conftest import made_outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Outcomes as CSV, and a model that was trained on them."""
    found = tmp_path_factory.mktemp("route")
    with (found / "outcomes.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("prompt", "weak_ok", "strong_ok"))
        for one in made_outcomes(200):
            rows.writerow((one.prompt, int(one.weak), int(one.strong)))
    arguments = ["train", str(found / "outcomes.csv"), "--out", str(found / "m.route")]
    assert run(["route", *arguments, "--note", "made up"]) == 0
    return found


def answered(capsys, *arguments):
    capsys.readouterr()
    code = run(["route", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_eval_prints_apgr_cpt_and_all_baselines(folder, capsys):
    code, found = answered(capsys, "eval", folder / "outcomes.csv", "--plots", folder / "plots")
    assert code == 0
    assert found["apgr"]["low"] < found["apgr"]["value"] < found["apgr"]["high"]
    assert list(found["baselines"]) == ["random", "length", "knn"]
    assert found["cpt50"]["value"] < found["cpt80"]["value"] < 80
    assert found["leakage"] == {"same_question": 0, "same_passage": 0, "trained_on": 0}
    for name in ("cost-quality.svg", "calibration.svg"):
        assert (folder / "plots" / name).read_text().startswith("<svg")


def test_eval_of_a_model_warns_of_rows_that_it_was_trained_on(folder, capsys):
    code, found = answered(capsys, "eval", folder / "outcomes.csv", "--model", folder / "m.route")
    assert code == 0
    assert found["leakage"]["trained_on"] == 200
    assert "the figures are too good" in found["warnings"][0]


def test_eval_shows_a_table(folder, capsys):
    assert run(["route", "eval", str(folder / "outcomes.csv")]) == 0
    out = capsys.readouterr().out
    for name in ("classifier", "random", "length", "knn", "over length"):
        assert f"\n{name}" in out


def test_score_is_the_probability_of_the_text(folder, capsys):
    model = folder / "m.route"
    _, hard = answered(capsys, "score", "prove the theorem about matrices", "--model", model)
    _, easy = answered(capsys, "score", "what colour is bread", "--model", model)
    assert 0 < easy["probability"] < hard["probability"] < 1


def test_score_shows_the_card(folder, capsys):
    _, card = answered(capsys, "score", "--card", "--model", folder / "m.route")
    assert card["notes"] == ["made up"]
    assert card["trained_on"] == ["outcomes.csv"]
    assert run(["route", "score", "--card"]) == 0
    assert "model default" in capsys.readouterr().out


def test_score_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is 2 + 2?")))
    _, piped = answered(capsys, "score")
    _, given = answered(capsys, "score", "What is 2 + 2?")
    assert piped == given


def test_a_threshold_sends_the_share_that_was_asked_for(folder, capsys):
    options = ("threshold", folder / "outcomes.csv", "--model", folder / "m.route")
    _, found = answered(capsys, *options, "--share", 30)
    assert found["share_percent"] == pytest.approx(30, abs=1)
    _, better = answered(capsys, *options, "--recover", 90)
    assert better["recovered_percent"] == pytest.approx(90, abs=2)
    assert better["threshold"] < found["threshold"]


def test_d19_a_threshold_of_recorded_scores(tmp_path, capsys):
    scores = tmp_path / "scores.txt"
    scores.write_text("\n".join(str(number / 1000) for number in range(1000)))
    _, found = answered(capsys, "threshold", "--scores", scores, "--share", 30)
    assert (found["threshold"], found["share_percent"]) == (0.7, 30.0)
    scores.write_text("\n".join(str(0.5 + number / 2000) for number in range(1000)))
    _, found = answered(capsys, "threshold", "--scores", scores, "--share", 30)
    assert (found["threshold"], found["share_percent"]) == (0.85, 30.0)


def test_d19_the_help_says_that_a_threshold_is_no_probability(capsys):
    assert run(["route", "threshold", "--help"]) == 0
    assert "it is not a probability" in " ".join(capsys.readouterr().out.split())


BAD = {
    "no file": (("eval", "none.csv"), "No such file"),
    "one class": (("train", "flat.csv", "--out", "x.route"), "only one class"),
    "pair": (("eval", "flat.csv", "--pair", "small"), "--pair is WEAK:STRONG"),
    "pairs": (("eval", "flat.csv", "--pair", "a:b", "--pair", "c:d"), "2 times --pair for 1 files"),
    "model": (("score", "x", "--model", "flat.csv"), "is not a file that sluice route train"),
    "also": (("eval", "flat.csv", "--model", "default", "--also", "a"), "--also is for training"),
    "neither": (("threshold", "flat.csv"), "give one of --share and --recover"),
    "share": (("threshold", "flat.csv", "--share", "0"), "above 0 and up to 100"),
    "scores": (("threshold", "--scores", "flat.csv", "--share", "9"), "not one number a line"),
    "recover": (("threshold", "--scores", "flat.csv", "--recover", "9"), "--recover needs DATA"),
    "both": (("threshold", "--share", "9"), "give one of DATA, --scores and --journal"),
    "folder": (("train", "good.csv", "--out", "none/x.route"), "cannot write"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_told_and_ends_with_two(
    arguments, words, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.csv").write_text((folder / "outcomes.csv").read_text())
    rows = "".join(f"prompt {number},1,1\n" for number in range(60))
    (tmp_path / "flat.csv").write_text(f"prompt,weak_ok,strong_ok\n{rows}")
    code, found = answered(capsys, *arguments)
    assert code == 2
    assert words in found["error"]
