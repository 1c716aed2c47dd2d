"""Options that several subcommands share, and what a wrong one ends with."""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click

from sluice.config.sources import Override, parse_override

_WHOLE_MAX = 10**15

F = TypeVar("F", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A number between bounds, which neither "nan" nor "inf" is."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number. Fails as click's own types do."""
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


class _Whole(click.ParamType[int]):
    """A whole number that arithmetic with fractions can take, too."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number. Fails as click's own types do."""
        number: int = click.INT.convert(value, param, ctx)
        if abs(number) > _WHOLE_MAX:
            self.fail(f"{str(value)[:40]}… is beyond {_WHOLE_MAX:g}.", param, ctx)
        return number


WHOLE = _Whole()
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
    click.echo(json_text(document))


def json_text(document: object) -> str:
    """The document as JSON, which has no "nan" and no "inf": they are null."""
    return json.dumps(_finite(document), indent=2, default=str, allow_nan=False)


def _finite(value: object) -> object:
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case _:
            return value


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
