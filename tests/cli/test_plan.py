"""``sluice plan`` on the command line."""

import json

import pytest

from sluice.cli.main import run

ASKED = [
    "plan", "--model", "llama-3.1-70b", "--gpu", "h100", "--tp", "4", "--rps", "100",
    "--input", "1000", "--output", "300", "--ttft", "1s", "--tpot", "50ms",
]  # fmt: skip


def test_json_has_the_fields_that_scripts_rely_on(capsys):
    assert run([*ASKED, "--percentile", "95", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for rate in ("capacity_rps", "slo_rps"):
        band = document["per_replica"][rate]
        assert 0 < band["low"] <= band["estimate"] <= band["high"]
    assert document["gpus"] == 4 * document["replicas"]
    assert set(document["kv"]) == {"bytes_per_token", "tokens_max", "sequences_max"}
    assert document["kv"]["bytes_per_token"] == 163_840
    assert document["binding"] in {"tpot", "ttft", "kv memory", "batch limit", "capacity"}
    assert 0 < document["prefill_share"] < 1
    assert document["cost_usd_per_hour"]["low"] > 0
    assert document["leaned_on"]
    assert "explain" not in document


def test_explain_shows_memory_steps_and_coefficients(capsys):
    assert run([*ASKED, "--json", "--explain"]) == 0
    explained = json.loads(capsys.readouterr().out)["explain"]
    assert explained["memory_gib"]["device"] == 79.6
    assert explained["tpot_s"] <= 0.05
    assert "vllm/hopper" in explained["coefficients"]


def test_the_report_names_replicas_bands_margins_and_what_binds(capsys):
    assert run([*ASKED, "--explain"]) == 0
    out = capsys.readouterr().out
    for words in ("replicas", "SLO rate per replica", "what binds", "58% of the SLO rate", "USD"):
        assert words in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--model", "lama-3.1-70b"], "did you mean"),
        (["--gpu", "h1000"], "did you mean h100"),
        (["--ttft", "1"], "has no unit"),
        (["--tpot", "-5ms"], "duration"),
        (["--rps", "nan"], "rate must be above 0"),
        (["--rps", "many"], "is not a valid float"),
        (["--tp", "3"], "nearest below is 2"),
        (["--tpot", "10us"], "below one step"),
        (["--beside", "encoder"], "NAME=SIZE"),
        (["--beside", "encoder=9QB"], "unknown unit"),
        (["--tables", "/nonexistent.toml"], "cannot read the table"),
    ],
)
def test_bad_input_exits_2_with_what_to_change(change, words, capsys):
    assert run([*ASKED, *change]) == 2
    assert words in capsys.readouterr().err


def test_other_weights_on_the_device_take_from_the_pool(capsys):
    counts = []
    for extra in ([], ["--beside", "encoder=10GiB"]):
        assert run([*ASKED, *extra, "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["kv"]["sequences_max"])
    assert counts[1] < counts[0]


def test_a_failure_is_one_json_document_too(capsys):
    assert run([*ASKED, "--gpu", "h1000", "--json"]) == 2
    assert "h1000" in json.loads(capsys.readouterr().out)["error"]


def test_help_has_examples(capsys):
    assert run(["plan", "--help"]) == 0
    assert "sluice plan --model llama-3.1-70b --gpu h100" in capsys.readouterr().out
