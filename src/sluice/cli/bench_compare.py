"""``sluice bench compare``: results of earlier runs beside each other.

Reads files and prints; the statistics are in ``loadtest/compare.py``.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from sluice.cli.console import plain_console
from sluice.cli.options import BadInput, json_option, print_json
from sluice.loadtest.compare import Change, Verdict, changes

_EPILOG = """\b
Examples:
  sluice bench http://127.0.0.1:8000 --rate 4,8 --ttft 1s --seed 1 --out before.json
  sluice bench http://127.0.0.1:8000 --rate 4,8 --ttft 1s --seed 1 --out after.json
  sluice bench compare before.json after.json
  sluice bench compare before.json after.json other.json --json

\b
Exit codes: 0 nothing became worse beyond its interval, 1 something did, 2 bad input or nothing that
both results measured.
"""


@dataclass(frozen=True, slots=True)
class _Compared:
    """Two files and what changed between them."""

    before: str
    after: str
    changes: Sequence[Change]


@click.command("compare", epilog=_EPILOG)
@click.argument("before", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("after", type=click.Path(path_type=Path, dir_okay=False), nargs=-1, required=True)
@json_option
def compare(*, before: Path, after: tuple[Path, ...], as_json: bool) -> None:
    """Compare results that --out wrote with the first of them.

    Trials of the same load are paired part by part in time, so give both runs the same --seed;
    searches are compared by their intervals. All intervals of a pair hold together with 95 %.
    """
    first = _read(before)
    found: list[_Compared] = []
    for path in after:
        try:
            rows = changes(first, _read(path))
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise BadInput(f"{before} or {path} is no result of sluice bench: {error}") from None
        if not rows:
            raise BadInput(
                f"{before} and {path} have no valid trials of the same load and no estimates in "
                f"common; run both with the same --rate or --concurrency, for 10s or more"
            )
        found.append(_Compared(str(before), str(path), rows))
    worse = any(row.verdict is Verdict.WORSE for one in found for row in one.changes)
    if as_json:
        print_json({"worse": worse, "compared": [asdict(one) for one in found]})
    else:
        _print(found)
    click.get_current_context().exit(1 if worse else 0)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is no JSON document of sluice bench: {error}") from None


def _words_of(row: Change) -> tuple[str, str, str, str]:
    """Before, after, the change between them, and its interval."""
    before, after = (
        f"{'at least ' if at_least else ''}{value:.4g}"
        for value, at_least in ((row.before, row.before_at_least), (row.after, row.after_at_least))
    )
    if row.low is not None and row.high is not None:
        interval = f"{row.low:+.1%} to {row.high:+.1%}"
    elif row.low is None and row.high is None:
        interval = "not known"
    else:
        interval = f"above {row.low:+.1%}" if row.high is None else f"below {row.high:+.1%}"
    return before, after, "" if row.change is None else f"{row.change:+.1%}", interval


def _print(found: Sequence[_Compared]) -> None:
    console = plain_console()
    for one in found:
        table = Table("load", "measure", "before", "after", "change", "interval", "")
        for row in one.changes:
            table.add_row(row.load, row.measure, *_words_of(row), row.verdict.value)
        console.print(f"{one.before} and {one.after}")
        console.print(table)
