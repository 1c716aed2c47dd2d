"""A journal as columns: one row per request, per step and per chunk of prefill.

Made by ``reading``; ``diagnosis`` works on them. Times are nanoseconds of the wall clock of the
machine that wrote them. A missing number is NaN, a missing name the empty one. Nothing is judged
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice.core.request import Request
from sluice.core.roster import BatchingLimits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

OTHERS = "(others)"


class NoRequests(Exception):
    """A journal in which there is nothing to diagnose; the message says what it holds."""


class Names:
    """Numbers for names, in the order in which they were first seen."""

    def __init__(self, most: int | None = None) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._most = most

    def number(self, name: str) -> int:
        """The number of a name; beyond the most that are told apart, that of all others."""
        found = self._numbers.get(name)
        if found is None:
            if self._most is not None and len(self.names) >= self._most:
                name = OTHERS
                if name in self._numbers:
                    return self._numbers[name]
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
        return found


@dataclass(frozen=True, eq=False)
class Requests:
    """One row per request, in order of arrival: ``numbers`` and the numbers of ``names``."""

    ids: list[str]
    numbers: dict[str, Floats]
    names: dict[str, Ints]
    of: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, column: str) -> Floats:
        return self.numbers[column]


@dataclass(frozen=True, eq=False)
class Steps:
    """One row per step that was computed, in order of time, and one per chunk.

    ``pause_ns`` is how long before it the replica computed nothing though it had work,
    ``kv_blocks`` how many of ``kv_total`` blocks were held.
    """

    replica: Ints
    end_ns: Floats
    measured_ns: Floats
    pause_ns: Floats
    rows: Floats
    prefill: Floats
    chunk_context: Floats
    kv_blocks: Floats
    kv_total: Floats
    running: Floats
    waiting: Floats
    chunk_step: Ints
    chunk_request: Ints
    chunk_tokens: Floats

    def __len__(self) -> int:
        return len(self.end_ns)


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """A replica became ready with these limits, or was lost."""

    t_ns: float
    replica: str
    model: str
    state: str
    block_size: int
    blocks_total: int
    sequences_max: int
    context_tokens_max: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine elsewhere told of itself; ``None`` where it has no such number.

    ``counters`` are since its own start, which may be another one than that of the sample before.
    """

    t_ns: float
    replica: str
    waiting: float | None
    running: float | None
    kv_use: float | None
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HostSample:
    """What the process of a replica had of the processors since its own start."""

    t_ns: float
    replica: str
    used_ns: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class Change:
    """Something that was deployed, and in which settings it differs."""

    t_ns: float
    what: str
    version: str
    details: dict[str, str]


@dataclass(frozen=True, eq=False)
class Journal:
    """All that diagnosis looks at. ``classes`` are the targets that requests of each class had."""

    requests: Requests
    steps: Steps
    replicas: tuple[ReplicaChange, ...]
    changes: tuple[Change, ...]
    gaps: tuple[tuple[float, int], ...]
    samples: tuple[Sample, ...]
    hosts: tuple[HostSample, ...]
    starts: dict[str, list[tuple[float, BatchingLimits]]]
    classes: dict[str, Request]
    duplicates: int
    problems: tuple[str, ...]
