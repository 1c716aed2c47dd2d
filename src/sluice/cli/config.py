"""``sluice config``: are the settings right, where does each come from, which are there."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from sluice.catalog.models import DEFAULT_MODEL
from sluice.cli.options import json_option, print_json, settings_options
from sluice.config.cautions import cautions
from sluice.config.explain import Entry, default_text, explain
from sluice.config.load import file_text, load_settings, settings_file
from sluice.config.sources import Override
from sluice.core.errors import ConfigError
from sluice.server.transport import Transport
from sluice.wiring.defaults import models_of

_EXAMPLES = """\b
Examples:
  sluice config default > sluice.toml
  sluice config check -c sluice.toml
  sluice config explain -c sluice.toml --set server.grace=10s
"""
_CHECK_EXAMPLES = """\b
Examples:
  sluice config check -c sluice.toml
  sluice config check --set server.listen=0.0.0.0:8000 --json
"""
_EXPLAIN_EXAMPLES = """\b
Examples:
  sluice config explain
  sluice config explain -c sluice.toml --json
"""
_DEFAULT_EXAMPLES = """\b
Examples:
  sluice config default > sluice.toml
"""


@click.group(epilog=_EXAMPLES)
def command() -> None:
    """Check settings, explain them, print the defaults."""


@command.command(epilog=_CHECK_EXAMPLES, short_help="Check settings, and tell every problem.")
@settings_options
@json_option
@click.pass_context
def check(
    context: click.Context, config: Path | None, overrides: Sequence[Override], as_json: bool
) -> None:
    """Check the settings of file, environment and options; exit code 1 and every problem if
    wrong, 2 where there is no such file. What is allowed and does nothing is a warning."""
    _require_readable(config)
    problems: tuple[str, ...] = ()
    warnings: list[str] = []
    try:
        settings = load_settings(config, overrides).settings
        warnings = list(cautions(settings))
        Transport.of(settings.server)  # reads the certificate
    except ConfigError as error:
        problems = error.problems
    if as_json:
        print_json({"valid": not problems, "problems": problems, "warnings": warnings})
    else:
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        click.echo("\n".join(problems) or "settings are valid")
    context.exit(1 if problems else 0)


@command.command("explain", epilog=_EXPLAIN_EXAMPLES, short_help="Show settings and their places.")
@settings_options
@json_option
def explain_settings(config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """Show every setting in force and where its value comes from; secrets are masked."""
    loaded = load_settings(config, overrides)
    served = replace(loaded.settings, models=models_of(loaded.settings))
    entries = explain(replace(loaded, settings=served))
    if as_json:
        print_json([_document(entry) for entry in entries])
    else:
        click.echo(_table(entries))


@command.command(epilog=_DEFAULT_EXAMPLES, short_help="Print a settings file with all defaults.")
def default() -> None:
    """Print a settings file with every setting, its meaning and its default."""
    click.echo(default_text(DEFAULT_MODEL), nl=False)


def _require_readable(config: Path | None) -> None:
    """Tell a file that is not there from one with findings."""
    file = settings_file(config)
    if file is None:
        return
    try:
        file_text(file)
    except ValueError:
        return  # a finding
    except OSError as error:
        raise ConfigError((f"{file}: cannot be read: {error.strerror}",)) from None


def _document(entry: Entry) -> dict[str, object]:
    return {
        "key": entry.key,
        "value": entry.plain,
        "origin": entry.origin,
        "settable": entry.settable,
    }


def _table(entries: Sequence[Entry]) -> str:
    """Lines of a settings file, with what cannot be set as comments."""
    settings = [
        f"{entry.key} = {entry.value}" if entry.settable else f"# {entry.key}: {entry.value}"
        for entry in entries
    ]
    width = min(max(len(setting) for setting in settings), 60)
    return "\n".join(
        f"{setting:<{width}}  # {entry.origin}"
        for setting, entry in zip(settings, entries, strict=True)
    )
