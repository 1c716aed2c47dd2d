"""What happened, as something that can be played again: requests, and replicas with their speed.

``world_of`` takes one model's part of a journal around an incident. ``edits`` in ``causes`` change
a world; ``replaying`` plays it. Of long incidents the beginning is taken, with what led to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sluice.core.costmodel import TYPICAL, Coefficients, nonnegative_least_squares
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits
from sluice.doctor.columns import Floats, Ints, Journal, Mask
from sluice.doctor.windows import Windows

PLAYED_MAX = 1000
_LEAD_SHARE = 0.25
_LEAD_MIN = 60
_BIN_STEPS = 25
_BIN_S_MIN = 1.0
# Factors closer than this are taken as one.
_FACTOR_STEP = 0.04
# A step this much beyond its prediction was stalled: it says nothing of the usual speed.
_RATIO_MAX = 3.0
STEPS_MIN = 60
_BLOCKS_MAX = 1 << 24
OUTPUT_UNKNOWN = 128.0


@dataclass(frozen=True, slots=True)
class ReplicaWorld:
    """One replica: what it may hold from which time on, its speed, and when it was away.

    A step takes ``coefficients`` times the ``factors`` entry that holds at its time.
    """

    name: str
    limits: tuple[tuple[float, BatchingLimits], ...]
    coefficients: Coefficients
    factors: tuple[tuple[float, float], ...]
    away: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class World:
    """Requests by row and the replicas. ``rows`` are those of the journal, in order of arrival.

    Times are nanoseconds since ``began_ns``. ``judged`` are the requests of the incident.
    ``pinned`` says that each request goes to the replica that it went to.
    """

    began_ns: float
    rows: Ints
    judged: Mask
    arrived_ns: Floats
    seen_ns: Floats
    prompt: Floats
    cached: Floats
    output: Floats
    output_max: Floats
    tenant: Ints
    slo_class: Ints
    replica: Ints
    kept: Mask
    replicas: tuple[ReplicaWorld, ...]
    classes: dict[int, Request]
    tenants: list[str]
    pinned: bool = False

    def changed(self, **columns: object) -> "World":
        """The same with other columns."""
        return replace(self, **columns)  # type: ignore[arg-type]


def world_of(journal: Journal, windows: Windows, model: int) -> World | None:
    """What can be played of the incident; ``None`` where steps or requests are too few to tell."""
    requests = journal.requests
    mine = requests.names["model"] == model
    incident = windows.incident.of(requests) & mine & (requests["prompt"] > 0)
    first = np.flatnonzero(incident)
    if len(first) < 2 or not len(journal.steps):
        return None
    before = np.flatnonzero(mine & (requests["prompt"] > 0) & ~incident)
    before = before[before < first[0]]
    lead = int(min(len(before), max(_LEAD_MIN, _LEAD_SHARE * len(first), 0), PLAYED_MAX // 4))
    rows = np.concatenate((before[len(before) - lead :], first[: PLAYED_MAX - lead]))
    began_ns = float(min(requests["arrived_ns"][rows].min(), requests["seen_ns"][rows].min()))
    names = [journal.requests.of["model"][model]]
    replicas = _replicas(journal, windows, names[0], began_ns)
    if not replicas:
        return None
    known = {replica.name: number for number, replica in enumerate(replicas)}
    place = np.array([known.get(name, -1) for name in requests.of["replica"]])
    output = requests["completion"][rows]
    usual = np.nanmedian(output) if np.any(output > 0) else OUTPUT_UNKNOWN
    return World(
        began_ns=began_ns,
        rows=rows,
        judged=incident[rows],
        arrived_ns=requests["arrived_ns"][rows] - began_ns,
        seen_ns=requests["seen_ns"][rows] - began_ns,
        prompt=requests["prompt"][rows],
        cached=np.nan_to_num(requests["cached"][rows]),
        output=np.where(output > 0, output, usual),
        output_max=np.maximum(requests["output_max"][rows], 1.0),
        tenant=requests.names["tenant"][rows],
        slo_class=requests.names["slo_class"][rows],
        replica=place[requests.names["replica"][rows]],
        kept=np.ones(len(rows), dtype=bool),
        replicas=replicas,
        classes=_classes(journal),
        tenants=requests.of["tenant"],
    )


def _classes(journal: Journal) -> dict[int, Request]:
    names = journal.requests.of["slo_class"]
    return {
        number: journal.classes[name]
        for number, name in enumerate(names)
        if name in journal.classes
    }


def _replicas(
    journal: Journal, windows: Windows, model: str, began_ns: float
) -> tuple[ReplicaWorld, ...]:
    names = list(dict.fromkeys(c.replica for c in journal.replicas if c.model == model))
    speeds = Speeds.of(journal, windows)
    found = []
    for name in names:
        limits = _limits(journal, name, began_ns)
        if limits:
            number = _number(journal.requests.of["replica"], name)
            factors = ((0.0, 1.0),) if number is None else speeds.factors(number, began_ns)
            away = _away(journal, name, began_ns)
            found.append(ReplicaWorld(name, limits, speeds.coefficients, factors, away))
    return tuple(found)


def _number(names: Sequence[str], name: str) -> int | None:
    return names.index(name) if name in names else None


def _limits(
    journal: Journal, name: str, began_ns: float
) -> tuple[tuple[float, BatchingLimits], ...]:
    """What the replica may hold; the first entry holds from the beginning."""
    starts = [(t_ns - began_ns, limits) for t_ns, limits, _ in journal.starts.get(name, ())]
    if not starts:
        starts = [
            (
                change.t_ns - began_ns,
                BatchingLimits(
                    change.context_tokens_max,
                    change.block_size,
                    change.blocks_total,
                    change.sequences_max,
                ),
            )
            for change in journal.replicas
            if change.replica == name and change.blocks_total
        ]
    starts = [start for start in starts if _is_replica(start[1])]
    starts.sort(key=lambda start: start[0])
    past = [start for start in starts if start[0] <= 0.0]
    later = [start for start in starts if start[0] > 0.0]
    found = [*past[-1:], *later]
    # A restart with the limits that it had changes nothing.
    return tuple(
        start for place, start in enumerate(found) if not place or start[1] != found[place - 1][1]
    )


def _is_replica(limits: BatchingLimits) -> bool:
    """Whether a replica can have these limits: a replay has memory for each of its blocks."""
    counts = (limits.context_tokens_max, limits.block_size, limits.sequences_max)
    return 0 < limits.blocks_total <= _BLOCKS_MAX and all(0 < one < 1 << 31 for one in counts)


def _away(journal: Journal, name: str, began_ns: float) -> tuple[tuple[float, float], ...]:
    """When it was not there: from its loss, or the beginning, to when it was ready."""
    found: list[tuple[float, float]] = []
    gone: float | None = 0.0
    for change in journal.replicas:
        if change.replica != name:
            continue
        at = change.t_ns - began_ns
        if change.state == "ready" and gone is not None:
            if at > 0.0:
                found.append((max(0.0, gone), at))
            gone = None
        elif change.state == "lost" and gone is None:
            gone = at
    if gone is not None and gone > 0.0:
        found.append((gone, np.inf))
    return tuple(found)


@dataclass(frozen=True, eq=False, slots=True)
class Speeds:
    """How long steps take: coefficients of the baseline, and each step's ratio to them."""

    coefficients: Coefficients
    replica: Ints
    end_ns: Floats
    ratio: Floats

    @classmethod
    def of(cls, journal: Journal, windows: Windows) -> "Speeds":
        """Fitted to the steps of the baseline, or to all where there are too few."""
        steps = journal.steps
        features, wall_ns = step_features(journal)
        usual = (steps.end_ns >= windows.baseline.start_ns) & (
            steps.end_ns < windows.baseline.end_ns
        )
        if np.count_nonzero(usual) < STEPS_MIN:
            usual = np.ones(len(steps), dtype=bool)
        coefficients = fitted(features[usual], wall_ns[usual])
        ratio = wall_ns / predicted(coefficients, features)
        kept = usual & (ratio < _RATIO_MAX) & (ratio > 1 / _RATIO_MAX)
        if np.count_nonzero(kept) >= STEPS_MIN:
            coefficients = fitted(features[kept], wall_ns[kept])
            ratio = wall_ns / predicted(coefficients, features)
        return cls(coefficients, steps.replica, steps.end_ns, ratio)

    def factors(self, replica: int, began_ns: float) -> tuple[tuple[float, float], ...]:
        """The ratio of a replica over time, by bins; what is alike is one entry."""
        mine = (self.replica == replica) & (self.end_ns >= began_ns)
        times, ratio = (self.end_ns[mine] - began_ns) / 1e9, self.ratio[mine]
        found = [(0.0, 1.0)]
        start = 0
        while start < len(times):
            end = max(start + _BIN_STEPS, int(np.searchsorted(times, times[start] + _BIN_S_MIN)))
            factor = float(np.mean(ratio[start:end]))
            if abs(factor - found[-1][1]) > _FACTOR_STEP:
                found.append((1e9 * float(times[start]), factor))
            start = end
        return tuple(found)


