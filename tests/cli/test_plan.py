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
    for words in (
        "replicas",
        "SLO rate per replica",
        "what binds",
        "80 % band",
        "four times of five",
        "at any latency",
        "nearest published measurements",
        "lowest and the highest price",
        "estimated for vllm; this release of sluice serves its embedded engine itself",
    ):
        assert words in out


def test_one_replica_is_not_said_to_be_busier_than_it_is(capsys):
    asked = [*ASKED, "--rps", "0.1"]
    assert run([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    share = 0.1 / document["per_replica"]["slo_rps"]["estimate"]
    assert document["planned_share_of_slo_rate"] == pytest.approx(share)
    assert run(asked) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 replica, 4 x h100 ")
    assert f"{100 * share:.2g}% of the SLO rate in use at 0.1 req/s" in out


def test_spare_replicas_are_part_of_the_share_in_use(capsys):
    assert run([*ASKED, "--spare", "2"]) == 0
    assert "when 2 replicas failed" in capsys.readouterr().out


def test_numbers_are_written_without_exponents(capsys):
    asked = [*ASKED, "--rps", "1000000", "--input", "1", "--output", "10"]
    assert run(asked) == 0
    out = capsys.readouterr().out
    assert "1,000,000 req/s" in out
    assert "e+0" not in out
    assert run([*ASKED, "--input", "60000", "--ttft", "0.2s"]) == 1
    assert "ms" not in capsys.readouterr().err.split("takes about")[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--tp", "3"], "nearest below is 2"),
        (["--tpot", "10us"], "below one step"),
        (["--tp", "1", "--precision", "bf16"], "does not fit"),
        (["--precision", "fp4"], "h100 has no FP4 units"),
        (["--input", "140000"], "takes 131,072"),
    ],
)
def test_that_no_fleet_can_do_it_is_a_finding_and_exits_1(change, words, capsys):
    assert run([*ASKED, *change]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("order", [1, -1])
def test_list_shows_what_can_be_named_and_needs_no_question(order, tmp_path, capsys):
    assert run(["plan", "--list"]) == 0
    out = capsys.readouterr().out
    for words in ("llama-3.1-70b", "also llama-3.3-70b", "h100", "Precisions: bf16", "vllm"):
        assert words in out
    file = tmp_path / "mine.toml"
    file.write_text(
        '[hardware.mine]\narchitecture = "new"\nmemory_gib = 64\nbandwidth_gb_s = 2000\n'
        "bf16_tflops = 300\n"
    )
    options = [["--list"], ["--json"], ["--tables", str(file)]][::order]
    assert run(["plan", *(word for option in options for word in option)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gpus"][-1]["name"] == "mine"
    assert not document["gpus"][-1]["fp8"]


def test_a_table_that_cannot_be_listed_is_bad_input(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text("[hardware.mine]\nmemory_gib = 64\n")
    assert run(["plan", "--list", "--tables", str(file)]) == 2
    assert "mine has no architecture" in capsys.readouterr().err


def test_a_plan_without_a_model_is_bad_input(capsys):
    assert run(["plan", "--gpu", "h100"]) == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--model", "lama-3.1-70b"], "did you mean"),
        (["--gpu", "h1000"], "did you mean h100"),
        (["--ttft", "1"], "has no unit"),
        (["--tpot", "-5ms"], "duration"),
        (["--rps", "nan"], "rate must be above 0"),
        (["--rps", "many"], "is not a valid float"),
        (["--precision", "fp9"], "did you mean fp"),
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


def test_help_has_examples_explains_the_words_and_shows_the_form_of_tables(capsys):
    assert run(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "sluice plan --model llama-3.1-70b --gpu h100" in out
    for words in ("80 % band", "capacity", "leaned on", "Exit codes: 0 a plan, 1 no fleet"):
        assert words in out


def test_the_table_that_help_shows_can_be_used(tmp_path, capsys):
    assert run(["plan", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(next(line for line in lines if line.strip().startswith("[models.")))
    shown = lines[first : lines.index("", first)]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(shown))
    mine = ["--model", "my-model", "--gpu", "my-gpu", "--tables", str(file)]
    assert run([*ASKED, *mine, "--tp", "1", "--precision", "bf16"]) == 0
    assert "my-gpu" in capsys.readouterr().out
