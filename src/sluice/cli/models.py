"""``sluice models``: what there is, what is on this disk, fetching and removing."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from sluice.catalog.catalogue import Catalogue, Listed
from sluice.cli.options import json_option, print_json, settings_options
from sluice.cli.progress import PreparationProgress
from sluice.config.load import load_settings
from sluice.config.sources import Override
from sluice.runtime.prepare import remove_prepared

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
    catalogue = Catalogue(load_settings(config, overrides).settings.catalogue)
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
    catalogue = Catalogue(load_settings(config, overrides).settings.catalogue)
    with PreparationProgress() as progress:
        found = catalogue.fetch(model, partial(progress.update, f"fetching {model}"))
    if as_json:
        print_json({"source": model, **asdict(found)})
    else:
        click.echo(found.path)


@command.command("rm")
@click.argument("model")
@settings_options
@json_option
def remove(model: str, config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """Delete what was fetched for MODEL, and what was converted from it."""
    section = load_settings(config, overrides).settings.catalogue
    catalogue = Catalogue(section)
    found = catalogue.locate(model)
    # Fetched models only: `remove` refuses a path, and nothing may be deleted before that.
    freed_bytes = 0
    if found is not None and found.path.is_relative_to(section.downloads_dir):
        freed_bytes += remove_prepared(found.path, section.prepared_dir)
    freed_bytes += catalogue.remove(model)
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
