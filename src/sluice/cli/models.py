"""``sluice models``: what there is, what is on this disk, fetching and removing."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from sluice.catalog.catalogue import Catalogue, Listed
from sluice.cli.options import json_option, load, print_json, settings_options
from sluice.cli.progress import download_progress
from sluice.config.sources import Override

_EXAMPLES = """\b
Examples:
  sluice models list
  sluice models pull smollm2-135m-instruct
  sluice models pull hf:ORG/REPO/FILE.gguf
  sluice models rm smollm2-135m-instruct
"""


@click.group(epilog=_EXAMPLES)
def command() -> None:
    """List, fetch and remove models."""


@command.command("list")
@settings_options
@json_option
def list_models(config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """List the models that have a name here, and the fetched ones."""
    catalogue = Catalogue(load(config, overrides).settings.catalogue)
    entries = catalogue.listing()
    if as_json:
        print_json([asdict(entry) for entry in entries])
    else:
        click.echo(_table(entries))


@command.command()
@click.argument("model")
@settings_options
@json_option
def pull(model: str, config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """Fetch MODEL, a catalogue name or hf:ORG/REPO/FILE.gguf, unless it is there; print its
    path."""
    catalogue = Catalogue(load(config, overrides).settings.catalogue)
    with download_progress(model) as progress:
        found = catalogue.fetch(model, progress)
    if as_json:
        print_json({"source": model, **asdict(found)})
    else:
        click.echo(found.path)


@command.command("rm")
@click.argument("model")
@settings_options
@json_option
def remove(model: str, config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """Delete what was fetched for MODEL."""
    catalogue = Catalogue(load(config, overrides).settings.catalogue)
    freed_bytes = catalogue.remove(model)
    if as_json:
        print_json({"source": model, "freed_bytes": freed_bytes})
    else:
        click.echo(f"{_megabytes(freed_bytes)} freed" if freed_bytes else "nothing to remove")


def _table(entries: Sequence[Listed]) -> str:
    rows = [("MODEL", "SIZE", "LICENCE", "HERE", "")]
    rows += [
        (entry.source, _megabytes(entry.size_bytes), entry.licence, _here(entry), entry.summary)
        for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _here(entry: Listed) -> str:
    if entry.path is not None:
        return "yes"
    return f"{_megabytes(entry.partial_bytes)} of it" if entry.partial_bytes else "no"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
