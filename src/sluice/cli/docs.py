"""``sluice docs``: the collections of documents that the embedded retriever searches."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from sluice.cli.options import BadInput, json_option, print_json, settings_options
from sluice.config.load import load_settings
from sluice.config.pipeline_sections import is_collection
from sluice.config.sources import Override
from sluice.retrieval.documents import Unreadable, files_below, read_document
from sluice.retrieval.passages import Passage, RetrievalFailed
from sluice.retrieval.store import DocumentStore, collections_in

_EXAMPLES = """\b
Examples:
  sluice docs add handbook/ faq.md
  sluice docs list
  sluice docs search "how do I reset my password"
  sluice docs remove faq.md
"""
_ADD_EXAMPLES = """\b
Examples:
  sluice docs add handbook/ faq.md
  sluice docs add notes.txt --collection notes --json
"""
_LIST_EXAMPLES = """\b
Examples:
  sluice docs list
  sluice docs list --collection notes --json
"""
_REMOVE_EXAMPLES = """\b
Examples:
  sluice docs remove faq.md
  sluice docs remove --all --collection notes
"""
_SEARCH_EXAMPLES = """\b
Examples:
  sluice docs search "how do I reset my password"
  sluice docs search passwort --limit 3 --json
"""
# By hand nobody waits longer; a pipeline has its own, shorter limit.
_SEARCH_S_MAX = 30.0
_SHOWN_CHARS = 300

collection_option = click.option(
    "--collection",
    default="default",
    show_default=True,
    help="Collection of documents; a pipeline names the one that it searches.",
)


@click.group(epilog=_EXAMPLES)
def command() -> None:
    """Store, list, remove and search the documents that pipelines retrieve from."""


@command.command(epilog=_ADD_EXAMPLES, short_help="Store text files and folders of them.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@collection_option
@settings_options
@json_option
def add(
    *,
    paths: Sequence[Path],
    collection: str,
    config: Path | None,
    overrides: Sequence[Override],
    as_json: bool,
) -> None:
    """Store text files, and all those below folders, in place of earlier ones of the same path.

    Text, Markdown and HTML in UTF-8. A running server finds them at once. Exit code 1 where a file
    that was named itself holds no text; others below folders are passed over and told.
    """
    files = [(file, path) for path in paths for file in files_below(path)]
    added, unchanged, skipped, passages = 0, 0, dict[str, str](), 0
    with _failing(), _created(config, overrides, collection) as store:
        for file, _ in _shown(files):
            try:
                document = read_document(file)
            except Unreadable as error:
                skipped[_shown_name(file)] = str(error)
                continue
            except OSError as error:
                skipped[_shown_name(file)] = error.strerror or str(error)
                continue
            if store.add(document):
                added += 1
                passages += len(document.passages)
            else:
                unchanged += 1
    for name, reason in skipped.items():
        click.echo(f"skipped {name}: it {reason}", err=True)
    if as_json:
        print_json(
            {
                "collection": collection,
                "added": added,
                "unchanged": unchanged,
                "passages": passages,
                "skipped": skipped,
            }
        )
    else:
        click.echo(f"{added} documents stored in {passages} passages, {unchanged} were there")
    if any(file == path and _shown_name(file) in skipped for file, path in files):
        raise click.exceptions.Exit(1)


@command.command("list", epilog=_LIST_EXAMPLES)
@collection_option
@settings_options
@json_option
def show(
    *, collection: str, config: Path | None, overrides: Sequence[Override], as_json: bool
) -> None:
    """List the documents of a collection."""
    with _failing(), _opened(config, overrides, collection) as store:
        documents = store.documents()
    if as_json:
        print_json({"collection": collection, "documents": [asdict(one) for one in documents]})
        return
    for one in documents:
        click.echo(f"{one.id}  {one.passages} passages, {one.chars:,} characters  {one.title}")
    click.echo(f"{len(documents)} documents", err=True)


@command.command(epilog=_REMOVE_EXAMPLES, short_help="Remove documents by their ids.")
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--all", "everything", is_flag=True, help="All documents of the collection.")
@collection_option
@settings_options
@json_option
def remove(
    *,
    ids: Sequence[str],
    everything: bool,
    collection: str,
    config: Path | None,
    overrides: Sequence[Override],
    as_json: bool,
) -> None:
    """Remove documents by the ids that `sluice docs list` shows; exit code 1 where one is not
    there."""
    if bool(ids) == everything:
        raise BadInput("name the documents to remove, or say --all")
    with _failing(), _opened(config, overrides, collection) as store:
        wanted = [one.id for one in store.documents()] if everything else list(ids)
        removed = [one for one in wanted if store.remove(one)]
    missing = [one for one in wanted if one not in removed]
    if as_json:
        print_json({"collection": collection, "removed": removed, "missing": missing})
    else:
        click.echo(f"{len(removed)} documents removed")
    for one in missing:
        click.echo(f"there is no {one} in {collection}", err=True)
    if missing:
        raise click.exceptions.Exit(1)


@command.command(epilog=_SEARCH_EXAMPLES, short_help="Show what a pipeline would find.")
@click.argument("question")
@click.option(
    "--limit", type=click.IntRange(1, 100), default=6, show_default=True, help="Most passages."
)
@collection_option
@settings_options
@json_option
def search(
    *,
    question: str,
    limit: int,
    collection: str,
    config: Path | None,
    overrides: Sequence[Override],
    as_json: bool,
) -> None:
    """Show what a pipeline would find for a question, best first; exit code 1 for nothing."""
    with _failing(), _opened(config, overrides, collection) as store:
        found = store.search(question, limit, _SEARCH_S_MAX)
    if as_json:
        print_json({"collection": collection, "passages": [_document(one) for one in found]})
    else:
        for one in found:
            text = " ".join(one.text.split())
            more = "…" if len(text) > _SHOWN_CHARS else ""
            click.echo(f"{one.id}  {one.score:.3g}  {one.title}\n  {text[:_SHOWN_CHARS]}{more}")
    if not found:
        click.echo("nothing was found", err=True)
        raise click.exceptions.Exit(1)


def _document(one: Passage) -> dict[str, object]:
    return {"id": one.id, **asdict(one)}


@contextmanager
def _opened(
    config: Path | None, overrides: Sequence[Override], collection: str
) -> Iterator[DocumentStore]:
    folder = _folder(config, overrides, collection)
    known = collections_in(folder)
    if collection not in known:
        told = ", ".join(known) or "none; make one with sluice docs add"
        raise BadInput(f"there is no collection {collection}; there are: {told}")
    store = DocumentStore.open(folder, collection)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _created(
    config: Path | None, overrides: Sequence[Override], collection: str
) -> Iterator[DocumentStore]:
    store = DocumentStore.create(_folder(config, overrides, collection), collection)
    try:
        yield store
    finally:
        store.close()


def _folder(config: Path | None, overrides: Sequence[Override], collection: str) -> Path:
    if not is_collection(collection):
        raise BadInput(
            "a collection is named by up to 128 letters, digits and any of ._-, no dot first, not "
            f"{collection[:40]!r}"
        )
    return load_settings(config, overrides, secrets=False).settings.documents.dir


def _shown_name(file: Path) -> str:
    """The name of a file, which may hold bytes that are no text."""
    return os.fsencode(file).decode("utf-8", "backslashreplace")


def _shown(files: list[tuple[Path, Path]]) -> Iterator[tuple[Path, Path]]:
    """The files, with a bar on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield from files
        return
    with click.progressbar(files, label="storing", file=sys.stderr) as bar:
        yield from bar


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except RetrievalFailed as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise BadInput(f"the collection cannot be used: {error.strerror or error}") from error
