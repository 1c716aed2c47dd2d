"""``sluice config``: what it prints and how it ends."""

import json
import tomllib

import pytest

from sluice.catalog.models import DEFAULT_MODEL
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


def test_check_warns_of_what_does_nothing(tmp_path, capsys):
    file = tmp_path / "sluice.toml"
    file.write_text("[tenants.acme]\nweight = 2")
    assert run(["config", "check", "-c", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "settings are valid\n"
    assert captured.err.startswith("warning: tenants.acme: nothing makes a request one of")
    assert run(["config", "check", "-c", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["valid"], len(document["warnings"])) == (True, 1)


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
    keep = {"key": "journal.keep", "value": "24h", "origin": "default", "settable": True}
    assert keep in entries
    values = {entry["key"]: entry["value"] for entry in entries}
    assert values["server.cors_origins"] == []
    assert values["server.metrics_open"] is True


def test_explain_without_models_shows_the_one_that_is_served(capsys):
    assert run(["config", "explain"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"models.{DEFAULT_MODEL}.sequences_max = unset ") for line in shown)
    assert any(line.startswith("# server.api_key_digests: 0 given") for line in shown)


def test_d15_a_missing_file_is_bad_input_for_every_command(tmp_path, capsys):
    missing = str(tmp_path / "none.toml")
    for command in (["config", "check"], ["config", "explain"], ["models", "list"], ["serve"]):
        assert run([*command, "-c", missing]) == 2
        assert capsys.readouterr().err.startswith(f"sluice: {missing}: cannot be read")


def test_a_failure_with_json_is_one_document_with_the_problems(wrong, capsys):
    assert run(["config", "explain", "--json", "-c", wrong]) == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert "2 problems" in document["error"]
    assert len(document["problems"]) == 2
    assert captured.err.startswith("sluice: 2 problems")


def test_default_prints_toml(capsys):
    assert run(["config", "default"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == {}


def test_a_set_option_without_value_is_bad_input(capsys):
    assert run(["config", "check", "--set", "server"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_check_reads_the_certificate(tmp_path, capsys):
    files = [tmp_path / "cert.pem", tmp_path / "key.pem"]
    for file in files:
        file.write_text("no certificate")
    options = [
        f"--set=server.tls_{kind}_file={file}"
        for kind, file in zip(("cert", "key"), files, strict=True)
    ]
    assert run(["config", "check", *options]) == 1
    assert "are not a certificate chain and its unencrypted key" in capsys.readouterr().out
    assert run(["config", "check", options[0]]) == 1
    assert "set both or neither" in capsys.readouterr().out
