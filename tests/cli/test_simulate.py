"""``sluice simulate`` on the command line."""

import gzip
import json

import pytest

from sluice.cli.main import run

RATE = ["--rate", "15", "--input", "200", "--output", "20", "--requests", "60", "--warm-up", "0"]
FLEET = ["--model", "llama-3.1-8b", "--gpu", "h100", "--replicas", "2"]
TARGETS = ["--ttft", "1s", "--tpot", "40ms"]
ASKED = ["simulate", *RATE, *FLEET, "--policy", "slo", *TARGETS, "--seed", "3"]

SETTINGS = """
[models.small]
source = "sim:llama-3.1-8b@h100"
slo = "chat"
[models.large]
source = "sim:llama-3.1-70b@h100x4"
replicas = { min = 2 }
smaller = "small"
[slo.chat]
ttft = "1s"
tpot = "50ms"
overload = ["smaller", "queue", "refuse"]
[slo.batch]
tier = 5
[tenants.acme]
requests_per_minute = 30
"""


def found(capsys, *arguments):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_fields_that_scripts_rely_on(capsys):
    document = found(capsys, *ASKED)
    assert document["requests"] == 60
    assert document["attainment"] == 1.0
    assert document["goodput_rps"] == pytest.approx(15, rel=0.4)
    assert document["refused"] == 0
    assert document["preemptions"] == 0
    assert document["wall_s"] > 0
    assert document["replica_hours"] > 0
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert 0 < document[name]["p50"] <= document[name]["p99"]


def test_readers_get_the_same_in_lines(capsys):
    assert run(ASKED) == 0
    out = capsys.readouterr().out
    assert "100.0% of 60 requests met their targets" in out
    assert "TTFT p50" in out


def test_names_of_groups_are_whole_in_a_narrow_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*ASKED, "--tenant", "acme=1", "--tenant", "beta=1"]) == 0
    shown = capsys.readouterr().out
    assert "\ntenants: acme " in shown
    assert "…" not in shown


def test_two_runs_with_one_seed_print_and_write_the_same(tmp_path, capsys):
    documents, journals = [], []
    for name in ("a", "b"):
        documents.append(found(capsys, *ASKED, "--journal", str(tmp_path / name)))
        documents[-1].pop("wall_s")
        (segment,) = (tmp_path / name).iterdir()
        journals.append(segment.read_bytes())
    assert documents[0] == documents[1]
    assert journals[0] == journals[1]


def test_our_trace_is_played_at_a_rate(capsys):
    document = found(
        capsys, "simulate", "--trace", "azure-conv", "--rate", "20", *FLEET, *TARGETS,
        "--requests", "50", "--warm-up", "0",
    )  # fmt: skip
    assert document["requests"] == 50
    assert document["offered_rps"] == pytest.approx(20, rel=0.7)


def test_lengths_of_a_trace_are_drawn_for_other_arrivals(capsys):
    document = found(
        capsys, "simulate", "--lengths", "azure-code", "--rate", "10", "--arrivals", "constant",
        *FLEET, *TARGETS, "--requests", "60", "--warm-up", "0",
    )  # fmt: skip
    assert document["offered_rps"] == pytest.approx(10, rel=0.02)
    assert 0 < document["output_tokens"] / 60 < 100


def test_an_answer_that_takes_too_long_is_worth_nothing(capsys):
    plain = found(capsys, *ASKED)
    short = found(capsys, *ASKED, "--ttft", "80ms", "--e2e", "90ms")
    assert plain["attainment"] == 1.0 > short["attainment"]


def test_a_file_of_settings_gives_models_classes_and_tenants(tmp_path, capsys):
    file = tmp_path / "fleet.toml"
    file.write_text(SETTINGS)
    mixes = ["--ask", "large=2", "--ask", "small=1", "--class", "chat", "--tenant", "acme"]
    document = found(capsys, "simulate", *RATE, "-c", str(file), *mixes)
    assert set(document["models"]) == {"small", "large"}
    assert document["classes"]["chat"]["requests"] == 60
    assert document["tenants"]["acme"]["requests"] == 60
    assert 25 <= document["refused_for"]["requests_per_minute"] <= 30
    freed = found(
        capsys, "simulate", *RATE, "-c", str(file), *mixes, "--set",
        "tenants.acme.requests_per_minute=600",
    )  # fmt: skip
    assert freed["refused"] == 0


