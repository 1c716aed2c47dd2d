"""``sluice top``: a running server in the terminal, from the numbers of its dashboard.

Asking and looping only; what is shown is made in ``top_view``.
"""

import json
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sluice.cli.console import plain_console
from sluice.cli.options import BadInput, json_option, print_json
from sluice.cli.top_view import view

_WINDOW_S = 300.0
_ANSWER_S_MAX = 5.0
_PIPE_WIDTH = 140
_DOCUMENT_BYTES_MAX = 64 << 20
_NEEDED = {"version", "model", "now_s", "interval_s", "classes", "samples", "replicas", "slowest"}

_EXAMPLES = """\b
Examples:
  sluice top
  sluice top http://gpu-1:8000 --model llama
  sluice top --once
  sluice top --json | jq .replicas
"""


@click.command(epilog=_EXAMPLES)
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--model", default="", help="Show this model alone.")
@click.option(
    "--key",
    envvar="SLUICE_ADMIN_KEY",
    show_envvar=True,
    help="Admin key, where the server has keys. Better in the variable than on the command line.",
)
@click.option("--once", is_flag=True, help="Show it once and leave.")
@json_option
def command(url: str, model: str, key: str | None, once: bool, as_json: bool) -> None:
    """Watch the server at URL (default http://127.0.0.1:8000): goodput, latency against targets,
    queues, replicas, refusals, and the slowest requests. Ctrl-C leaves."""
    asked = Asked(url, model, key)
    document = asked.document(0.0)
    if as_json:
        print_json(document)
        return
    console = plain_console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if once or not sys.stdout.isatty():
        console.print(view(document, _recent(document, document["samples"]), console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for shown in _always(asked, document, console):
            live.update(shown, refresh=True)


class Asked:
    """One server's dashboard document. Raises ``BadInput`` for what asking again cannot mend."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        self.base = (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise BadInput(f"{url} is no address of a server; write http://HOST:PORT")
        self._model = model
        self._key = key

    def document(self, since_s: float) -> dict[str, Any]:
        """What the server tells; samples after a time (Unix). Raises ``BadInput``."""
        query = f"model={quote(self._model)}&since={since_s}&window={_WINDOW_S:g}"
        try:
            request = Request(f"{self.base}/dashboard/data?{query}")  # noqa: S310
            if self._key:
                # Not for whom an answer may point to.
                request.add_unredirected_header("authorization", f"Bearer {self._key}")
            with urlopen(request, timeout=_ANSWER_S_MAX) as answer:  # noqa: S310
                document = json.loads(answer.read(_DOCUMENT_BYTES_MAX))
        except HTTPError as error:
            raise BadInput(_refused(error)) from None
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            raise BadInput(f"no sluice server answers at {self.base}: {reason}") from None
        if not isinstance(document, dict) or not document.keys() >= _NEEDED:
            raise BadInput(f"no sluice server answers at {self.base}: what comes is no dashboard")
        return document


def _always(asked: Asked, document: dict[str, Any], console: Console) -> Iterator[Any]:
    """Screens, one for each new sample; a server that is away is said to be and asked again."""
    samples: list[dict[str, Any]] = []
    while True:
        if samples and document["now_s"] < samples[-1]["t_s"]:
            samples = []  # the server was started again
        samples = _recent(document, [*samples, *document["samples"]])
        yield view(document, samples, console.width)
        time.sleep(document["interval_s"])
        while True:
            try:
                document = asked.document(samples[-1]["t_s"] if samples else 0.0)
                break
            except BadInput as error:
                yield Text(f"{error.message}; asking again", style="red")
                time.sleep(1.0)


def _recent(document: dict[str, Any], samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in samples if one["t_s"] > document["now_s"] - _WINDOW_S]


def _refused(error: HTTPError) -> str:
    try:
        told = json.loads(error.read(_DOCUMENT_BYTES_MAX))["error"]["message"]
    except (ValueError, LookupError, TypeError, OSError, HTTPException, RecursionError):
        told = f"the server answers {error.code}"
    if error.code in {401, 403}:
        return f"{told} Put the admin key into $SLUICE_ADMIN_KEY."
    if error.code == 404 and "model" not in str(told).lower():
        return f"{told} Is this a sluice server?"
    return str(told)
