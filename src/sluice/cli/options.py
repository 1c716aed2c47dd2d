"""Options that several subcommands share, and what a wrong one ends with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sluice.config.sources import Override, parse_override

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def settings_options(function: F) -> F:
    """Add ``-c FILE`` and ``--set KEY=VALUE`` as the parameters ``config`` and ``overrides``."""
    function = click.option(
        "-c",
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Settings file (TOML). Default: the one that SLUICE_CONFIG names.",
    )(function)
    return click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        callback=_parse_overrides,
        help="Set one value, for example --set server.grace=10s. Beats file and environment.",
    )(function)


def print_json(document: object) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(document, indent=2, default=str))


def _parse_overrides(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[Override, ...]:
    try:
        return tuple(parse_override(text) for text in texts)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


class BadInput(click.ClickException):
    """Something that cannot be done as asked; exits with 2."""

    exit_code = 2
