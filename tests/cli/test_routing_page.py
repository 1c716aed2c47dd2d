"""The commands of ``docs/routing.md`` do what the page says."""

import csv
import re
import shlex
from pathlib import Path

import pytest

from sluice.cli.main import run
from tests.complexity.conftest import made_outcomes

# What is served is tried by ``tests/e2e/test_routes.py``.
PAGE, _, _ = (
    (Path(__file__).resolve().parents[2] / "docs" / "routing.md")
    .read_text(encoding="utf-8")
    .partition("## Serving")
)
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
(OUTPUT,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
(HEADER,) = re.findall(r"```csv\n(.*?)\n", PAGE)
NUMBERS = re.compile(r"[-\d.]+%?|\s+")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the files that the page has."""
    monkeypatch.chdir(tmp_path)
    with Path("outcomes.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(HEADER.split(","))
        for one in made_outcomes(300):
            rows.writerow((one.prompt, int(one.weak), int(one.strong)))
    Path("scores.txt").write_text("\n".join(f"{number / 100}" for number in range(100)))


def test_the_commands_of_the_page_run_in_their_order(capsys):
    printed = []
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "sluice"
        assert run(words) == 0, command
        printed.append(capsys.readouterr().out)
    assert len(COMMANDS) == 7
    for shown, line in zip(OUTPUT.splitlines(), printed[0].splitlines(), strict=True):
        assert NUMBERS.sub(" ", shown).split() == NUMBERS.sub(" ", line).split()
    assert Path("plots/cost-quality.svg").exists()
    assert "support desk, November" in printed[2]
    assert 0 < float(printed[3]) < 1
    assert re.search(r"share_percent +30\b", printed[4])
    assert "recovered_percent" in printed[5]
    assert re.search(r"threshold +0.7\b", printed[6])
