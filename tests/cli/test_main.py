"""The command line as a whole: help, exit codes, errors in words."""

import json
import subprocess
import sys

import click
import pytest

from sluice import __version__
from sluice.cli import main as main_module
from sluice.cli.main import COMMANDS, in_words, root, run
from sluice.core.errors import ConfigError, ExecutorError, ModelLoadError, SluiceError


def test_help_names_every_command_and_gives_examples(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert "sluice serve" in out


def test_help_and_version_import_no_command():
    """Keeps them quick: no server, no engine, no progress bars are loaded."""
    script = (
        "import sys; from sluice.cli.main import run; run(['--help']); run(['--version']);"
        "loaded = [n for n in sys.modules if n.startswith('sluice.')];"
        "sys.exit(sorted(set(loaded) - {'sluice.cli', 'sluice.cli.main', 'sluice.core',"
        " 'sluice.core.errors'}) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "--version"], check=False, capture_output=True, text=True
    )
    assert done.stdout == f"sluice, version {__version__}\n"


@pytest.mark.parametrize("arguments", [["nope"], ["models"], ["models", "pull"], ["--nope"]])
def test_bad_input_exits_with_2(arguments, capsys):
    assert run(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError(("a: bad",)), 2, "sluice: a: bad\n"),
        (
            ConfigError(("a: bad", "b: bad")),
            2,
            "sluice: 2 problems in the settings:\n  a: bad\n  b: bad\n",
        ),
        (ModelLoadError("no such model"), 2, "sluice: no such model\n"),
        (ExecutorError("engine died"), 1, "sluice: engine died\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_errors_end_in_their_code_and_their_words(monkeypatch, capsys, error, code, words):
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(main_module, "root", command)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert run([]) == code
    assert capsys.readouterr().err == words


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--port=80", "--listen HOST:PORT"),
        ("--host=::", "--listen HOST:PORT"),
        ("--model=x", "sluice serve MODEL"),
        ("--served-model-name=x", "--set models.NAME.source=MODEL"),
        ("--max-model-len=9", "--set models.NAME.context_tokens_max="),
        ("--api-key=sk-secret", "server.api_key_file="),
    ],
)
def test_options_of_other_servers_are_told_what_to_use_instead(option, words, capsys):
    assert run(["serve", option]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"sluice: there is no {option.partition('=')[0]}; ")
    assert words in told
    assert "secret" not in told


def test_every_command_gives_examples_of_itself():
    def leaves(path, command):
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from leaves(f"{path} {name}", inner)

    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        for path, found in leaves(f"sluice {name}", command):
            assert f"  {path}" in (found.epilog or ""), path


@pytest.mark.parametrize("name", ["models", "config", "route", "docs", "deploy"])
def test_subcommands_are_told_in_whole_sentences(name, capsys):
    assert run([name, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:\n")[2].partition("\n\n")[0]
    assert listed.count(".\n") == listed.count("\n")
    assert "..." not in listed


def test_with_json_a_failure_is_one_document_on_standard_output(capsys):
    assert run(["models", "list", "--json", "--nope"]) == 2
    captured = capsys.readouterr()
    assert "--nope" in json.loads(captured.out)["error"]
    assert captured.err.startswith("sluice: No such option")


def test_every_command_has_a_module_with_help():
    context = click.Context(root)
    for name, (module, help_line) in COMMANDS.items():
        command = root.get_command(context, name)
        assert command is not None, module
        assert command.help, f"{name} has no help"
        assert help_line.endswith(".")


def test_in_words_keeps_a_single_error_on_one_line():
    assert in_words(SluiceError("x")) == "sluice: x"
