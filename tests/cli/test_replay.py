"""``sluice replay`` on the command line: recorded beside replayed beside changed."""

import json

import pytest

from sluice.cli.main import run

FLEET = [
    "simulate", "--model", "llama-3.1-8b", "--gpu", "h100", "--ttft", "300ms", "--tpot", "40ms",
    "--input", "300", "--output", "30", "--seed", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """Recorded traffic: 150 requests at a rate that one replica bears."""
    folder = tmp_path_factory.mktemp("replay") / "journal"
    recorded = ["--rate", "25", "--requests", "150", "--spread", "0.4", "--system", "96"]
    assert run([*FLEET, *recorded, "--journal", str(folder)]) == 0
    return folder


def found(capsys, *arguments):
    assert run(["replay", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_replay_is_near_what_was_recorded(journal, capsys):
    document = found(capsys, str(journal))
    recorded, replayed = document["recorded"], document["replayed"]
    assert recorded["requests"] == replayed["requests"] == 150
    assert recorded["attainment"] == replayed["attainment"] == 1.0
    assert replayed["output_tokens"] == recorded["output_tokens"]
    assert replayed["tpot_s"]["p50"] == pytest.approx(recorded["tpot_s"]["p50"], rel=0.1)
    assert replayed["ttft_s"]["p50"] == pytest.approx(recorded["ttft_s"]["p50"], rel=0.2)
    assert "changed" not in document


def test_common_beginnings_are_kept(journal, capsys):
    """96 of about 400 prompt tokens come from the cache in both."""
    plain = found(capsys, str(journal), "--set", "models.model.prefix_cache=false")
    assert plain["changed"]["ttft_s"]["p50"] > plain["replayed"]["ttft_s"]["p50"]


def test_what_is_set_is_what_differs(journal, capsys):
    document = found(
        capsys, str(journal), "--set", "models.model.sequences_max=1", "--set",
        "slo.targets.ttft=100ms",
    )  # fmt: skip
    assert document["changed"]["refused"] > 20
    assert document["replayed"]["refused"] == 0
    assert run(["replay", str(journal), "--set", "models.model.sequences_max=1"]) == 0
    out = capsys.readouterr().out
    for words in ("recorded", "replayed", "changed", "goodput, req/s", "TTFT p95"):
        assert words in out


def test_other_hardware_and_more_replicas(journal, capsys):
    slower = found(capsys, str(journal), "--set", "models.model.source=sim:llama-3.1-8b@l4")
    assert slower["changed"]["tpot_s"]["p50"] > 2 * slower["replayed"]["tpot_s"]["p50"]
    two = found(capsys, str(journal), "--set", "models.model.replicas.min=2")
    assert two["changed"]["ttft_s"]["p95"] <= two["replayed"]["ttft_s"]["p95"] * 1.02
    assert two["changed"]["replica_hours"] == pytest.approx(
        2 * two["replayed"]["replica_hours"], rel=0.1
    )


def test_a_fault_can_be_added(journal, capsys):
    document = found(capsys, str(journal), "--fault", "replica-lost@2s", "--load-time", "1s")
    changed = document["changed"]
    assert changed["failed"] + changed["refused"] > 0
    assert document["replayed"]["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no journal folder nowhere"),
        (["."], "has 0 requests"),
    ],
)
def test_a_folder_without_a_journal_is_bad_input(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["replay", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("models.model.headrom=0.1", "headroom"),
        ("models.model.source=sim:llama-3.1-8b@h1000", "did you mean h100"),
        ("models.other.headroom=0.1", "other"),
    ],
)
def test_settings_that_are_none_are_told(journal, setting, words, capsys):
    assert run(["replay", str(journal), "--set", setting]) == 2
    assert words in capsys.readouterr().err
