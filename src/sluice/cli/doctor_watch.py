"""``sluice doctor --watch``: looks at a growing journal again and again and raises what it finds.

What is new is decided in ``doctor/alarm``. Each finding is printed; where it is asked for, it is
also an event of a server (``POST /admin/events``: then it is in its journal and on its dashboard)
and a JSON document for a webhook. Where these do not answer it is told on standard error, and
watching goes on.
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

from sluice.cli.doctor_report import document, print_diagnosis
from sluice.cli.options import BadInput
from sluice.doctor.alarm import Alarm, Notice
from sluice.doctor.columns import Journal
from sluice.doctor.diagnosis import Diagnosis
from sluice.doctor.tail import JournalTail
from sluice.doctor.windows import BadWindow

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


def watch(
    tail: JournalTail,
    diagnosed: Callable[[Journal], Diagnosis],
    told: Callable[[Diagnosis, Journal, Notice], None],
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Never:
    """Look for ever; ``sleep`` may raise to end it."""
    alarm = Alarm()
    while True:
        journal = tail.look()
        if journal is not None:
            try:
                found = diagnosed(journal)
            except BadWindow as error:  # not so much has been recorded yet
                click.echo(f"nothing to compare yet: {error}", err=True)
            else:
                notice = alarm.heard(found)
                if notice is not None:
                    told(found, journal, notice)
        sleep(every_s)


def tell(
    found: Diagnosis, notice: Notice, to: Raising, folder: Path | None = None, *, as_json: bool
) -> None:
    """Print a finding of the journal in ``folder``, and raise it where that is asked for."""
    plain = {"event": notice.what.value} | document(found)
    if as_json:
        click.echo(json.dumps(plain, default=str))  # one line each
    else:
        click.echo(f"{notice.what}:")
        print_diagnosis(found, folder)
    if to.server:
        details = {name: text[:_DETAIL_CHARS_MAX] for name, text in notice.details.items()}
        event = {"what": notice.what.value, "details": details}
        headers = {"authorization": f"Bearer {to.key}"} if to.key else {}
        _post(f"{to.server.rstrip('/')}/admin/events", event, headers)
    if to.webhook:
        _post(to.webhook, plain | {"details": notice.details}, {})


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
        click.echo(f"{url} did not take the event: {error}", err=True)


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
