"""What happened, as something that can be played again: requests, and replicas with their speed.

``world_of`` takes one model's part of a journal around an incident. ``edits`` in ``causes`` change
a world; ``replaying`` plays it. Of long incidents the beginning is taken, with what led to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sluice.core.costmodel import Coefficients
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits
from sluice.doctor.columns import Floats, Ints, Journal, Mask, Requests
from sluice.doctor.speeds import Speeds
from sluice.doctor.windows import Windows

PLAYED_MAX = 1000
_LEAD_SHARE = 0.25
_LEAD_MIN = 60
_BLOCKS_MAX = 1 << 24
OUTPUT_UNKNOWN = 128.0
# A start is told so shortly before or behind the replica is ready.
_STARTED_NS = 5e9
# What may wait for each replica where no request was refused for want of a place.
QUEUE_PLACES_MAX = 4096


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
    ``kept`` are those that come: what a tenant's own limits refused never did. ``pinned`` says that
    each request goes to the replica that it went to. Clients leave at ``left_ns``, if they have no
    whole answer by then. So many may wait for each replica as ``queue_places_max`` says.
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
    left_ns: Floats
    tenant: Ints
    slo_class: Ints
    replica: Ints
    kept: Mask
    replicas: tuple[ReplicaWorld, ...]
    classes: dict[int, Request]
    tenants: list[str]
    queue_places_max: int = QUEUE_PLACES_MAX
    pinned: bool = False

    def changed(self, **columns: object) -> "World":
        """The same with other columns."""
        return replace(self, **columns)  # type: ignore[arg-type]


def world_of(journal: Journal, windows: Windows, model: int, speeds: Speeds) -> World | None:
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
    replicas = _replicas(journal, speeds, names[0], began_ns)
    if not replicas:
        return None
    known = {replica.name: number for number, replica in enumerate(replicas)}
    place = np.array([known.get(name, -1) for name in requests.of["replica"]])
    output = requests["completion"][rows]
    left = requests["left"][rows] > 0
    usual = np.nanmedian(output) if np.any(output > 0) else OUTPUT_UNKNOWN
    return World(
        began_ns=began_ns,
        rows=rows,
        judged=incident[rows],
        arrived_ns=requests["arrived_ns"][rows] - began_ns,
        seen_ns=requests["seen_ns"][rows] - began_ns,
        prompt=requests["prompt"][rows],
        cached=_cached(requests, rows),
        # Of an answer whose client left no more is known than what was made of it.
        output=np.where(output > 0, np.where(left, np.fmax(output, usual), output), usual),
        left_ns=np.where(
            left, np.fmax(requests["ended_ns"], requests["seen_ns"])[rows] - began_ns, np.inf
        ),
        output_max=np.maximum(requests["output_max"][rows], 1.0),
        tenant=requests.names["tenant"][rows],
        slo_class=requests.names["slo_class"][rows],
        replica=place[requests.names["replica"][rows]],
        kept=requests["limited"][rows] == 0,
        replicas=replicas,
        classes=_classes(journal),
        tenants=requests.of["tenant"],
        queue_places_max=_queue_places(requests["places_max"][rows], replicas),
    )


def _cached(requests: Requests, rows: Ints) -> Floats:
    """Cached tokens; what is cached shows where a prompt is computed, the others have the usual."""
    cached, begun = requests["cached"][rows], ~np.isnan(requests["ttft_ns"][rows])
    known = begun & ~np.isnan(cached)
    usual = float(np.median(cached[known])) if np.any(known) else 0.0
    return np.where(known, cached, usual)


def _queue_places(places_max: Floats, replicas: Sequence[ReplicaWorld]) -> int:
    """What may wait for each replica, from the bound on all places at which requests were refused.

    That bound counts what runs too. Where none was refused for it, it does not matter.
    """
    if np.all(np.isnan(places_max)):
        return QUEUE_PLACES_MAX
    run = sum(replica.limits[0][1].sequences_max for replica in replicas)
    waiting = (float(np.nanmax(places_max)) - run) / len(replicas)
    return int(np.clip(waiting, 1, QUEUE_PLACES_MAX))


def _classes(journal: Journal) -> dict[int, Request]:
    names = journal.requests.of["slo_class"]
    return {
        number: journal.classes[name]
        for number, name in enumerate(names)
        if name in journal.classes
    }


def _replicas(
    journal: Journal, speeds: Speeds, model: str, began_ns: float
) -> tuple[ReplicaWorld, ...]:
    names = list(dict.fromkeys(c.replica for c in journal.replicas if c.model == model))
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
    starts = [(t_ns - began_ns, limits) for t_ns, limits in journal.starts.get(name, ())]
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
    # A server that was stopped and started again told of no loss.
    for t_ns, _ in journal.starts.get(name, ())[1:]:
        at = t_ns - began_ns
        if at > 0.0 and not any(gone <= at <= back + _STARTED_NS for gone, back in found):
            found.append((at, at))
    return tuple(sorted(found))
