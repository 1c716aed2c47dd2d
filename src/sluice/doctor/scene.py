"""What the checks look at: the requests and steps of two windows, and whether a number moved.

Made once per diagnosis; nothing is judged here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sluice.doctor.columns import Floats, Ints, Journal, Mask, Requests, Steps
from sluice.doctor.lengths import bar_of
from sluice.doctor.speeds import Speeds
from sluice.doctor.spike import Spike, block_length, latency_of
from sluice.doctor.windows import Window, Windows
from sluice.doctor.world import World

# Names of events that a doctor raises, which explain nothing, begin so; see ``alarm``.
OWN_EVENTS = "doctor."
# What a time must grow by, as a share, for an engine to be slower.
SLOWER_MIN = 0.06
_DRAWS = 400
# Bounds of a moved number hold in 99 of 100.
_TAIL = 0.005


@dataclass(frozen=True, slots=True)
class Moved:
    """A mean before and in the incident, and bounds of its difference."""

    before: float
    after: float
    low: float
    high: float

    @property
    def rose(self) -> bool:
        """It is higher, and not by chance."""
        return self.low > 0.0

    @property
    def fell(self) -> bool:
        """It is lower, and not by chance."""
        return self.high < 0.0

    @property
    def ratio(self) -> float:
        """What it is of what it was; infinite where it was zero."""
        if self.before <= 0.0:
            return np.inf if self.after > 0.0 else 1.0
        return self.after / self.before

    def rose_by(self, share: float) -> bool:
        """It is higher for sure, and by at least this share of what it was."""
        return self.rose and self.after - self.before >= share * abs(self.before)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    ``present`` says that its mechanism moved. ``remove`` gives the world without it, for replay;
    ``span_s`` are the seconds of each request (of the journal) that would not be, where no replay
    is needed; where they are ``played``, they come before the fleet, and a replay has them too.
    ``missing`` names a signal without which nothing can be said. ``controls`` are things
    that must not have moved if this is the cause, with whether they held. ``series`` is
    the mechanism as a number for each request. ``downstream`` marks what other causes bring about.
    """

    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    remove: Callable[[World], World] | None = None
    span_s: Floats | None = None
    played: bool = False
    missing: str = ""
    controls: tuple[tuple[str, bool], ...] = ()
    series: Floats | None = None
    downstream: bool = False
    next_look: str = ""
    present: bool = True


def absent(*against: str) -> Finding:
    """The mechanism did not move, and how that shows."""
    return Finding(against=against, present=False)


def unknown(missing: str) -> Finding:
    """A signal is missing that it takes to tell."""
    return Finding(missing=missing, present=False)


