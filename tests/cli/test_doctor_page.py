"""``docs/doctor.md``: its commands do what it says, and all causes are in its table."""

import json
import re
import shlex
from pathlib import Path

import pytest

from sluice.cli.main import run
from sluice.doctor.causes import CAUSES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
OUTPUT = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0]
NUMBERS = re.compile(r"[\d,.]+( ms| s)?|\s+")


@pytest.mark.slow
def test_the_commands_of_the_page_tell_the_incident_that_it_describes(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    simulate, doctor, *others = COMMANDS
    assert run(shlex.split(simulate)[1:]) == 0
    capsys.readouterr()
    assert run(shlex.split(doctor)[1:]) == 1
    printed = capsys.readouterr().out
    first = printed.splitlines()[0]
    (look,) = re.findall(r"look at: sluice (.*)", printed)
    assert run(shlex.split(look)) == 0
    assert "prefill" in capsys.readouterr().out
    assert "the engine is slower at the same work (confirmed" in first
    assert NUMBERS.sub(" ", first) == NUMBERS.sub(" ", OUTPUT.splitlines()[0])
    for command in others:
        assert run(shlex.split(command)[1:]) == 1, command
        shown = capsys.readouterr().out
        if "--json" in command:
            assert json.loads(shown)["causes"][0]["name"] == "engine_slowdown"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 3
    assert "engine_slowdown" in page
    assert all(0 <= int(share) <= 100 for share in re.findall(r"<td>.*?(-?\d+)% to", page))


def test_every_cause_is_in_the_table_of_the_page():
    assert [name for name in CAUSES if f"| `{name}` |" not in PAGE] == []
