"""What each tenant may use: requests and tokens per minute, and requests at the same time.

Reserve, then settle: what a request may use at most is taken when it is accepted, and what it did
not use comes back when it ends, so that concurrent requests cannot overrun a limit together. The
judgement changes nothing, and it is made over all limits before anything is reserved: a refused
request uses up nothing.

Requests and tokens per minute are token buckets (Turner 1986; the GCRA of ITU-T I.371 is the same
rule): a bucket holds one minute's allowance, is full at first and fills continuously. Levels are
whole numbers of nanosecond-shares, so that they are exact at any rate.

Called by ``core/fleet.py`` in the same call that accepts, ends or refuses a request. Who a tenant
is was decided before, from its key; a tenant that is named nowhere has no limits and weight 1, and
nothing is kept about it. Shares between tenants are ``core/fairness.py``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.core.admission import NS_PER_S, Refusal
from sluice.core.limits import TenantLimits
from sluice.core.request import Request, Usage

MINUTE_NS = 60 * NS_PER_S

# Told to a tenant at its concurrency limit before one of its requests has ended.
HELD_NS_UNKNOWN = NS_PER_S
# Weight of one ended request in the mean time that requests of a tenant are held: 1 in so many.
HELD_MEMORY = 8
# A request held longer than the mean is taken to need this part of it again: 1 in so many.
OVERDUE_PART = 10


class Quota(NamedTuple):
    """One limit as its tenant sees it; ``reset_ns`` is the time until all of it is there again."""

    limit: int
    remaining: int
    reset_ns: int


class Allowance(NamedTuple):
    """What a tenant may still use; ``None`` where it has no such limit."""

    requests: Quota | None
    tokens: Quota | None


class _Bucket:
    """One limit per minute. Its level is the amount that is left, times ``MINUTE_NS``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.full = self.level = limit * MINUTE_NS

    def refusal(self, reason: str, amount: int) -> Refusal | None:
        """Why this amount cannot be taken; without a wait where it is over the whole limit."""
        short = amount * MINUTE_NS - self.level
        if short <= 0:
            return None
        used = self.limit - self.level // MINUTE_NS
        wait_ns = None if amount > self.limit else -(-short // self.limit)
        measured = amount if wait_ns is None else used + amount
        return Refusal(429, reason, measured, self.limit, wait_ns)

    def succeed(self, earlier: "_Bucket") -> None:
        """Let the same be missing as in an earlier one, what is reserved included."""
        self.level = self.full - earlier.full + earlier.level

    @property
    def quota(self) -> Quota:
        """What is left, in whole units."""
        level = self.level
        left = level // MINUTE_NS if level > 0 else 0
        return Quota(self.limit, left, -((level - self.full) // self.limit))


@dataclass(slots=True)
class _Account:
    """One configured tenant: its buckets, filled at ``at_ns``, and the requests it has accepted."""

    limits: TenantLimits
    requests: _Bucket | None
    tokens: _Bucket | None
    at_ns: int | None = None
    started_ns: dict[str, int] = field(default_factory=dict)  # of each request, oldest first
    held_ns: int = HELD_NS_UNKNOWN

    def take(self, requests: int, tokens: int, now_ns: int) -> None:
        """Take amounts from the buckets, or let negative ones come back, and add what came since
        the last time; a clock that goes back adds nothing twice."""
        at_ns = now_ns if self.at_ns is None else self.at_ns
        elapsed_ns = now_ns - at_ns if now_ns > at_ns else 0
        self.at_ns = at_ns + elapsed_ns
        for bucket, amount in ((self.requests, requests), (self.tokens, tokens)):
            if bucket is not None:
                # What had come by then is full before anything is taken of it.
                level, full = bucket.level + bucket.limit * elapsed_ns, bucket.full
                level = (min(full, level)) - amount * MINUTE_NS
                bucket.level = min(full, level)

    def succeed(self, earlier: "_Account") -> None:
        """Take over what an earlier one knows; its requests are reserved here already."""
        self.started_ns.update(earlier.started_ns)
        self.held_ns = earlier.held_ns
        buckets = ((self.requests, earlier.requests), (self.tokens, earlier.tokens))
        for bucket, before in buckets:
            if bucket is not None and before is not None:
                bucket.succeed(before)

    def room_in_ns(self, now_ns: int) -> int:
        """Predicted time until the oldest of its requests ends."""
        oldest_ns = next(iter(self.started_ns.values()), now_ns)
        return max(self.held_ns - (now_ns - oldest_ns), self.held_ns // OVERDUE_PART, 1)


class TenantLedger:
    """What the configured tenants have left, and what their accepted requests have reserved."""

    def __init__(self, tenants: Sequence[TenantLimits] = ()) -> None:
        self._accounts = {limits.name: _account(limits) for limits in tenants}
        self._reserved: dict[str, tuple[_Account, int]] = {}

    def replace(
        self, tenants: Sequence[TenantLimits], running: Iterable[Request], now_ns: int
    ) -> None:
        """Hold to other limits from now on.

        What was used under the earlier ones is used under these; what the ``running`` requests may
        use is reserved, whether their tenants had limits or not.
        """
        for account in self._accounts.values():
            account.take(0, 0, now_ns)
        known, self._accounts = self._accounts, {one.name: _account(one) for one in tenants}
        self._reserved = {}
        for request in running:
            self.reserve(request, now_ns)
        for name, account in self._accounts.items():
            if name in known:
                account.succeed(known[name])

    def refusal_before(self, tenant: str, now_ns: int) -> Refusal | None:
        """Why a request of this tenant is refused whatever its prompt is: requests, concurrency."""
        account = self._accounts.get(tenant)
        if account is None:
            return None
        account.take(0, 0, now_ns)
        concurrency, active = account.limits.concurrency, len(account.started_ns)
        if concurrency is not None and active >= concurrency:
            wait_ns = account.room_in_ns(now_ns)
            return Refusal(429, "concurrency", active + 1, concurrency, wait_ns)
        if account.requests is None:
            return None
        return account.requests.refusal("requests_per_minute", 1)

    def refusal(self, request: Request, now_ns: int) -> Refusal | None:
        """Why the request is over a limit of its tenant, ``None`` if it is not. Takes nothing.

        Its tokens are its prompt and all that it may produce, since nobody knows what it will.
        """
        account = self._accounts.get(request.tenant)
        if account is None:
            return None
        before = self.refusal_before(request.tenant, now_ns)
        if before is not None or account.tokens is None:
            return before
        return account.tokens.refusal("tokens_per_minute", request.tokens_asked)

    def reserve(self, request: Request, now_ns: int) -> None:
        """Take what an accepted request may use. It was judged by ``refusal`` in the same call."""
        account = self._accounts.get(request.tenant)
        if account is None:
            return
        assert request.id not in self._reserved, f"request {request.id} is reserved already"
        tokens = request.tokens_asked
        account.take(1, tokens, now_ns)
        account.started_ns[request.id] = now_ns
        self._reserved[request.id] = (account, tokens)

    def settle(self, request_id: str, usage: Usage, now_ns: int) -> None:
        """The request ended, in whatever way, after this use; what it did not use comes back.

        Its whole prompt counts, also what the prefix cache held. Unknown ids are ignored: their
        tenants have no limits.
        """
        self._end(request_id, 1, usage.prompt_tokens + usage.completion_tokens, now_ns)

    def release(self, request_id: str, now_ns: int) -> None:
        """The request was refused after it had been accepted: everything comes back."""
        self._end(request_id, 0, 0, now_ns)

    def _end(self, request_id: str, requests: int, tokens: int, now_ns: int) -> None:
        """Leave so much taken of what the request had reserved."""
        account, reserved = self._reserved.pop(request_id, (None, 0))
        if account is None:
            return
        account.take(requests - 1, tokens - reserved, now_ns)
        held_ns = max(0, now_ns - account.started_ns.pop(request_id))
        account.held_ns += (held_ns - account.held_ns) // HELD_MEMORY

    def allowance(self, tenant: str, now_ns: int) -> Allowance | None:
        """What the tenant may still use, ``None`` where it has no limit per minute."""
        account = self._accounts.get(tenant)
        if account is None or (account.requests is None and account.tokens is None):
            return None
        account.take(0, 0, now_ns)
        requests = None if account.requests is None else account.requests.quota
        tokens = None if account.tokens is None else account.tokens.quota
        return Allowance(requests, tokens)


def _account(limits: TenantLimits) -> _Account:
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    return _Account(
        limits,
        None if requests is None else _Bucket(requests),
        None if tokens is None else _Bucket(tokens),
    )
