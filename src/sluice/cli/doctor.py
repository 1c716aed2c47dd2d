"""``sluice doctor``: why a latency percentile moved, from the journal.

Parses, makes one call and prints; what a diagnosis is, is in ``doctor/diagnosis``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import click

from sluice.cli.console import plain_console
from sluice.cli.doctor_page import write_page
from sluice.cli.doctor_report import document, print_diagnosis
from sluice.cli.doctor_watch import KEPT_S, Pulse, fetched, raising, tell, watch
from sluice.cli.options import BadInput, Finite, json_option, print_json, settings_options
from sluice.config.load import load_settings
from sluice.config.units import parse_duration_s
from sluice.doctor.alarm import Notice
from sluice.doctor.columns import Journal, NoRequests
from sluice.doctor.diagnosis import Diagnosis, Wanted, diagnose
from sluice.doctor.prometheus import range_path, samples_of
from sluice.doctor.reading import read_journal
from sluice.doctor.spike import METRICS
from sluice.doctor.tail import JournalTail
from sluice.doctor.windows import BadWindow, parse_window, whole
from sluice.runtime.clock import wall_ns

_EPILOG = """\b
Examples:
  sluice doctor
  sluice doctor /var/lib/sluice/journal --window 10m
  sluice doctor /var/lib/sluice/journal --window 2026-05-01T10:00:00Z..2026-05-01T10:20:00Z \\
      --baseline 2026-04-24T10:00:00Z..2026-04-24T10:20:00Z --json
  sluice doctor incident/ --window 600s..900s --metric tpot --html report.html
  sluice doctor incident/ --prometheus http://prometheus:9090
  sluice doctor --watch 30s --window 5m --event http://127.0.0.1:8000
  sluice doctor --watch 1m --webhook https://alerts.example/hook --json

\b
A window is START..END, each a duration since the first request (90s), one before the last (-5m) or
a time; or one duration, which means the last of it. Without --window the incident is looked for.

\b
--watch reads what is added to the journal and remembers the last hour. It tells when a spike
begins, when its cause turns out to be another one, and when it is over; between these, on standard
error, that it watches and what the last look saw. With --json all of it is a document in a line.

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
@click.option(
    "--prometheus",
    metavar="URL|FILE",
    help="Take the metrics of engines elsewhere from this Prometheus, or from an answer of its "
    "/api/v1/query_range in a file. Default: what the gateway recorded.",
)
@click.option("--watch", metavar="DURATION", help="Look again so often, and tell what is new.")
@click.option("--event", metavar="URL", help="With --watch: tell this server too, as an event.")
@click.option(
    "--key",
    envvar="SLUICE_ADMIN_KEY",
    show_envvar=True,
    help="Admin key of that server. Better in the variable than on the command line.",
)
@click.option("--webhook", metavar="URL", help="With --watch: also post it there as JSON.")
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
    if asked["watch"] is not None:
        _watch(folder, asked, as_json=as_json)
    if asked["event"] or asked["webhook"]:
        raise BadInput("--event and --webhook go with --watch, which raises what it finds")
    try:
        with _told() as told:
            told("reading the journal")
            journal = read_journal(folder, lambda count: told(f"{count:,} records read"))
            journal = _with_engines(journal, asked["prometheus"])
            told("looking for causes; likely ones are replayed without each")
            found = diagnose(journal, _wanted(asked, journal))
    except (NoRequests, BadWindow) as error:
        raise BadInput(str(error)) from None
    _write_page(asked["page"], found, journal)  # first, so that a failure is the only document
    if as_json:
        print_json(document(found))
    else:
        print_diagnosis(found, None if usual else folder)
    return 1 if found.spike.confirmed else 0


def _watch(folder: Path, asked: Mapping[str, Any], *, as_json: bool) -> Never:
    every_s, to = _every_s(asked["watch"]), raising(asked["event"], asked["webhook"], asked["key"])
    if asked["prometheus"] is not None:
        raise BadInput(
            "--watch goes by what the gateway records of engines; leave out --prometheus"
        )
    if asked["baseline"] is not None:
        raise BadInput("--watch compares with the hour before the window; leave out --baseline")
    if not folder.is_dir():
        raise BadInput(f"there is no journal folder {folder}")

    def told(found: Diagnosis, journal: Journal, notice: Notice) -> None:
        tell(found, notice, to, folder, as_json=as_json)
        _write_page(asked["page"], found, journal)

    tail, pulse = JournalTail(folder, KEPT_S, wall_ns), Pulse(as_json=as_json)
    pulse.began(folder, asked, to)
    try:
        watch(tail, lambda found: diagnose(found, _wanted(asked, found)), told, pulse, every_s)
    finally:
        tail.close()


def _with_engines(journal: Journal, source: str | None) -> Journal:
    if source is None:
        return journal
    window = whole(journal.requests)
    try:
        if source.startswith(("http://", "https://")):
            answer = fetched(source.rstrip("/") + range_path(window))
        else:
            answer = Path(source).read_bytes()
        return replace(journal, samples=samples_of(answer))
    except (OSError, ValueError) as error:
        raise BadInput(f"--prometheus {source}: {error}") from None


@contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being done, where that is a terminal."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update


def _write_page(page: Path | None, found: Diagnosis, journal: Journal) -> None:
    if page is not None:
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
