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
from sluice.runtime.prepare import prepared_bytes, remove_prepared

_EXAMPLES = """\b
Examples:
  sluice models list
  sluice models pull smollm2-135m-instruct
  sluice models pull hf:ORG/REPO/FILE.gguf
  sluice models rm smollm2-135m-instruct
"""
_LIST_EXAMPLES = """\b
Examples:
  sluice models list
  sluice models list --json
"""
_PULL_EXAMPLES = """\b
Examples:
  sluice models pull smollm2-135m-instruct
  sluice models pull hf:ORG/REPO/FILE.gguf
"""
_REMOVE_EXAMPLES = """\b
Examples:
  sluice models rm smollm2-135m-instruct
  sluice models rm hf:ORG/REPO/FILE.gguf --force
"""


@click.group(epilog=_EXAMPLES)
def command() -> None:
    """List, fetch and remove models."""


@command.command("list", epilog=_LIST_EXAMPLES, short_help="List models by name.")
@settings_options
@json_option
def list_models(config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """List the models that have a name here, and the fetched ones."""
    section = load_settings(config, overrides).settings.catalogue
    entries = Catalogue(section).listing()
    prepared = prepared_bytes(section.prepared_dir)
    if as_json:
        models = [asdict(entry) for entry in entries]
        print_json({"models": models, "prepared_bytes": prepared, "cache": section.cache_dir})
    else:
        click.echo(_table(entries))
        click.echo(
            f"\n{_megabytes(prepared)} more are taken by models in the form that the engine loads, "
            f"in {section.prepared_dir}"
        )


@command.command(epilog=_PULL_EXAMPLES, short_help="Fetch a model and print its path.")
@click.argument("model")
@settings_options
@json_option
def pull(model: str, config: Path | None, overrides: Sequence[Override], as_json: bool) -> None:
    """Fetch MODEL, a catalogue name or hf:ORG/REPO/FILE.gguf, unless it is there; print its
    path."""
    catalogue = Catalogue(load_settings(config, overrides).settings.catalogue)
    found = catalogue.locate(model)
    if found is not None:
        click.echo(f"{model} is here already", err=True)
    with PreparationProgress() as progress:
        found = catalogue.fetch(model, partial(progress.update, f"fetching {model}"))
    if as_json:
        print_json({"source": model, **asdict(found)})
    else:
        click.echo(found.path)


@command.command("rm", epilog=_REMOVE_EXAMPLES, short_help="Delete what was fetched for a model.")
@click.argument("model")
@click.option("--force", is_flag=True, help="Delete it although a server uses it.")
@settings_options
@json_option
def remove(
    *,
    model: str,
    force: bool,
    config: Path | None,
    overrides: Sequence[Override],
    as_json: bool,
) -> None:
    """Delete what was fetched for MODEL, and what was converted from it; exit code 1 where a
    server uses it."""
    section = load_settings(config, overrides).settings.catalogue
    catalogue = Catalogue(section)
    found = catalogue.locate(model)
    # Fetched models only: `remove` refuses a path, and nothing may be deleted before that.
    freed_bytes = 0
    if found is not None and found.path.is_relative_to(section.downloads_dir):
        freed = remove_prepared(found.path, section.prepared_dir, force=force)
        if freed is None:
            raise click.ClickException(
                f"{model} is being used by a server or converted for one, so nothing was deleted; "
                "stop it, or say --force"
            )
        freed_bytes += freed
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