@dataclass(frozen=True, eq=False)
class Scene:
    """A journal around one spike. ``before`` and ``after`` are rows of requests."""

    journal: Journal
    windows: Windows
    spike: Spike
    seed: int = 1

    @property
    def requests(self) -> Requests:
        """All requests."""
        return self.journal.requests

    @property
    def steps(self) -> Steps:
        """All steps."""
        return self.journal.steps

    @cached_property
    def before(self) -> Ints:
        """Requests of the baseline."""
        return np.flatnonzero(self.windows.baseline.of(self.requests))

    @cached_property
    def after(self) -> Ints:
        """Requests of the incident."""
        return np.flatnonzero(self.windows.incident.of(self.requests))

    @cached_property
    def steps_before(self) -> Mask:
        """Steps of the baseline."""
        return self._steps_in(self.windows.baseline)

    @cached_property
    def steps_after(self) -> Mask:
        """Steps of the incident."""
        return self._steps_in(self.windows.incident)

    @cached_property
    def speeds(self) -> Speeds:
        """How fast steps are, by what is in them."""
        return Speeds.of(self.journal, self.windows)

    @cached_property
    def latency_s(self) -> Floats:
        """The metric of the spike."""
        return latency_of(self.requests, self.spike.metric)

    @cached_property
    def tail(self) -> Ints:
        """Requests of the incident that are slower than the percentile was before."""
        bar = self.spike.before_s or 0.0
        late = self.latency_s[self.after] > bar
        return self.after[late]

    @cached_property
    def has_steps(self) -> bool:
        """Whether steps of both windows were recorded."""
        return bool(self.steps_before.sum() >= 20 and self.steps_after.sum() >= 20)

    @cached_property
    def is_long(self) -> Mask:
        """Requests with longer prompts than ``lengths.bar_of`` leaves to the usual ones."""
        prompt = self.requests["prompt"]
        found: Mask = prompt > bar_of(prompt[self.before], prompt[self.after])
        return found

    def moved(self, values: Floats, keep: Mask | None = None) -> Moved:
        """Means of a number of requests in the two windows, NaN left out."""
        kept = ~np.isnan(values) if keep is None else keep & ~np.isnan(values)
        before, after = self.before[kept[self.before]], self.after[kept[self.after]]
        return moved(values[before], values[after], self.seed)

    def steps_moved(self, values: Floats, keep: Mask | None = None) -> Moved:
        """Means of a number of steps in the two windows."""
        before, after = self.steps_before, self.steps_after
        if keep is not None:
            before, after = before & keep, after & keep
        return moved(values[before], values[after], self.seed)

    def rate_moved(self, chosen: Mask) -> Moved:
        """Requests per second in the two windows, by slices of time."""
        counts = [
            _counts(self.requests["arrived_ns"][rows][chosen[rows]], window)
            for rows, window in (
                (self.before, self.windows.baseline),
                (self.after, self.windows.incident),
            )
        ]
        return moved(counts[0], counts[1], self.seed)

    def _steps_in(self, window: Window) -> Mask:
        end_ns = self.steps.end_ns
        found: Mask = (end_ns >= window.start_ns) & (end_ns < window.end_ns)
        return found


def moved(before: Floats, after: Floats, seed: int) -> Moved:
    """Means and bounds of their difference, by a bootstrap of blocks of neighbours."""
    if not len(before) or not len(after):
        means = [float(each.mean()) if len(each) else np.nan for each in (before, after)]
        return Moved(means[0], means[1], -np.inf, np.inf)
    draw = np.random.default_rng(seed)
    drawn = _means_drawn(after, draw) - _means_drawn(before, draw)
    low, high = np.quantile(drawn, (_TAIL, 1 - _TAIL))
    return Moved(float(before.mean()), float(after.mean()), float(low), float(high))


def beyond(scene: Scene, seconds: Floats, keep: Mask) -> Floats:
    """By how much each request of the incident exceeds the baseline's request of the same rank."""
    found = np.zeros(len(seconds))
    keep = keep & ~np.isnan(seconds)
    usual = np.sort(seconds[scene.before[keep[scene.before]]])
    rows = scene.after[keep[scene.after]]
    if not len(usual) or not len(rows):
        return found
    rank = (np.argsort(np.argsort(seconds[rows])) + 0.5) / len(rows)
    found[rows] = np.maximum(0.0, seconds[rows] - np.quantile(usual, rank))
    return found


def increase(values: Floats) -> float:
    """By how much a counter grew; where it went back it had begun at 0 again."""
    steps = np.diff(values)
    return float(np.where(steps >= 0, steps, values[1:]).sum())


def times(seconds: Moved) -> str:
    """Two means in words."""
    return f"{1e3 * seconds.before:,.0f} → {1e3 * seconds.after:,.0f} ms"


def _means_drawn(values: Floats, draw: np.random.Generator) -> Floats:
    length = block_length(len(values))
    blocks = len(values) // length
    means = values[: blocks * length].reshape(blocks, length).mean(axis=1)
    # A handful of blocks understates how far their mean may be off.
    centre = means.mean()
    widen = np.sqrt(blocks / max(1, blocks - 1))
    picked = means[draw.integers(0, blocks, (_DRAWS, blocks))].mean(axis=1)
    found: Floats = centre + widen * (picked - centre)
    return found


def _counts(arrived_ns: Floats, window: Window) -> Floats:
    slices = 24
    edges = np.linspace(window.start_ns, window.end_ns, slices + 1)
    found, _ = np.histogram(arrived_ns, edges)
    return found / (window.duration_s / slices)
