"""``sluice config``: are the settings right, where does each come from, which are there."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from sluice.cli.options import json_option, print_json, settings_options
from sluice.config.explain import Entry, default_text, explain
from sluice.config.load import load_settings
from sluice.config.sources import Override
from sluice.core.errors import ConfigError

_EXAMPLES = """\b
Examples:
  sluice config default > sluice.toml
  sluice config check -c sluice.toml
  sluice config explain -c sluice.toml --set server.grace=10s
"""


@click.group(epilog=_EXAMPLES)
def command() -> None:
    """Check settings, explain them, print the defaults."""


@command.command()
@settings_options
@json_option
@click.pass_context
def check(
    context: click.Context, config: Path | None, overrides: Sequence[Override], as_json: bool
) -> None:
    """Check the settings of file, environment and options; exit code 1 and every problem if
    wrong."""
    problems: tuple[str, ...] = ()
    try:
        load_settings(config, overrides)
    except ConfigError as error:
        problems = error.problems
    if as_json:
        print_json({"valid": not problems, "problems": problems})
    else:
        click.echo("\n".join(problems) or "settings are valid")
    context.exit(1 if problems else 0)


@command.command("explain")
@settings_options
@json_option
def explain_settings(config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """Show every setting in force and where its value comes from; secrets are masked."""
    entries = explain(load_settings(config, overrides))
    if as_json:
        print_json([asdict(entry) for entry in entries])
    else:
        click.echo(_table(entries))


@command.command()
def default() -> None:
    """Print a settings file with every setting, its meaning and its default."""
    click.echo(default_text(), nl=False)


def _table(entries: Sequence[Entry]) -> str:
    settings = [f"{entry.key} = {entry.value}" for entry in entries]
    width = min(max(len(setting) for setting in settings), 60)
    return "\n".join(
        f"{setting:<{width}}  # {entry.origin}"
        for setting, entry in zip(settings, entries, strict=True)
    )
