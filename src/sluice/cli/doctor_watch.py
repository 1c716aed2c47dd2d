"""``sluice doctor --watch``: looks at a growing journal again and again and raises what it finds.

What is new is decided in ``doctor/alarm``. Each finding is printed; where it is asked for, it is
also an event of a server (``POST /admin/events``: then it is in its journal and on its dashboard)
and a JSON document for a webhook. Where these do not answer it is told on standard error, and
watching goes on. ``Pulse`` says between findings that it does.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Never
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import click

from sluice.cli.console import plain_console
from sluice.cli.doctor_report import document, headline, print_diagnosis
from sluice.cli.options import BadInput
from sluice.doctor.alarm import Alarm, Notice
from sluice.doctor.columns import Journal
from sluice.doctor.diagnosis import Diagnosis
from sluice.doctor.spike import METRICS
from sluice.doctor.tail import JournalTail
from sluice.doctor.windows import BadWindow, time_of
from sluice.runtime.clock import wall_ns

# How much of a journal is remembered: what comes before the window is the baseline.
KEPT_S = 3600.0
_ANSWER_S_MAX = 5.0
_FETCH_S_MAX, _FETCH_BYTES_MAX = 30.0, 256 * 1024**2
_DETAIL_CHARS_MAX = 256  # of the values that /admin/events takes


@dataclass(frozen=True, slots=True)
class Raising:
    """Where findings go beside the terminal: addresses of a server and of a webhook, or ``""``.

    ``key`` is the admin key of the server.
    """

    server: str = ""
    webhook: str = ""
    key: str = ""


def raising(server: str | None, webhook: str | None, key: str | None) -> Raising:
    """The same with checked addresses. Raises ``BadInput``."""
    for name, url in (("--event", server), ("--webhook", webhook)):
        if url is not None and urlsplit(url).scheme not in {"http", "https"}:
            raise BadInput(f"{name} takes an address such as http://127.0.0.1:8000, not {url}")
    return Raising(server or "", webhook or "", key or "")


class Pulse:
    """Says that it is watched, and after each look what was seen.

    On a terminal the last look has a line that the next one writes over; elsewhere a look is told
    where it sees something else than the one before. With ``as_json`` each look is a document in a
    line of standard output.
    """

    def __init__(self, *, as_json: bool, clock_ns: Callable[[], int] = wall_ns) -> None:
        self._as_json, self._clock_ns = as_json, clock_ns
        self._console = plain_console(stderr=True)
        self._told = ""

    def began(self, folder: Path, asked: Mapping[str, Any], to: Raising) -> None:
        """Say what is watched, how often and where findings go; ``asked`` are the options."""
        metrics = METRICS if asked["metric"] is None else (asked["metric"],)
        goes_to = [_host(url) for url in (to.server, to.webhook) if url]
        if self._as_json:
            watched = {
                "journal": str(folder), "every": asked["watch"], "window": asked["window"],
                "kept_s": KEPT_S, "metrics": metrics, "percentile": asked["percentile"],
                "raised_to": goes_to,
            }  # fmt: skip
            _print_line("doctor.watching", watched)
            return
        where = f"in {asked['window']}" if asked["window"] else "from where latencies change on"
        also = f"; findings go to {' and '.join(goes_to)} too" if goes_to else ""
        click.echo(
            f"watching {folder} every {asked['watch']}: p{asked['percentile']:g} of "
            f"{', '.join(metrics)} {where}, against what came before in the last hour{also}",
            err=True,
        )

    def looked(self, requests: int, found: Diagnosis | None, why: str = "") -> None:
        """Say what a look saw: ``requests`` are remembered; without a diagnosis there is a why."""
        if self._as_json:
            spike = None if found is None else document(found)["spike"]
            at = time_of(self._clock_ns())
            seen = {"at": at, "requests": requests, "spike": spike, "why": why or None}
            _print_line("doctor.look", seen)
            return
        said = why if found is None else headline(found)
        if self._console.is_terminal:
            line = f"{time_of(self._clock_ns())[11:19]} UTC  {requests:,} requests; {said}"
            self._write_over(line[: self._console.width - 1])
            return
        kind = "spike" if found is not None and found.spike.confirmed else said.partition(":")[0]
        if kind not in {"spike", self._told}:  # a spike is told as a finding
            click.echo(f"{requests:,} requests; {said}", err=True)
        self._told = kind

    def clear(self) -> None:
        """Make place for a finding."""
        if self._console.is_terminal and not self._as_json:
            self._write_over("")

    def _write_over(self, line: str) -> None:
        self._console.file.write(f"\r\x1b[2K{line}")
        self._console.file.flush()


def watch(
    tail: JournalTail,
    diagnosed: Callable[[Journal], Diagnosis],
    told: Callable[[Diagnosis, Journal, Notice], None],
    pulse: Pulse,
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Never:
    """Look for ever; ``sleep`` may raise to end it."""
    alarm = Alarm()
    while True:
        journal = tail.look()
        if journal is None:
            pulse.looked(0, None, "no request is in the journal yet")
        else:
            try:
                found = diagnosed(journal)
            except BadWindow as error:  # not so much has been recorded yet
                pulse.looked(len(journal.requests), None, f"nothing to compare yet: {error}")
            else:
                notice = alarm.heard(found)
                if notice is not None:
                    pulse.clear()
                    told(found, journal, notice)
                pulse.looked(len(journal.requests), found)
        sleep(every_s)


def tell(
    found: Diagnosis, notice: Notice, to: Raising, folder: Path | None = None, *, as_json: bool
) -> None:
    """Print a finding of the journal in ``folder``, and raise it where that is asked for."""
    plain = document(found)
    if as_json:
        _print_line(notice.what.value, plain)
    else:
        click.echo(f"{notice.what}:")
        print_diagnosis(found, folder)
    if to.server:
        details = {name: text[:_DETAIL_CHARS_MAX] for name, text in notice.details.items()}
        event = {"what": notice.what.value, "details": details}
        headers = {"authorization": f"Bearer {to.key}"} if to.key else {}
        _post(f"{to.server.rstrip('/')}/admin/events", event, headers)
    if to.webhook:
        _post(to.webhook, {"event": notice.what.value} | plain | {"details": notice.details}, {})


def _print_line(event: str, plain: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"event": event, **plain}, default=str))


def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    request = Request(  # noqa: S310 - http and https only, by ``raising``
        url,
        json.dumps(body, default=str).encode(),
        {"content-type": "application/json", **headers},
    )
    try:
        with urlopen(request, timeout=_ANSWER_S_MAX):  # noqa: S310 - as above
            pass
    except (URLError, HTTPException, OSError) as error:
        click.echo(f"{_host(url)} did not take the event: {error}", err=True)


def _host(url: str) -> str:
    """An address without what may be secret in it: paths and users of webhooks are."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def fetched(url: str) -> bytes:
    """What is there. Raises ``OSError`` and ``ValueError``, with words."""
    try:
        with urlopen(url, timeout=_FETCH_S_MAX) as answer:  # noqa: S310 - of http or https
            found: bytes = answer.read(_FETCH_BYTES_MAX)
    except HTTPError as error:
        with error:
            return error.read(_FETCH_BYTES_MAX)  # Prometheus says in the body what is wrong
    except HTTPException as error:
        raise OSError(f"it gave no answer: {error}") from error
    return found
