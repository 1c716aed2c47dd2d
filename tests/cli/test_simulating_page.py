"""The commands of ``docs/simulating.md`` do what the page says."""

import re
import shlex
from pathlib import Path

import pytest

from sluice.cli.main import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulating.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
(SETTINGS,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
(OUTPUT,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
NUMBERS = re.compile(r"[\d,.]+( ms| s)?|-|\s+")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the files that the page has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.toml").write_text(SETTINGS)
    rows = "".join(f"{100 * number},{200 + number},{10 + number}\n" for number in range(30))
    (tmp_path / "calls.csv").write_text(f"start,prompt,answer\n{rows}")


def arguments(command):
    program, *words = shlex.split(command)
    assert program == "sluice"
    return words


@pytest.mark.parametrize("command", COMMANDS[:4], ids=["load", "trace", "columns", "fleet"])
def test_a_command_of_the_page_runs(command, capsys):
    assert run(arguments(command)) == 0
    assert "met their targets" in capsys.readouterr().out


def test_the_shown_output_has_the_lines_that_the_command_prints(capsys):
    assert run(arguments(COMMANDS[0])) == 0
    printed = capsys.readouterr().out
    for shown, line in zip(OUTPUT.splitlines(), printed.splitlines(), strict=True):
        assert NUMBERS.sub(" ", shown).split() == NUMBERS.sub(" ", line).split()


def test_recorded_traffic_is_replayed_on_other_hardware(capsys):
    record, replay = COMMANDS[4:]
    assert run(arguments(record)) == 0
    assert run(arguments(replay)) == 0
    out = capsys.readouterr().out
    assert re.search(r"recorded +replayed +changed +change", out)


def test_the_page_shows_no_other_command():
    assert len(COMMANDS) == 6
