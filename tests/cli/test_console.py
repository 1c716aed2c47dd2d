"""What comes from elsewhere is printed as it is, by every command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sluice.cli
from sluice.cli.console import plain_console

BRACKETS = "[/] [bold]m[/red] :smile: [link=http://x]"


def test_brackets_are_text(capsys):
    plain_console(width=80).print(BRACKETS)
    assert capsys.readouterr().out == f"{BRACKETS}\n"


def test_every_command_prints_through_it():
    for path in Path(sluice.cli.__path__[0]).glob("*.py"):
        if path.name != "console.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\bConsole\(", text), path.name
            for column in re.findall(r"TextColumn\([^)]*\)", text):
                assert "markup=False" in column, (path.name, column)


@pytest.mark.parametrize("line", ["plan --list", "config default"])
def test_a_reader_that_leaves_is_no_failure(line):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as left:
        ended = subprocess.run(
            [sys.executable, "-m", "sluice", *line.split()],
            stdout=left,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