def test_a_fault_costs_what_runs_then(capsys):
    document = found(capsys, *ASKED, "--fault", "replica-gone@1s", "--load-time", "2s")
    assert document["replica_hours"] < found(capsys, *ASKED, "--load-time", "2s")["replica_hours"]


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_other_policies_are_those_of_the_settings(policy, capsys):
    one = ["--rate", "40", "--input", "4000", "--output", "30", "--requests", "80"]
    asked = ["simulate", *one, *FLEET[:4], "--replicas", "1", *TARGETS, "--seed", "1"]
    slo = found(capsys, *asked, "--policy", "slo")
    other = found(capsys, *asked, "--policy", policy)
    assert other["tpot_s"] != slo["tpot_s"] or other["ttft_s"] != slo["ttft_s"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "0", *RATE[2:], *FLEET], "rate must be above 0"),
        (["--rate", "nan", *RATE[2:], *FLEET], "rate must be above 0"),
        ([*RATE[:2], *RATE[4:], *FLEET], "--input missing"),
        ([*RATE, "--trace", "azure-conv", *FLEET], "a trace has its own arrivals"),
        (["--trace", "azure-conv", "--turns", "3", *FLEET], "leave out --turns"),
        ([*RATE, "--column", "t=a", *FLEET], "--column belongs to --trace"),
        ([*RATE, "--policy", "fcfs"], "--policy belong to --model"),
        ([*RATE, *FLEET, "--tp", "0"], "x0"),
        ([*RATE, "--lengths", "azure-conv", *FLEET], "give --lengths, or --input"),
        ([*RATE[2:], *FLEET], "--rate missing"),
        (["--trace", "nowhere.csv", *FLEET], "no trace file nowhere.csv"),
        ([*RATE], "no model is named"),
        ([*RATE, "--model", "llama-3.1-8b"], "--model and --gpu go together"),
        ([*RATE, "--model", "lama-3.1-8b", "--gpu", "h100"], "did you mean"),
        ([*RATE, *FLEET, "--replicas", "0"], "replicas.min"),
        ([*RATE, *FLEET, "--policy", "best"], "policy"),
        ([*RATE, *FLEET, "--ttft", "1"], "has no unit"),
        ([*RATE, *FLEET, "--percentile", "400"], "percentile"),
        ([*RATE, *FLEET, "--requests", "0"], "--requests must be 1"),
        ([*RATE, *FLEET, "--warm-up", "60"], "--warm-up must be 0"),
        ([*RATE, *FLEET, "--fault", "replica-lost"], "has no time"),
        ([*RATE, *FLEET, "--load-time", "soon"], "--load-time"),
        ([*RATE, *FLEET, "--arrivals", "onoff:up=1"], "take on, off"),
        ([*RATE, *FLEET, "--class", "gold=1"], "gold"),
        ([*RATE, *FLEET, "--ask", "gold=1"], "asks for 'gold'"),
        ([*RATE, *FLEET, "--turns", "0"], "--turns"),
        ([*RATE, *FLEET, "--max-tokens", "0"], "--max-tokens"),
        ([*RATE, *FLEET, "--set", "models.model.headrom=1"], "headroom"),
    ],
)
def test_bad_input_exits_2_with_what_to_change(arguments, words, capsys):
    assert run(["simulate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_does_not_fit_says_so(capsys):
    assert run(["simulate", *RATE, "--model", "llama-3.1-70b", "--gpu", "l4"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_a_model_without_hardware_is_refused_with_how_to_name_it(tmp_path, capsys):
    file = tmp_path / "served.toml"
    file.write_text('[models.mine]\nsource = "smollm2-135m-instruct"\n')
    assert run(["simulate", *RATE, "-c", str(file)]) == 2
    assert "--set models.mine.source=sim:MODEL@GPUxN" in capsys.readouterr().err


def test_a_journal_is_not_written_over(tmp_path, capsys):
    folder = tmp_path / "j"
    assert run([*ASKED, "--journal", str(folder)]) == 0
    assert run([*ASKED, "--journal", str(folder)]) == 2
    assert "it holds a journal already" in capsys.readouterr().err


def test_a_tenth_of_the_requests_is_the_warm_up_unless_one_says(capsys):
    plain = ["simulate", "--rate", "15", "--input", "200", "--output", "20", *FLEET]
    assert found(capsys, *plain, "--requests", "50")["requests"] == 45
    assert found(capsys, *plain, "--requests", "50", "--warm-up", "20")["requests"] == 30
    assert found(capsys, *plain, "--requests", "1")["requests"] == 1


OVERLOAD = [
    "simulate", "--rate", "200", "--input", "4000", "--output", "30", "--requests", "400",
    *FLEET[:4], "--policy", "fcfs", "--set", "models.model.queue_requests_max=10000",
]  # fmt: skip


def test_a_queue_that_grows_is_said(capsys):
    assert found(capsys, *OVERLOAD)["queue_grows"]
    assert not found(capsys, *ASKED)["queue_grows"]
    assert run(OVERLOAD) == 0
    out = capsys.readouterr().out
    assert "overload: more requests wait for a first token at the end than at half" in out


def test_retries_are_shown_with_the_share_from_when_clients_first_asked(capsys):
    asked = [*OVERLOAD[:-2], *TARGETS, "--policy", "slo", "--retries", "2", "--requests", "120"]
    document = found(capsys, *asked)
    assert document["retries"] > 0
    assert document["attainment_from_first_ask"] <= document["attainment"]
    assert run(asked) == 0
    share = f"{document['attainment_from_first_ask']:.1%} met their targets from when"
    assert share in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_not_called_a_journal(tmp_path, capsys, monkeypatch):
    trace = tmp_path / "trace.csv.gz"
    whole = gzip.compress(b"t_s,input_tokens,output_tokens\n" + b"1,20,3\n2,20,3\n" * 900)
    trace.write_bytes(whole[:-40])
    assert run(["simulate", "--trace", str(trace), *FLEET]) == 2
    assert f"the trace {trace} is damaged" in capsys.readouterr().err

    def gone(*_arguments, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sluice.cli.simulate.simulate", gone)
    assert run(ASKED) == 2
    assert "cannot simulate: No space left on device" in capsys.readouterr().err
    monkeypatch.setattr("sluice.cli.simulate.JournalFile", gone)
    assert run([*ASKED, "--journal", str(tmp_path / "j")]) == 2
    assert f"cannot write the journal {tmp_path / 'j'}: No space left" in capsys.readouterr().err
