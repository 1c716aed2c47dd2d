"""What came of simulated requests: counts and percentiles, all in memory that does not grow.

``Tally`` counts one group of requests, ``Outcome`` is a whole run. Whether a request met its
targets is judged as the gateway's metrics judge it: a whole answer whose first token, time per
token and end are in time. A refusal or a failure is never good.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from sluice.core.admission import NS_PER_S
from sluice.core.events import Ended
from sluice.core.request import COMPLETE, EndReason, Request
from sluice.planner.sketch import Sketch
from sluice.workload.asks import Ask

# Requests in the order of arrival are counted in so many equal parts, for intervals by batch means.
BATCHES = 20
# A queue that is longer at the end by less than this may be so by chance.
GROWN_SHARE, GROWN_DEVIATIONS, GROWN_LEAST = 0.25, 4.0, 20


@dataclass(slots=True, eq=False)
class Life:
    """One ask while it is in the fleet; ``request`` is that of the last of its ``tries``, which
    came ``earlier_ns`` after the first."""

    ask: Ask
    request: Request
    model: str
    tries: int = 1
    earlier_ns: int = 0
    first_ns: int | None = None
    first_tokens: int = 0
    degraded: bool = False

    def tpot_ns(self, tokens: int, now_ns: int) -> float | None:
        """(last - first) / (N - tokens in the first chunk), per choice; ``None`` if undefined."""
        later = tokens - self.first_tokens
        if self.first_ns is None or later <= 0:
            return None
        return (now_ns - self.first_ns) * self.request.choices / later

    def met(
        self, reason: EndReason, tpot_ns: float | None, now_ns: int, *, earlier_ns: int = 0
    ) -> bool:
        """Whether it ended whole and within its targets, had they begun ``earlier_ns`` earlier."""
        request = self.request
        if reason not in COMPLETE or self.first_ns is None:
            return False
        if self.first_late(now_ns, earlier_ns=earlier_ns):
            return False
        if request.tpot_ns is not None and tpot_ns is not None and tpot_ns > request.tpot_ns:
            return False
        return request.deadline_ns is None or now_ns + earlier_ns <= request.deadline_ns

    def first_late(self, now_ns: int, *, earlier_ns: int = 0) -> bool:
        """Whether its first token came too late, or is too late by now."""
        due_ns = self.request.ttft_due_ns
        first_ns = now_ns if self.first_ns is None else self.first_ns
        return due_ns is not None and first_ns + earlier_ns > due_ns


@dataclass(slots=True, eq=False)
class Tally:
    """One group of requests. Latencies are those of whole answers, in seconds.

    Clients of ``left`` requests went away before the end; of ``unknown`` ones before it could be
    said whether they would have been served in time: while their first token was not due, or after
    it had come in time. ``retries`` counts further tries after a refusal. Latencies and ``met`` are
    those of the last try; ``met_from_first`` counts time from the first one.
    """

    requests: int = 0
    left: int = 0
    unknown: int = 0
    retries: int = 0
    met: int = 0
    met_from_first: int = 0
    refused: int = 0
    failed: int = 0
    degraded: int = 0
    output_tokens: int = 0
    ttft_s: Sketch = field(default_factory=Sketch)
    tpot_s: Sketch = field(default_factory=Sketch)
    e2e_s: Sketch = field(default_factory=Sketch)

    @property
    def attainment(self) -> float:
        """Share that met their targets of those of which it is known; 0 of none."""
        known = self.requests - self.unknown
        return self.met / known if known else 0.0

    @property
    def attainment_from_first(self) -> float:
        """As ``attainment``, with the time of a client from when it first asked."""
        known = self.requests - self.unknown
        return self.met_from_first / known if known else 0.0


class Scaling(NamedTuple):
    """From ``at_s`` after the first arrival on ``number`` replicas were to serve."""

    at_s: float
    model: str
    number: int
    reason: str


@dataclass(slots=True, eq=False)
class Outcome:
    """A run. Figures are about the requests after the warm-up, followed to their ends.

    ``arriving_s`` is the time in which they arrived, ``counted_s`` that from the first arrival to
    the last ending of them, ``simulated_s`` the virtual time until the last ending of all.
    ``waiting_at_end`` requests were in the fleet when the last one arrived, and
    ``waiting_at_half`` when half had; ``queued_at_end`` and ``queued_at_half`` of these had no
    first token yet. ``reasons`` counts refusals by their code. ``batches`` holds
    requests of which it is known whether they met their targets, and those that did, by the order
    of arrival. ``replica_hours`` count from the start of a replica to its stop, ``warm_hours`` are
    those of them in which it was loaded and got nothing. ``scalings`` are the changes of how many
    were to serve.
    """

    whole: Tally = field(default_factory=Tally)
    classes: dict[str, Tally] = field(default_factory=dict)
    tenants: dict[str, Tally] = field(default_factory=dict)
    models: dict[str, Tally] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    batches: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)] * BATCHES)
    arriving_s: float = 0.0
    counted_s: float = 0.0
    simulated_s: float = 0.0
    replica_hours: float = 0.0
    warm_hours: float = 0.0
    scalings: list[Scaling] = field(default_factory=list)
    preemptions: int = 0
    steps: int = 0
    waiting_at_half: int = 0
    waiting_at_end: int = 0
    queued_at_half: int = 0
    queued_at_end: int = 0

    @property
    def attainment(self) -> float:
        """Share of the requests that met their targets."""
        return self.whole.attainment

    @property
    def direction_changes(self) -> int:
        """How often a model whose replicas had become more began to have fewer, or the reverse."""
        changes = 0
        last: dict[str, tuple[int, bool]] = {}
        for scaling in self.scalings:
            number, rose = last.get(scaling.model, (scaling.number, True))
            rises = scaling.number > number
            if scaling.number != number and scaling.model in last:
                changes += rises != rose
                rose = rises
            last[scaling.model] = (scaling.number, rose)
        return changes

    @property
    def goodput_rps(self) -> float:
        """Requests that met their targets per second in which there were any of the counted ones:
        what is still answered after the last arrival takes time too."""
        return self.whole.met / self.counted_s if self.counted_s else 0.0

    @property
    def queue_grows(self) -> bool:
        """Whether more requests waited for their first token at the end than at half, beyond
        chance: then there is no steady state, and figures tell how long the run was.

        A batch that still fills at half is no such queue.
        """
        half, end = self.queued_at_half, self.queued_at_end
        by_chance = GROWN_DEVIATIONS * sqrt(half + end)
        return end - half > max(GROWN_LEAST, GROWN_SHARE * half, by_chance)

    @property
    def attainment_half_width(self) -> float:
        """Half of the 95 % interval of ``attainment``, by batch means (Law and Kelton): parts of a
        run depend on each other little when they are long."""
        shares = [met / requests for requests, met in self.batches if requests]
        if len(shares) < 2:
            return 1.0
        mean = sum(shares) / len(shares)
        variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
        # Student's t for 19 degrees of freedom; with fewer batches it is a little too small.
        return float(2.093 * (variance / len(shares)) ** 0.5)


class Counting:
    """Fills an ``Outcome``: each request is counted once, when it is over.

    The first ``warm_up`` are not counted, nor those after the first ``requests``.
    """

    def __init__(self, requests: int, warm_up: int = 0) -> None:
        self.outcome = Outcome()
        self._numbers = range(warm_up, requests)

    def counts(self, life: Life) -> bool:
        """Whether it is one of those that are counted."""
        return life.ask.number in self._numbers

    @property
    def complete(self) -> bool:
        """Whether all that are counted are over."""
        return self.outcome.whole.requests >= len(self._numbers)

    def ended(self, life: Life, ended: Ended, now_ns: int, *, tpot_ns: float | None = None) -> None:
        """It was answered, or its answer was broken off; ``tpot_ns`` where that was measured."""
        tokens = ended.usage.completion_tokens
        if tpot_ns is None:
            tpot_ns = life.tpot_ns(tokens, now_ns)
        met = life.met(ended.reason, tpot_ns, now_ns)
        from_first = life.met(ended.reason, tpot_ns, now_ns, earlier_ns=life.earlier_ns)
        for tally in self._tallies(life, met=met):
            tally.met_from_first += from_first
            tally.output_tokens += tokens
            if ended.reason not in COMPLETE:
                tally.failed += 1
                continue
            arrived_ns, first_ns = life.request.arrived_ns, life.first_ns
            if first_ns is not None:
                tally.ttft_s.add((first_ns - arrived_ns) / NS_PER_S)
            if tpot_ns is not None:
                tally.tpot_s.add(tpot_ns / NS_PER_S)
            tally.e2e_s.add((now_ns - arrived_ns) / NS_PER_S)

    def refused(self, life: Life, reason: str) -> None:
        """It was refused."""
        for tally in self._tallies(life, met=False):
            tally.refused += 1
        if self.counts(life):
            reasons = self.outcome.reasons
            reasons[reason] = reasons.get(reason, 0) + 1

    def left(self, life: Life, now_ns: int) -> None:
        """Its client went away; one that had waited too long for its first token was not served in
        time."""
        unknown = not life.first_late(now_ns)
        for tally in self._tallies(life, met=None if unknown else False):
            tally.left += 1
            tally.unknown += unknown

    def failed(self, life: Life) -> None:
        """The fleet ended it."""
        for tally in self._tallies(life, met=False):
            tally.failed += 1

    def _tallies(self, life: Life, *, met: bool | None) -> list[Tally]:
        """The groups of a request, with it in them; none where it is not counted. ``met`` None is
        not known."""
        if not self.counts(life):
            return []
        outcome, request = self.outcome, life.request
        found = [outcome.whole, outcome.models.setdefault(life.model, Tally())]
        if request.slo_class:
            found.append(outcome.classes.setdefault(request.slo_class, Tally()))
        if request.tenant:
            found.append(outcome.tenants.setdefault(request.tenant, Tally()))
        for tally in found:
            tally.requests += 1
            tally.met += bool(met)
            tally.degraded += life.degraded
            tally.retries += life.tries - 1
        if met is not None:
            batch = self._numbers.index(life.ask.number) * BATCHES // len(self._numbers)
            requests, good = outcome.batches[batch]
            outcome.batches[batch] = (requests + 1, good + met)
        return found
