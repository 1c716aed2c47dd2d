"""The laws of other autoscalers, with their defaults, as their documents and sources state them.

Each is asked at its own interval, sees what such a system would see and says how many replicas are
to run. What it says is carried out by the same fleet, which drains what is to go: none of them is
charged for killing replicas with requests on board.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

# Stretches of time that the oracle looks at; the starts that it waits for (98 of 100 are no
# slower); for how long what is needed stays needed; the share of a replica's speed it plans with.
ORACLE_SPANS_S = (1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
ORACLE_SLOWEST, ORACLE_HOLDS_S, ORACLE_SHARE = 2.1, 30.0, 0.85


@dataclass(frozen=True, slots=True)
class Seen:
    """What an autoscaler sees: ``replicas`` were asked for, ``ready`` of them serve.

    ``running`` and ``waiting`` are requests, ``seats`` is what one replica runs.
    """

    at_s: float
    replicas: int
    ready: int
    running: int
    waiting: int
    seats: int


class Law(Protocol):
    """One autoscaler. ``every_s`` is how often it decides."""

    every_s: float

    def wanted(self, seen: Seen) -> int:
        """How many replicas there are to be; the caller holds it within the bounds."""
        ...


@dataclass
class Hpa:
    """Kubernetes' autoscaler on an average per replica: every 15 s, with a metric that was scraped
    up to 15 s before; 10 % dead band; up by the larger of 4 and x2 each 15 s, down to the highest
    advice of 300 s."""

    metric: Callable[[Seen], float]
    target: float
    every_s: float = 15.0
    _scraped: Seen | None = None
    _advice: deque[tuple[float, int]] = field(default_factory=deque)

    def wanted(self, seen: Seen) -> int:
        """See ``Law``."""
        scraped, self._scraped = self._scraped or seen, seen
        if not self._advice:  # what runs at first is its first advice
            self._advice.append((seen.at_s, seen.replicas))
        ratio = self.metric(scraped) / (self.target * max(1, seen.replicas))
        advice = seen.replicas
        if abs(ratio - 1.0) > 0.1:
            advice = ceil(self.metric(scraped) / self.target)
        self._advice.append((seen.at_s, advice))
        while self._advice[0][0] < seen.at_s - 300.0:
            self._advice.popleft()
        if advice > seen.replicas:
            return min(advice, max(seen.replicas + 4, 2 * seen.replicas))
        return min(seen.replicas, max(one for _, one in self._advice))


def hpa_concurrency(seats: int, share: float) -> Hpa:
    """On requests in a replica, waiting ones included."""
    return Hpa(lambda seen: seen.running + seen.waiting, share * seats)


def keda_waiting() -> Hpa:
    """KEDA with the vLLM production stack's tutorial: 5 waiting requests a replica, every 15 s,
    carried out by Kubernetes' autoscaler."""
    return Hpa(lambda seen: seen.waiting, 5.0)


@dataclass
class Knative:
    """Knative's pod autoscaler: 70 % of the concurrency limit over 60 s; a panic over 6 s where
    that asks for twice what is ready, in which nothing is taken away; up without, down by at most
    half at a time."""

    seats: int
    every_s: float = 2.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    _panic_until_s: float = -1.0
    _panic_most: int = 0

    def wanted(self, seen: Seen) -> int:
        """See ``Law``."""
        self._seen.append((seen.at_s, seen.running + seen.waiting))
        while self._seen[0][0] <= seen.at_s - 60.0:
            self._seen.popleft()
        target = 0.7 * self.seats
        stable = ceil(_mean(self._seen, seen.at_s - 60.0) / target)
        panic = ceil(_mean(self._seen, seen.at_s - 6.0) / target)
        ready = max(1, seen.ready)
        stable = max(stable, ready // 2)
        if panic >= 2 * ready:
            if self._panic_until_s < seen.at_s:
                self._panic_most = seen.replicas
            self._panic_until_s = seen.at_s + 60.0
        if seen.at_s <= self._panic_until_s:
            self._panic_most = max(self._panic_most, panic, stable)
            return self._panic_most
        return stable


def _mean(seen: Sequence[tuple[float, int]] | deque[tuple[float, int]], after_s: float) -> float:
    values = [value for at_s, value in seen if at_s > after_s]
    return sum(values) / len(values) if values else 0.0


@dataclass
class RayServe:
    """Ray Serve: ongoing requests against a target for each replica; a wish is fulfilled when it
    was there for 30 s upwards or 600 s downwards, with what the last look gives. Metrics are means
    of 30 s, sent every 10 s."""

    target: float
    every_s: float = 1.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    _metric: float = 0.0
    _sent_s: float = -10.0
    _since_s: float = 0.0
    _sign: int = 0

    def wanted(self, seen: Seen) -> int:
        """See ``Law``."""
        self._seen.append((seen.at_s, seen.running + seen.waiting))
        while self._seen[0][0] <= seen.at_s - 30.0:
            self._seen.popleft()
        if seen.at_s >= self._sent_s + 10.0:
            self._metric, self._sent_s = _mean(self._seen, seen.at_s - 30.0), seen.at_s
        desired = ceil(self._metric / self.target)
        sign = (desired > seen.replicas) - (desired < seen.replicas)
        if sign != self._sign:
            self._sign, self._since_s = sign, seen.at_s
        delay_s = 30.0 if sign > 0 else 600.0
        if sign and seen.at_s - self._since_s >= delay_s:
            self._sign, self._since_s = 0, seen.at_s
            return desired
        return seen.replicas


@dataclass
class LastValue:
    """Dynamo's planner with its constant forecast: every 180 s, the work of the last interval over
    what a replica is profiled to do within its targets."""

    work_of: Callable[[float, float], float]
    every_s: float = 180.0

    def wanted(self, seen: Seen) -> int:
        """See ``Law``."""
        return ceil(self.work_of(seen.at_s - self.every_s, seen.at_s) / self.every_s)


@dataclass
class Oracle:
    """Knows the work of all that will come, and how long the slowest starts take; what it orders is
    there when it is needed, and stays while it will be needed again within the time of a start.

    Needed is what begins the work of any stretch of time, long or short, by its end and half of the
    time to the first token, at a share of a replica's speed; and the places of what is in the
    fleet. No law can have more in time that starts with the same replicas, but by buying more.
    """

    work_of: Callable[[float, float], float]
    cold_s: float
    ttft_s: float
    every_s: float = 5.0
    _needs: dict[int, float] = field(default_factory=dict)

    def wanted(self, seen: Seen) -> int:
        """See ``Law``."""
        slot, lead_s = round(seen.at_s / self.every_s), ORACLE_SLOWEST * self.cold_s
        first, last = slot - round(ORACLE_HOLDS_S / self.every_s), slot + 2
        last += round(lead_s / self.every_s)
        future = max(self._need(number) for number in range(first, last))
        return ceil(max(future, (seen.running + seen.waiting) / seen.seats) / ORACLE_SHARE)

    def _need(self, slot: int) -> float:
        if slot not in self._needs:
            at_s, grace_s = slot * self.every_s, self.ttft_s / 2
            self._needs[slot] = max(
                self.work_of(at_s, at_s + span_s) / (span_s + grace_s) for span_s in ORACLE_SPANS_S
            )
        return self._needs[slot]
