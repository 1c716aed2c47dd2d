"""Addresses behind a name that many engines share, while engines come and go.

A remote model with ``urls = ["dns+http://NAME:PORT"]`` has one replica for each address that the
name resolves to, as the headless Service of a Kubernetes Deployment gives them. A look-up that
fails, or finds nothing, changes nothing: whether the engines that were known still answer is seen
by looking at them. Called by ``gateway`` and ``operations``; look-ups block and belong in a thread.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from sluice.config.sections import UpstreamUrl
from sluice.config.settings import Settings

_log = logging.getLogger(__name__)

PREFIX = "dns+"
# Between two look-ups of all names.
LOOK_S = 5.0


def look_up(host: str, port: int) -> tuple[str, ...]:
    """The addresses of a name, in order. Raises ``OSError`` where it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(sorted({str(address[0]) for *_, address in found}))


class Addresses:
    """What names resolved to when they were last looked up."""

    def __init__(self, look: Callable[[str, int], tuple[str, ...]] = look_up) -> None:
        self._look = look
        self._known: dict[str, tuple[str, ...]] = {}

    def look(self, settings: Settings) -> bool:
        """Look all names up again; says whether any has other addresses now."""
        before = dict(self._known)
        for one in _names(settings):
            parts = urlsplit(one.url)
            try:
                found = self._look(parts.hostname or "", parts.port or 80)
            except OSError as error:
                if one.url not in self._known:
                    _log.warning("%s has no addresses yet: %s", one.url, error)
                continue
            if found:
                self._known[one.url] = found
        return self._known != before

    def resolved(self, settings: Settings) -> Settings:
        """The settings with an address of its own for each engine behind a name."""
        models = {
            name: replace(section, urls=tuple(self._behind(section.urls)))
            for name, section in settings.models.items()
        }
        return replace(settings, models=models)

    def _behind(self, urls: tuple[UpstreamUrl, ...]) -> Iterator[UpstreamUrl]:
        for one in urls:
            if not one.url.startswith(PREFIX):
                yield one
                continue
            plain = one.url.removeprefix(PREFIX)
            parts = urlsplit(plain)
            # With no address known the name stands for one engine, which is found not to answer.
            for address in self._known.get(one.url, (parts.hostname or "",)):
                host = f"[{address}]" if ":" in address else address
                place = f"{host}:{parts.port or 80}"
                yield replace(one, url=parts._replace(netloc=place).geturl())


def _names(settings: Settings) -> Iterator[UpstreamUrl]:
    for section in settings.models.values():
        yield from (one for one in section.urls if one.url.startswith(PREFIX))
