"""What a vendor still allows, from what its answers say: a limit is foreseen and not run into.

One per remote replica, asked and told by ``core/fleet_replica.py``. Vendors count requests and
tokens in buckets that fill continuously; each answer tells how much was left when its request was
let in, and when the bucket will be full. From there the level is computed on: what fills in, less
all that was sent after that request. Where no answer said anything, nothing is held back.
"""

from collections import deque
from dataclasses import dataclass

from sluice.core.admission import NS_PER_S
from sluice.core.events import Left, QuotaLeft

# Sends that are remembered until an answer says what was left after them.
SENT_MAX = 1024
# In which time a bucket fills that was told as full.
FILLS_NS = 60 * NS_PER_S


@dataclass(slots=True)
class _Bucket:
    """One limit from the time on at which it was told."""

    limit: int
    per_ns: float
    level: float
    at_ns: int

    def take(self, amount: int, now_ns: int) -> None:
        self.level = self.level_at(now_ns) - amount
        self.at_ns = now_ns

    def level_at(self, now_ns: int) -> float:
        return min(self.limit, self.level + self.per_ns * max(0, now_ns - self.at_ns))

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Time until so much is there; more than the limit goes when the bucket is full."""
        missing = min(amount, self.limit) - self.level_at(now_ns)
        return int(missing / self.per_ns) + 1 if missing > 0 else 0


class VendorQuota:
    """The quota of one vendor's key."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, int]] = deque(maxlen=SENT_MAX)  # when, and how many tokens
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None
        self._told_ns: int | None = None
        self._rests_until_ns = 0

    def began(self, tokens: int, now_ns: int) -> None:
        """A request is sent that may cost so many tokens."""
        self._sent.append((now_ns, tokens))
        if self._requests is not None:
            self._requests.take(1, now_ns)
        if self._tokens is not None:
            self._tokens.take(tokens, now_ns)

    def told(self, left: QuotaLeft, sent_ns: int) -> None:
        """The answer to a request that was sent at ``sent_ns`` says this.

        An answer to an earlier request than the last one that said something is older news.
        """
        if left == QuotaLeft() or (self._told_ns is not None and sent_ns < self._told_ns):
            return
        self._told_ns = sent_ns
        while self._sent and self._sent[0][0] <= sent_ns:
            self._sent.popleft()
        requests, tokens = _bucket(left.requests, sent_ns), _bucket(left.tokens, sent_ns)
        for at_ns, amount in self._sent:
            if requests is not None:
                requests.take(1, at_ns)
            if tokens is not None:
                tokens.take(amount, at_ns)
        self._requests, self._tokens = requests, tokens

    def rest(self, wait_ns: int, now_ns: int) -> None:
        """The vendor asks to wait so long."""
        self._rests_until_ns = max(self._rests_until_ns, now_ns + wait_ns)

    def wait_ns(self, tokens: int, now_ns: int) -> int:
        """Time until a request of so many tokens may be sent; 0 for at once."""
        waits_ns = [0, self._rests_until_ns - now_ns]
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
