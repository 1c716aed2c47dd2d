"""What is sent: the endpoint under test, and its requests as bytes.

Which request goes when is the plan's; ``texts.py`` writes the prompts. A request is bytes joined
from parts that are ready before a trial begins.
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from sluice.loadtest.texts import Prompts
from sluice.loadtest.trial import CannotMeasure
from sluice.workload.asks import Ask


class Api(StrEnum):
    """The route that is asked."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint. ``path`` is what stands before ``/chat/completions``, as ``/v1``.

    ``keys`` are by tenant, ``""`` for requests of none; they appear in headers only. ``extra`` are
    members of every body: how this server is told to answer to the full length, for example.
    ``ca`` is a file of certificates to trust beside the system's; ``insecure`` trusts everyone.
    """

    host: str
    port: int
    model: str
    path: str = "/v1"
    tls: bool = False
    api: Api = Api.CHAT
    streamed: bool = True
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    ca: str | None = None
    insecure: bool = False

    @property
    def netloc(self) -> str:
        """Host and port as in URLs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def route(self) -> str:
        """The path of the requests."""
        match self.api:
            case Api.CHAT:
                return f"{self.path}/chat/completions"
            case Api.COMPLETIONS:
                return f"{self.path}/completions"

    def ssl_context(self) -> ssl.SSLContext | None:
        """What connections are secured with. Raises ``CannotMeasure``."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context()
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except OSError as error:
            raise CannotMeasure(f"cannot read the certificates {self.ca}: {error}") from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def target_of(url: str, model: str) -> Target:
    """The target at an address such as ``http://127.0.0.1:8000/v1``. Raises ``CannotMeasure``."""
    form = 'write it as "http://HOST:PORT" or "http://HOST:PORT/v1"'
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise CannotMeasure(f"{url!r} is no address: {error}; {form}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise CannotMeasure(f"{url!r} is no address of a server; {form}")
    if parts.username or parts.query or parts.fragment:
        raise CannotMeasure(f"the address must not hold a user, a query or a fragment; {form}")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise CannotMeasure(f"{url!r} holds what no address can; {form}")
    path = parts.path.rstrip("/")
    return Target(parts.hostname, port, model, path or "/v1", parts.scheme == "https")


class Requests:
    """Makes the bytes of requests for one target and one set of prompts."""

    def __init__(self, target: Target, prompts: Prompts) -> None:
        self._target, self._prompts = target, prompts
        self._heads: dict[tuple[str, str], bytes] = {}
        model = json.dumps(target.model)
        chat = target.api is Api.CHAT
        opening = '"messages":[{"role":"user","content":"' if chat else '"prompt":"'
        closing = '"}],' if chat else '",'
        options: dict[str, Any] = {"temperature": 0, "stream": target.streamed}
        if target.streamed:
            options["stream_options"] = {"include_usage": True}
        options |= target.extra
        rest = json.dumps(options, separators=(",", ":"))[1:]
        self._before = f'{{"model":{model},{opening}'.encode()
        self._after = f'{closing}"max_tokens":'.encode()
        self._rest = f",{rest}".encode()

    def raw(self, ask: Ask) -> bytes:
        """The whole HTTP request."""
        limit = b"%d" % ask.output_tokens
        if ask.choices > 1:
            limit += b',"n":%d' % ask.choices
        body = b"".join((self._before, self._prompts.text(ask), self._after, limit, self._rest))
        key = (ask.slo_class, ask.tenant)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._head(ask)
        return b"%s%d\r\n\r\n%s" % (head, len(body), body)

    def _head(self, ask: Ask) -> bytes:
        target = self._target
        lines = [
            f"POST {target.route} HTTP/1.1",
            f"host: {target.netloc}",
            "content-type: application/json",
            "accept-encoding: identity",
            *headers_of(target, ask.tenant),
        ]
        if ask.slo_class:
            lines.append(f"x-sluice-slo: {ask.slo_class}")
        if ask.tenant and ask.tenant not in target.keys:
            lines.append(f"x-sluice-tenant: {ask.tenant}")
        if any("\r" in line or "\n" in line for line in lines):
            raise CannotMeasure("a key, path or name holds a line break")
        return "\r\n".join([*lines, "content-length: "]).encode("latin-1")


def headers_of(target: Target, tenant: str = "") -> list[str]:
    """The lines that carry a tenant's key."""
    key = target.keys.get(tenant) or target.keys.get("")
    return [f"authorization: Bearer {key}"] if key else []
