"""Single requests beside the load: probing, calibrating, reading metrics. Plain and blocking.

The load itself goes through ``player.py``. Proxies of the environment are not used, since the load
does not use them either.
"""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping

import msgspec

from sluice.executors.stream import Reply
from sluice.loadtest.trial import CannotMeasure
from sluice.loadtest.wire import Target, headers_of

_BODY_BYTES_MAX = 16 * 1024**2


def ask(
    target: Target, path: str, body: Mapping[str, object] | None = None, timeout_s: float = 10.0
) -> Reply:
    """``GET path``, or ``POST`` of a JSON body. Any status is a reply.

    Raises ``CannotMeasure`` where none comes.
    """
    scheme = "https" if target.tls else "http"
    request = urllib.request.Request(  # noqa: S310 - http and https only, by Target
        f"{scheme}://{target.netloc}{path}",
        data=None if body is None else msgspec.json.encode(body),
        headers={"content-type": "application/json", **dict(_split(headers_of(target)))},
    )
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=target.ssl_context()),
        _Unfollowed(),
    )
    where = f"{scheme}://{target.netloc}"
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return _reply(answer.status, answer.headers.items(), answer.read(_BODY_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            return _reply(error.code, error.headers.items(), error.read(_BODY_BYTES_MAX))
    except urllib.error.URLError as error:
        raise CannotMeasure(f"cannot reach {where}: {error.reason}") from None
    except TimeoutError:
        raise CannotMeasure(f"{where}{path} gave no answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CannotMeasure(f"{where}{path} gave no answer: {error}") from None


class _Unfollowed(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: the load would not follow it."""

    def redirect_request(self, *_arguments: object, **_options: object) -> None:
        return None


def _split(lines: list[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (line.partition(": ") for line in lines)]


def _reply(status: int, headers: Iterable[tuple[str, str]], body: bytes) -> Reply:
    return Reply(status, tuple((name.lower(), value) for name, value in headers), body)
