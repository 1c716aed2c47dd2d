"""``sluice config``: what it prints and how it ends."""

import json
import tomllib

import pytest

from sluice.cli.main import run


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    """Settings come from the test alone."""
    for name in ("SLUICE_CONFIG", "SLUICE_API_KEYS", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wrong(tmp_path):
    file = tmp_path / "sluice.toml"
    file.write_text('[models.a]\nsource = "x"\nmax_queu = 1\nsequences_max = "many"\n')
    return str(file)


def test_check_says_that_settings_are_valid(capsys):
    assert run(["config", "check"]) == 0
    assert capsys.readouterr().out == "settings are valid\n"


def test_d15_check_reports_every_problem_and_exits_with_1(wrong, capsys):
    assert run(["config", "check", "-c", wrong]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(
        "sluice.toml:3: models.a.max_queu: unknown setting; nearest: models.a.queue_wait_max"
    )
    assert "sluice.toml:4: models.a.sequences_max: must be a whole number" in second


def test_check_as_json_is_one_document(wrong, capsys):
    assert run(["config", "check", "-c", wrong, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is False
    assert len(document["problems"]) == 2


def test_d15_other_commands_refuse_wrong_settings_too(wrong, capsys):
    assert run(["config", "explain", "-c", wrong]) == 2
    assert "2 problems in the settings" in capsys.readouterr().err


def test_explain_shows_values_and_origins_and_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("SLUICE_API_KEYS", "sk-1")
    assert run(["config", "explain", "--set", "server.grace=9s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["server.grace", "=", '"9s"', "#", "--set"] for line in lines)
    assert not any("sk-1" in line for line in lines)


def test_explain_as_json_lists_key_value_origin(capsys):
    assert run(["config", "explain", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {"key": "journal.keep", "value": '"24h"', "origin": "default"} in entries


def test_default_prints_toml(capsys):
    assert run(["config", "default"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == {}


def test_a_set_option_without_value_is_bad_input(capsys):
    assert run(["config", "check", "--set", "server"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
