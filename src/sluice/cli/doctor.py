"""``sluice doctor``: why a latency percentile moved, from the journal.

Parses, makes one call and prints; what a diagnosis is, is in ``doctor/diagnosis``.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from sluice.cli.console import plain_console
from sluice.cli.doctor_page import write_page
from sluice.cli.doctor_report import document, print_diagnosis
from sluice.cli.options import BadInput, Finite, json_option, print_json, settings_options
from sluice.config.load import load_settings
from sluice.config.units import parse_duration_s
from sluice.doctor.columns import Journal, NoRequests, read_journal
from sluice.doctor.diagnosis import Diagnosis, Wanted, diagnose
from sluice.doctor.spike import METRICS
from sluice.doctor.windows import BadWindow, parse_window, whole

_EPILOG = """\b
Examples:
  sluice doctor
  sluice doctor /var/lib/sluice/journal --window 10m
  sluice doctor /var/lib/sluice/journal --window 2026-05-01T10:00:00Z..2026-05-01T10:20:00Z \\
      --baseline 2026-04-24T10:00:00Z..2026-04-24T10:20:00Z --json
  sluice doctor incident/ --window 600s..900s --metric tpot --html report.html
  sluice doctor --watch 30s --window 5m

\b
A window is START..END, each a duration since the first request (90s), one before the last (-5m) or
a time; or one duration, which means the last of it. Without --window the incident is looked for.

\b
Exit codes: 0 nothing moved, 1 a spike was found, 2 bad input.
"""


@click.command(epilog=_EPILOG)
@click.argument("folder", metavar="[JOURNAL]", type=click.Path(path_type=Path), required=False)
@click.option(
    "--window",
    metavar="START..END",
    help="The incident, as 90s..5m since the first request, 5m for the last five minutes, or "
    "times. Default: where latencies change.",
)
@click.option(
    "--baseline",
    metavar="START..END",
    help="What to compare with. Default: what came before the window.",
)
@click.option(
    "--metric",
    type=click.Choice(METRICS),
    help="Default: the one of these that moved most.",
)
@click.option(
    "--percentile",
    type=Finite(50.0, 99.9),
    default=99.0,
    show_default=True,
    help="Of the metric.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Decides what is drawn.",
)
@click.option(
    "--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page too."
)
@click.option("--watch", metavar="DURATION", help="Look again so often, and tell what is found.")
@settings_options
@json_option
def command(*, folder: Path | None, as_json: bool, **asked: Any) -> int:
    """Say why p99 moved: ranked causes with their shares and evidence, or what signal is missing.

    JOURNAL is a journal folder. Default: the one in the settings.
    """
    usual = folder is None and asked["config"] is None and not asked["overrides"]
    if folder is None:
        settings = load_settings(asked["config"], asked["overrides"], secrets=False).settings
        folder = settings.journal.dir
    every_s = None if asked["watch"] is None else _every_s(asked["watch"])
    while True:
        try:
            found, journal = _looked(folder, asked)
        except BadWindow as error:
            raise BadInput(str(error)) from None
        except NoRequests as error:
            if every_s is None:
                raise BadInput(str(error)) from None
            click.echo(f"sluice: {error}; looking again", err=True)
        else:
            if every_s is None or found.spike.confirmed:
                if asked["page"] is not None:  # first: with --json a failure is the only document
                    _write(asked["page"], found, journal)
                if as_json:
                    print_json(document(found))
                else:
                    print_diagnosis(found, None if usual else folder)
            if every_s is None:
                return 1 if found.spike.confirmed else 0
        time.sleep(every_s)


def _looked(folder: Path, asked: Mapping[str, Any]) -> tuple[Diagnosis, Journal]:
    """One look at the journal. Raises ``NoRequests`` and ``BadWindow``."""
    with _told() as told:
        told("reading the journal")
        journal = read_journal(folder, lambda count: told(f"{count:,} records read"))
        told("looking for causes; likely ones are replayed without each")
        return diagnose(journal, _wanted(asked, journal)), journal


@contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being done, where that is a terminal."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update


def _write(page: Path, found: Diagnosis, journal: Journal) -> None:
    try:
        write_page(page, found, journal)
    except OSError as error:
        raise BadInput(f"cannot write {page}: {error.strerror or error}") from None


def _wanted(asked: Mapping[str, Any], journal: Journal) -> Wanted:
    all_of_it = whole(journal.requests)
    window, baseline = asked["window"], asked["baseline"]
    return Wanted(
        asked["metric"],
        asked["percentile"],
        None if window is None else parse_window(window, all_of_it),
        None if baseline is None else parse_window(baseline, all_of_it),
        asked["seed"],
    )


def _every_s(text: str) -> float:
    try:
        every_s = parse_duration_s(text)
    except ValueError as error:
        raise BadInput(f"--watch: {error}") from None
    if every_s < 1.0:
        raise BadInput(f"--watch must be at least 1s, not {text}")
    return every_s
