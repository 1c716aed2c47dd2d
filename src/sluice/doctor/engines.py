"""What engines elsewhere tell of themselves, in the two windows: queue, memory, and stages of time.

From the samples that the gateway takes when it probes them. Counters that went back belong to an
engine that started again: what they show then is what grew. Nothing is judged here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sluice.doctor.columns import Sample
from sluice.doctor.scene import Moved, Scene, increase, moved
from sluice.doctor.windows import Window

# The samples of a window that it takes to say anything.
SAMPLES_MIN = 5
STAGES = ("queue", "prefill", "decode")
# What the engine's queue must grow by to matter.
QUEUED_S_MIN = 0.005


@dataclass(frozen=True, slots=True)
class Told:
    """Mean seconds of requests in a stage of the engine, before and in the incident."""

    before_s: float
    after_s: float

    @property
    def grown_s(self) -> float:
        """How much longer it takes."""
        return max(0.0, self.after_s - self.before_s)


@dataclass(frozen=True, eq=False)
class Engines:
    """The samples around one scene."""

    scene: Scene

    @property
    def _windows(self) -> tuple[Window, Window]:
        return self.scene.windows.baseline, self.scene.windows.incident

    @cached_property
    def tell(self) -> bool:
        """Whether there are samples of both windows."""
        return min(len(self._inside(window)) for window in self._windows) >= SAMPLES_MIN

    def gauge(self, name: str) -> Moved | None:
        """A gauge over all engines, ``None`` where they have none."""
        values = [
            np.array([v for s in self._inside(w) if (v := getattr(s, name)) is not None])
            for w in self._windows
        ]
        if min(len(each) for each in values) < SAMPLES_MIN:
            return None
        return moved(values[0].astype(float), values[1].astype(float), self.scene.seed)

    def rate(self, counter: str) -> tuple[float, float] | None:
        """How fast a counter grew per second, over all engines."""
        grown = self._grown(counter)
        if grown is None:
            return None
        found = []
        for window, amount in zip(self._windows, grown, strict=True):
            times_ns = [each.t_ns for each in self._inside(window)]
            found.append(1e9 * amount / max(1.0, times_ns[-1] - times_ns[0]))
        return found[0], found[1]

    def stage(self, name: str) -> Told | None:
        """Mean seconds of a stage; ``None`` where engines do not tell, or no request passed it."""
        seconds, counts = self._grown(f"{name}_s"), self._grown(f"{name}_count")
        if seconds is None or counts is None or min(counts) <= 0:
            return self._prefill() if name == "prefill" else None
        return Told(seconds[0] / counts[0], seconds[1] / counts[1])

    def _prefill(self) -> Told | None:
        """From the time to the first token and the queue, of engines that tell these."""
        first, queue = self.stage("first_token"), self.stage("queue")
        if first is None or queue is None:
            return None
        return Told(
            max(0.0, first.before_s - queue.before_s), max(0.0, first.after_s - queue.after_s)
        )

    def stages(self) -> dict[str, Told]:
        """All stages that are told."""
        found = {name: self.stage(name) for name in STAGES}
        return {name: told for name, told in found.items() if told is not None}

    @property
    def queues(self) -> bool:
        """Whether requests wait in the engine for longer than before."""
        queue = self.stage("queue")
        return queue is not None and queue.grown_s > max(QUEUED_S_MIN, 0.1 * queue.before_s)

    @property
    def queue_share(self) -> float:
        """The part of the engine's own queue in what the time to the first token grew by."""
        stages = self.stages()
        if not self.queues:
            return 0.0
        prefill_s = stages["prefill"].grown_s if "prefill" in stages else 0.0
        whole_s = stages["queue"].grown_s + prefill_s
        return stages["queue"].grown_s / whole_s if whole_s > 0 else 0.0

    def _inside(self, window: Window) -> Sequence[Sample]:
        return [
            each
            for each in self.scene.journal.samples
            if window.start_ns <= each.t_ns < window.end_ns
        ]

    def _grown(self, counter: str) -> tuple[float, float] | None:
        """By how much a counter of all engines grew in each window."""
        found = []
        for window in self._windows:
            values: dict[str, list[float]] = {}
            for each in self._inside(window):
                if counter in each.counters:
                    values.setdefault(each.replica, []).append(each.counters[counter])
            if not values:
                return None
            found.append(sum(increase(np.array(each)) for each in values.values()))
        return found[0], found[1]
