"""``sluice bench compare`` as users call it."""

import json

import numpy as np
import pytest

from sluice.cli.main import run


def result(ttft_s, seed=1, rate=4.0):
    chance = np.random.default_rng(seed)
    slices = [
        {"ttft_s_p50": value, "ttft_s_p99": 2 * value, "good_rps": 4.0}
        for value in ttft_s * chance.uniform(0.95, 1.05, 20)
    ]
    return {"mode": "open", "rate_rps": rate, "valid": True, "slices": slices}


def found(low, estimate, high):
    slo = {"low": low, "estimate": estimate, "high": high}
    return {"slo_rps": slo, "capacity_rps": {"closed_loop": None}}


def compared(tmp_path, *results):
    paths = []
    for number, one in enumerate(results):
        paths.append(str(tmp_path / f"{number}.json"))
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    return run(["bench", "compare", *paths, "--json"])


@pytest.mark.parametrize(
    ("one", "two", "code", "verdict"),
    [
        (result(0.1), result(0.12, 2), 1, "worse"),
        (result(0.12), result(0.1, 2), 0, "better"),
        (result(0.1), result(0.1, 2), 0, "not shown to differ"),
        (found(9.0, 10.0, 11.0), found(6.0, 6.5, 7.0), 1, "worse"),
        (found(8.0, 10.0, 12.0), found(7.0, 9.0, 11.0), 0, "not shown to differ"),
    ],
    ids=["slower", "faster", "same", "lower rate", "rates whose intervals overlap"],
)
def test_only_what_is_worse_beyond_its_interval_ends_with_1(
    one, two, code, verdict, tmp_path, capsys
):
    assert compared(tmp_path, one, two) == code
    document = json.loads(capsys.readouterr().out)
    assert document["worse"] is (code == 1)
    change = document["compared"][0]["changes"][0]
    assert change["verdict"] == verdict
    assert change["low"] <= change["change"] <= change["high"]


@pytest.mark.parametrize(
    ("one", "two", "code", "verdict", "words"),
    [
        (found(9.0, 10.0, 11.0), found(20.0, None, None), 0, "better", "at least 20"),
        (found(20.0, None, None), found(9.0, 10.0, 11.0), 1, "worse", "at least 20"),
        (found(9.0, 10.0, 11.0), found(8.0, None, None), 0, "not shown to differ", "above "),
        (found(20.0, None, None), found(8.0, None, None), 0, "not shown to differ", "not known"),
    ],
    ids=["above all it was", "below all it was", "may be either", "nothing known"],
)
def test_a_lower_bound_is_compared_as_one(one, two, code, verdict, words, tmp_path, capsys):
    assert compared(tmp_path, one, two) == code
    (change,) = json.loads(capsys.readouterr().out)["compared"][0]["changes"]
    assert (change["verdict"], change["change"]) == (verdict, None)
    assert change["before_at_least"] or change["after_at_least"]
    run(["bench", "compare", str(tmp_path / "0.json"), str(tmp_path / "1.json")])
    assert words in " ".join(capsys.readouterr().out.split())


def test_of_many_results_each_is_compared_with_the_first(tmp_path, capsys):
    assert compared(tmp_path, result(0.1), result(0.1, 2), result(0.2, 3)) == 1
    first, second = json.loads(capsys.readouterr().out)["compared"]
    assert {one["verdict"] for one in first["changes"]} == {"not shown to differ"}
    assert second["changes"][0]["verdict"] == "worse"
    paths = [str(tmp_path / f"{number}.json") for number in (0, 2)]
    assert run(["bench", "compare", *paths]) == 1
    assert "worse" in capsys.readouterr().out


def test_nothing_in_common_and_no_result_are_refused_in_words(tmp_path, capsys):
    assert compared(tmp_path, result(0.1), result(0.1, rate=8.0)) == 2
    assert "no valid trials of the same load" in capsys.readouterr().err
    assert compared(tmp_path, result(0.1), ["x"]) == 2
    assert "is no result of sluice bench" in capsys.readouterr().err
    assert run(["bench", "compare", str(tmp_path / "none"), str(tmp_path / "0.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert run(["bench", "compare", "--help"]) == 0
    assert "sluice bench compare before.json after.json" in capsys.readouterr().out
