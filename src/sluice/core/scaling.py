"""How many replicas of a model are to serve, and how many are to be loaded: decided every period.

The need is the work that is forecast for when a replica started now would serve, over the share of
its speed that is planned with, and what drains the backlog; not less than the places and the KV
memory in use take, nor than the least that is allowed or scheduled. Requests that wait too long or
are refused, and memory about to run out, ask for more than that, never for less. Replicas that are
on their way count, so that the same need is not met twice. Fewer serve only when that was enough
for all of a long window, a little at a time.

The processor's load is no signal: an engine that computes one answer looks as busy as one that
cannot keep up. Called by ``core/supply.py``, which knows the replicas; docs/scaling.md explains.
"""

from collections import deque
from dataclasses import dataclass, replace
from math import ceil

from sluice.core.admission import NS_PER_S
from sluice.core.forecast import PERIOD_NS, Arrivals, Forecast
from sluice.core.limits import ScaleLimits

# Of the places, and of the KV memory, that are planned with.
PLACES_SHARE = 0.9
KV_SHARE = 0.85
KV_PRESSURE = 0.92
LATE_SHARE = 0.05
LATE_PERIODS = 2
STEP_UP = 0.15
# Going down: to what was enough for the whole window, so much at a time.
WINDOW_NS = 600 * NS_PER_S
STEP_DOWN = 0.15
STEP_DOWN_NS = 120 * NS_PER_S
# How fast the cost of work follows what replicas did while they had more than they could do.
COST_LEARNED = 0.05
COST_BOUNDS = (0.5, 4.0)
STARTS_KNOWN = 20
START_QUANTILE = 0.9
# After so long without a decision, or after the clock went back, what was seen tells nothing.
GAP_NS = 60 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Standing:
    """The replicas of a model at the time of a decision.

    ``coming`` will serve without being asked again, ``warm`` are loaded or will be and serve when
    they are asked to. ``waiting_s`` is the work of the waiting in replica seconds. ``stale`` says
    that a replica with work has not told of itself for long.
    """

    serving: int
    coming: int
    warm: int
    requests: int
    waiting: int
    waiting_s: float
    places: float
    kv: float
    stale: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """``number`` replicas are to serve or be on their way, ``loaded`` with the warm ones.

    ``reason`` names the term that decided, ``terms`` are all of them, in replicas. ``needed`` is
    the number without the bounds of the model and of the last one, ``most`` the greatest that is
    allowed; ``short_of`` was needed of late where that is more. ``start_ns`` and ``wake_ns`` are
    the times until a cold and a warm replica serve that were planned with.
    """

    number: int
    loaded: int
    reason: str
    needed: int = 0
    terms: tuple[tuple[str, float], ...] = ()
    most: int = 0
    short_of: int | None = None
    start_ns: int = 0
    wake_ns: int = 0


class Times:
    """How long replicas took until they were ready; nine of ten are after ``lead_ns``."""

    def __init__(self, unknown_ns: int) -> None:
        self.lead_ns = unknown_ns
        self._times: deque[int] = deque(maxlen=STARTS_KNOWN)

    def took(self, duration_ns: int) -> None:
        """One was ready after so long, or had not become it."""
        self._times.append(duration_ns)
        times = sorted(self._times)
        self.lead_ns = times[ceil(START_QUANTILE * len(times)) - 1]


