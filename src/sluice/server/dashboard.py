"""The dashboard: a page of our own files, and the JSON that it draws.

The files hold nothing of this server, so everyone may fetch them; who may see the JSON is decided
in ``auth``. The page loads nothing from any other place, and is told so by its headers.
"""

from functools import cache
from pathlib import Path
from urllib.parse import parse_qs

from sluice.core.errors import InvalidRequest, ModelNotFound
from sluice.server.exchange import Exchange
from sluice.server.ports import Gateway, Overview
from sluice.server.problems import unknown_path
from sluice.server.stamp import Stamp

_FILES = Path(__file__).with_name("pages")
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
_FRESH = [(b"cache-control", b"no-store")]
_WINDOW_S_DEFAULT, _WINDOW_S_MAX = 900.0, 3600.0


async def page(exchange: Exchange, _gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /dashboard``: the page."""
    await _send(exchange, "dashboard.html")


async def style(exchange: Exchange, _gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /dashboard/style.css``."""
    await _send(exchange, "dashboard.css")


async def script(exchange: Exchange, _gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /dashboard/app.js``."""
    await _send(exchange, "dashboard.js")


async def charts(exchange: Exchange, _gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /dashboard/charts.js``."""
    await _send(exchange, "charts.js")


async def document(overview: Overview, exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /dashboard/data``: what is drawn. ``model`` names one, ``since`` is the time of the
    latest sample that the caller has, ``window`` the seconds that lists are of."""
    asked = _query(exchange)
    model = asked.get("model", "")
    if model and model not in {card.id for card in gateway.models()}:
        raise ModelNotFound("No model of that name is served; see /v1/models.", param="model")
    since_s = _number(asked, "since", 0.0, 1e12)
    window_s = _number(asked, "window", _WINDOW_S_DEFAULT, _WINDOW_S_MAX)
    await exchange.reply(200, overview.document(model, since_s, window_s), _FRESH)


async def request(overview: Overview, exchange: Exchange, _gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /dashboard/request?id=ID``: the life of one of the requests in the document."""
    request_id = _query(exchange).get("id", "")
    found = overview.request(request_id)
    if found is None:
        words = "This request is not among those remembered; ask `sluice trace` with its id."
        await exchange.refuse(unknown_path(words))
        return
    await exchange.reply(200, found, _FRESH)


def _query(exchange: Exchange) -> dict[str, str]:
    raw = exchange.scope.get("query_string", b"")
    try:
        found = parse_qs(raw.decode("ascii"), max_num_fields=10)
    except ValueError:
        raise InvalidRequest("The query of this address cannot be read.") from None
    return {name: values[-1] for name, values in found.items()}


def _number(asked: dict[str, str], name: str, default: float, most: float) -> float:
    try:
        value = float(asked.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise InvalidRequest(f"{name} must be a number from 0 to {most:g}.", param=name)
    return value


async def _send(exchange: Exchange, name: str) -> None:
    kind = name.rpartition(".")[2]
    await exchange.reply(200, _content(name), _SECURITY, _TYPES[kind])


@cache
def _content(name: str) -> bytes:
    return (_FILES / name).read_bytes()
