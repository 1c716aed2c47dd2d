"""What a tenant may still use, as headers in OpenAI's words: ``x-ratelimit-*``.

``app`` adds them to each answer of a request whose tenant has limits, served or refused. What the
limits are, and whether a request is over them, is decided by the fleet.
"""

import math

from sluice.core.tenants import Quota
from sluice.server.ports import Gateway
from sluice.server.problems import Headers

_REQUESTS = (
    b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests",
)  # fmt: skip
_TOKENS = (
    b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens",
)  # fmt: skip


def allowance_headers(gateway: Gateway, tenant: str) -> Headers:
    """The headers of a tenant as it stands; none where it has no limit per minute."""
    allowance = gateway.allowance(tenant) if tenant else None
    if allowance is None:
        return []
    return [*_headers(_REQUESTS, allowance.requests), *_headers(_TOKENS, allowance.tokens)]


def _headers(names: tuple[bytes, bytes, bytes], quota: Quota | None) -> Headers:
    """``reset`` is a duration such as ``1.5s``, rounded up to milliseconds."""
    if quota is None:
        return []
    limit, remaining, reset = names
    reset_s = math.ceil(quota.reset_ns / 1e6) / 1e3
    return [
        (limit, b"%d" % quota.limit),
        (remaining, b"%d" % quota.remaining),
        (reset, b"%gs" % reset_s),
    ]