class Scaler:
    """Counts what is asked of one model and decides.

    ``pinned`` is the number that somebody else decided on. ``decision`` is the last one, the next
    is due at ``due_ns``. ``leave_ns`` is when the first of the replicas that drain has to be gone,
    ``None`` where none drains.
    """

    def __init__(self, limits: ScaleLimits) -> None:
        self.limits = limits
        self.starts = Times(limits.start_ns)
        self.wakes = Times(NS_PER_S)
        self.pinned: int | None = None
        self.decision = Decision(0, 0, "start")
        self.cost = 1.0
        self.asked_ns: int | None = None
        self.due_ns = 0
        self.leave_ns: int | None = None
        self._serving = self._began_ns = 0
        self._preempted = False
        self._begin(0)

    # ------------------------------------------------------------------------------------- facts

    def asked(self, work_s: float, now_ns: int) -> None:
        """A request came, whatever becomes of it; it takes so many replica seconds."""
        self._asked += 1
        self._asked_s += work_s
        self.asked_ns = now_ns

    def began(self, work_s: float, wait_ns: int) -> None:
        """A request was given to a replica after so long a wait."""
        self._taken_s += work_s
        self._late += wait_ns > self.limits.wait_ns

    def refused(self) -> None:
        """A request was refused, or given up, for want of replicas."""
        self._late += 1

    def preempted(self, count: int) -> None:
        """A replica took so many sequences' memory away."""
        self._preempted |= count > 0

    # ---------------------------------------------------------------------------------- decision

    def decide(self, now: Standing, now_ns: int) -> Decision:
        """How many there are to be. What was asked since the last time is the last period."""
        passed_ns, self.due_ns = now_ns - self._began_ns, now_ns + PERIOD_NS
        if not 0 <= passed_ns <= GAP_NS:
            self._begin(now_ns)
        elif passed_ns >= PERIOD_NS // 2:
            self._period_over(now, passed_ns / NS_PER_S)
            self._began_ns = now_ns
        quantile, leads = self.limits.quantile, (self.starts.lead_ns, self.wakes.lead_ns)
        far = self._replicas(self._far.look(leads[0] + PERIOD_NS, quantile, now_ns), now)
        near = far
        if self.limits.warm:
            near = self._replicas(self._near.look(leads[1] + PERIOD_NS, quantile, now_ns), now)
        terms = self._floors(now, now_ns)
        if terms.get("asked") != 0.0:  # else it may be idle
            terms |= {"forecast": near} | self._overrides(now)
        reason = max(terms, key=terms.__getitem__)
        needed = ceil(terms[reason] - 1e-9)
        number, reason = self._bounded(now, needed, reason, now_ns)
        if self.pinned is not None:
            number = max(self.limits.replicas_min, min(self.limits.replicas_max, self.pinned))
            reason = "pinned"
        loaded = max(number + self.limits.warm, ceil(far - 1e-9) if self.limits.warm else number)
        told = tuple((name, round(value, 3)) for name, value in terms.items())
        most = self.limits.replicas_max
        peak = self._needs[0][1]
        inputs = (most, peak if peak > most else None, self.starts.lead_ns, self.wakes.lead_ns)
        self.decision = Decision(number, min(most, loaded), reason, needed, told, *inputs)
        return self.decision

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time for the next decision, or the clock went back."""
        return not 0 < self.due_ns - now_ns <= PERIOD_NS

    def more(self, reason: str, now: Standing, now_ns: int) -> Decision:
        """Let as many of the warm serve as work off what waits; a need like any other."""
        number = self.decision.number + min(now.warm, max(1, ceil(self._backlog(now))))
        number = min(self.limits.replicas_max, number)
        self._need(number, now_ns)
        loaded = max(number, self.decision.loaded)
        self.decision = replace(self.decision, number=number, loaded=loaded, reason=reason)
        return self.decision

    def _begin(self, now_ns: int) -> None:
        """What is asked is seen from now on."""
        self._arrivals = Arrivals()
        self._far, self._near = Forecast(self._arrivals), Forecast(self._arrivals)
        self._asked_s = self._taken_s = 0.0
        self._asked = self._late = self._late_periods = 0
        self._needs: deque[tuple[int, int]] = deque()
        self._began_ns = self._seen_ns = self._down_ns = now_ns

    def _period_over(self, now: Standing, period_s: float) -> None:
        self._arrivals.add(self._asked_s / period_s)
        late = self._asked > 0 and self._late > LATE_SHARE * self._asked
        self._late_periods = self._late_periods + 1 if late else 0
        done = self._taken_s / (period_s * max(1, now.serving))
        steady, full = now.serving == self._serving > 0, late and now.waiting > 0
        if steady and done > 0.0 and (full or done * self.cost > 1.0):
            cost = min(COST_BOUNDS[1], max(COST_BOUNDS[0], 1.0 / done))
            self.cost += COST_LEARNED * (cost - self.cost)
        self._asked_s = self._taken_s = 0.0
        self._asked = self._late = 0
        self._serving = now.serving

    def _replicas(self, rate: float, now: Standing) -> float:
        """Replicas for work at this rate, and for what waits."""
        return rate / self.limits.utilisation * self.cost + self._backlog(now)

    def _backlog(self, now: Standing) -> float:
        """Replicas for what waits, to be gone in time or when more can serve."""
        drain_ns = max(self.limits.drain_ns, self.starts.lead_ns if not now.warm else 0)
        return now.waiting_s * NS_PER_S / drain_ns * self.cost

    def _floors(self, now: Standing, now_ns: int) -> dict[str, float]:
        limits = self.limits
        floors = {
            "least": float(limits.replicas_min),
            "places": now.places / PLACES_SHARE,
            "kv": now.kv / KV_SHARE,
        }
        if limits.replicas_min == 0:
            lately = self.asked_ns is not None and now_ns - self.asked_ns < limits.idle_ns
            floors["asked"] = float(lately or now.requests > 0)
        lead_ns = self.starts.lead_ns + PERIOD_NS
        scheduled = [
            peak.replicas
            for peak in limits.peaks
            if (now_ns - peak.begin_ns + lead_ns) % peak.every_ns
            < peak.end_ns - peak.begin_ns + lead_ns
        ]
        if scheduled:
            floors["schedule"] = float(max(scheduled))
        return floors

    def _overrides(self, now: Standing) -> dict[str, float]:
        """What users feel asks for more at once, unless more is on its way."""
        preempted, self._preempted = self._preempted, False
        if now.coming or not now.serving:
            return {}
        more = now.serving + max(1.0, STEP_UP * now.serving)
        overrides = {}
        if self._late_periods >= LATE_PERIODS and not now.warm:  # a warm one is woken before that
            overrides["queue_wait"] = more
        if preempted or now.kv > KV_PRESSURE * now.serving:
            overrides["kv_pressure"] = more
        return overrides

    def _bounded(self, now: Standing, needed: int, reason: str, now_ns: int) -> tuple[int, str]:
        """The need within its limits, and not lower than a long window allows."""
        window_ns = max(WINDOW_NS, 2 * self.starts.lead_ns)
        while self._needs and self._needs[0][0] < now_ns - window_ns:
            self._needs.popleft()
        self._need(needed, now_ns)
        current = now.serving + now.coming
        nobody = not needed and not now.requests  # for so long that it may be idle
        if needed < current and not nobody:
            lowest = self._needs[0][1]
            unsure = now.stale or now.waiting > 0 or now_ns - self._seen_ns < window_ns
            if unsure or lowest >= current or now_ns - self._down_ns < STEP_DOWN_NS:
                needed, reason = current, "held"
            else:
                needed = max(lowest, current - max(1, int(STEP_DOWN * current)))
                reason, self._down_ns = "surplus", now_ns
        return min(self.limits.replicas_max, needed), reason

    def _need(self, number: int, now_ns: int) -> None:
        """Keep what was needed; the greatest of what is kept comes first."""
        while self._needs and self._needs[-1][1] <= number:
            self._needs.pop()
        self._needs.append((now_ns, number))
