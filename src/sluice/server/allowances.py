"""What a tenant may still use, as headers in OpenAI's words: ``x-ratelimit-*``.

``app`` adds them to each answer of a request whose tenant has limits, served or refused. What the
limits are, and whether a request is over them, is decided by the fleet.
"""

import math

from sluice.core.tenants import Quota
from sluice.server.ports import Gateway
from sluice.server.problems import Headers


def allowance_headers(gateway: Gateway, tenant: str) -> Headers:
    """The headers of a tenant as it stands; none where it has no limit per minute."""
    allowance = gateway.allowance(tenant) if tenant else None
    if allowance is None:
        return []
    return [*_headers(b"requests", allowance.requests), *_headers(b"tokens", allowance.tokens)]


def _headers(what: bytes, quota: Quota | None) -> Headers:
    """``reset`` is a duration such as ``1.5s``, rounded up to milliseconds."""
    if quota is None:
        return []
    reset_s = math.ceil(quota.reset_ns / 1e6) / 1e3
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % quota.limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % quota.remaining),
        (b"x-ratelimit-reset-" + what, f"{reset_s:g}s".encode()),
    ]
