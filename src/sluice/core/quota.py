"""What a vendor still allows, from what its answers say: a limit is foreseen and not run into.

One per remote replica, asked and told by ``core/fleet_replica.py``. Vendors count requests and
tokens in buckets that fill continuously; each answer tells how much was left when its request was
let in, and when the bucket will be full. From there the level is computed on: what fills in, less
all that was sent after that request. Where no answer said anything, nothing is held back.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Sends that are remembered until an answer says what was left after them.
SENT_MAX = 1024
# How long a request may be on its way before the vendor counts it: so long nothing fills in.
ON_THE_WAY_NS = 250_000_000
# In which time a bucket fills that was told as full.
FILLS_NS = 60_000_000_000


class Left(NamedTuple):
    """One limit as an answer tells it; ``full_ns`` is the time until ``limit`` is there again."""

    limit: int
    remaining: int
    full_ns: int


@dataclass(frozen=True, slots=True)
class QuotaLeft:
    """What one answer says of its vendor's limits; ``None`` where it says nothing."""

    requests: Left | None = None
    tokens: Left | None = None


class _Sent(NamedTuple):
    """A request, by the order in which they were sent."""

    number: int
    at_ns: int
    tokens: int


@dataclass(slots=True)
class _Bucket:
    """One limit from the time on at which it was told."""

    limit: int
    per_ns: float
    level: float
    at_ns: int

    def take(self, amount: int, now_ns: int) -> None:
        self.level = self.level_at(now_ns) - amount
        self.at_ns = max(self.at_ns, now_ns)

    def level_at(self, now_ns: int) -> float:
        return min(self.limit, self.level + self.per_ns * max(0, now_ns - self.at_ns))

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Time until so much is there; more than the limit goes when the bucket is full."""
        missing = min(amount, self.limit) - self.level_at(now_ns)
        return int(missing / self.per_ns) + 1 if missing > 0 else 0


class VendorQuota:
    """The quota of one vendor's key."""

    def __init__(self) -> None:
        self._open: dict[str, _Sent] = {}  # what the last answer may not have counted
        self._count = 0
        self._told = 0  # the number of the request whose answer is the base
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None
        self._rests_until_ns = 0

    def began(self, request_id: str, tokens: int, now_ns: int) -> None:
        """A request is sent that may cost so many tokens."""
        self._count += 1
        self._open[request_id] = _Sent(self._count, now_ns, tokens)
        if len(self._open) > SENT_MAX:
            del self._open[next(iter(self._open))]
        if self._requests is not None:
            self._requests.take(1, now_ns)
        if self._tokens is not None:
            self._tokens.take(tokens, now_ns)

    def told(self, left: QuotaLeft, request_id: str, now_ns: int) -> None:
        """The answer to a request says this. One to an earlier request than the last is old news.

        Requests overtake one another on their way, so what was sent shortly before the answered one
        and has no answer yet may not be counted in it either.
        """
        sent = self._open.pop(request_id, None)
        if sent is None or sent.number < self._told or left == QuotaLeft():
            return
        self._told = sent.number
        surely_ns = sent.at_ns - ON_THE_WAY_NS
        self._open = {name: one for name, one in self._open.items() if one.at_ns > surely_ns}
        counted_ns = min(now_ns, sent.at_ns + ON_THE_WAY_NS)
        requests, tokens = _bucket(left.requests, counted_ns), _bucket(left.tokens, counted_ns)
        for one in self._open.values():
            if requests is not None:
                requests.take(1, one.at_ns)
            if tokens is not None:
                tokens.take(one.tokens, one.at_ns)
        self._requests, self._tokens = requests, tokens

    def rest(self, wait_ns: int, now_ns: int) -> None:
        """The vendor asks to wait so long."""
        self._rests_until_ns = max(self._rests_until_ns, now_ns + wait_ns)

    def end_rest(self) -> None:
        """What the vendor asked for holds no more."""
        self._rests_until_ns = 0

    def wait_ns(self, tokens: int, now_ns: int) -> int:
        """Time until a request of so many tokens may be sent; 0 for at once."""
        rest_ns = max(0, self._rests_until_ns - now_ns)
        if self._requests is None and self._tokens is None:
            return rest_ns
        waits_ns = [rest_ns]
        if self._requests is not None:
            waits_ns.append(self._requests.wait_ns(1, now_ns))
        if self._tokens is not None:
            waits_ns.append(self._tokens.wait_ns(tokens, now_ns))
        return max(waits_ns)


def _bucket(left: Left | None, at_ns: int) -> _Bucket | None:
    if left is None or left.limit <= 0:
        return None
    missing = left.limit - left.remaining
    known = missing > 0 and left.full_ns > 0
    per_ns = missing / left.full_ns if known else left.limit / FILLS_NS
    return _Bucket(left.limit, per_ns, left.remaining, at_ns)
