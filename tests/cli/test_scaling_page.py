"""The command and the settings of ``docs/scaling.md`` do what the page says."""

import re
import shlex
from pathlib import Path

from sluice.cli.main import run
from sluice.config.load import load_settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
(COMMAND,) = [one for one in COMMANDS if one.startswith("sluice simulate")]
SETTINGS, SLEEPING = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_the_command_of_the_page_runs_and_says_how_many_replicas_served(capsys):
    program, *words = shlex.split(COMMAND.replace("\\\n", " "))
    assert program == "sluice"
    assert run(words) == 0
    assert re.search(r"replicas +1 to [2-4]; changes .*: \d+ \w+", capsys.readouterr().out)


def test_the_settings_of_the_page_are_accepted(tmp_path):
    path = tmp_path / "sluice.toml"
    path.write_text(SETTINGS)
    loaded = load_settings(path, [], secrets=False).settings
    assert loaded.models["chat"].replicas.warm == 1
    assert loaded.autoscale.schedules[0].replicas == 2


def test_the_settings_of_sleeping_engines_are_accepted(tmp_path):
    path = tmp_path / "sluice.toml"
    path.write_text(SLEEPING)
    assert load_settings(path, [], secrets=False).settings.models["large"].sleep