def step_features(journal: Journal) -> tuple[Floats, Floats]:
    """What was in each step in the terms of the cost model, and its wall time with its pause."""
    steps = journal.steps
    block_size = max((change.block_size for change in journal.replicas), default=1)
    context = np.where(steps.rows > 0, steps.kv_blocks * block_size, 0.0)
    features = np.stack(
        (
            np.ones(len(steps)),
            steps.rows + steps.prefill,
            steps.rows,
            context,
            steps.chunk_context,
        ),
        axis=1,
    )
    return features, steps.measured_ns + steps.pause_ns


def fitted(features: Floats, wall_ns: Floats) -> Coefficients:
    """Coefficients by non-negative least squares of relative errors."""
    scaled = features / np.array(TYPICAL) * 1e6 / wall_ns[:, None]
    gram = scaled.T @ scaled + 1e-9 * np.eye(len(TYPICAL))
    moment = scaled.sum(axis=0)
    found = [1.0] * len(TYPICAL)
    for _ in range(20):  # each call goes as far as predictions can tell, from a better start
        found = nonnegative_least_squares(gram.tolist(), moment.tolist(), found)
    return Coefficients(*(ms * 1e6 / typical for ms, typical in zip(found, TYPICAL, strict=True)))


def predicted(coefficients: Coefficients, features: Floats) -> Floats:
    """What the coefficients say of steps."""
    weights = np.array(
        (
            coefficients.step_ns,
            coefficients.token_ns,
            coefficients.row_ns,
            coefficients.decode_context_ns,
            coefficients.chunk_context_ns,
        )
    )
    found: Floats = np.maximum(1.0, features @ weights)
    return found
