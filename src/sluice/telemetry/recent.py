"""The requests and changes of the last minutes that a person wants to look at, in bounded memory.

The gateway hands in the records that it writes to its journal, whether or not one is kept. Of
requests that are over the slowest of each stretch of time stay, and the latest that were refused or
degraded. What is shown of them is the dashboard's business.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from sluice.telemetry.journal import Entry
from sluice.telemetry.life import Life, life_of
from sluice.telemetry.records import (
    AnyRecord,
    AttemptFailed,
    Deployment,
    FirstToken,
    FleetScaled,
    ReplicaChanged,
    RequestArrived,
    RequestDegraded,
    RequestDispatched,
    RequestEnded,
    RequestRefused,
    RequestRejected,
)

OfRequest = (
    RequestArrived
    | RequestDispatched
    | AttemptFailed
    | RequestDegraded
    | RequestRejected
    | FirstToken
    | RequestEnded
)
Order = Literal["e2e", "ttft"]

_STRETCH_NS = 10_000_000_000
_STRETCHES = 90
_SLOWEST_EACH = 8
_LATEST = 50
# Of one request; one that is tried again and again has more.
_RECORDS_MAX = 40


@dataclass(frozen=True, slots=True)
class Over:
    """A request that is over, with all that is known of it in order of time."""

    records: tuple[OfRequest, ...]

    @property
    def arrived(self) -> RequestArrived:
        """Its first record."""
        first = self.records[0]
        assert isinstance(first, RequestArrived)
        return first

    @property
    def last(self) -> OfRequest:
        """Its last record: its ending, or its refusal."""
        return self.records[-1]

    def life(self, offset_ns: int) -> Life:
        """Put together; ``offset_ns`` makes Unix time of the times of records."""
        entries = (Entry(one.t_ns + offset_ns, "gateway", one) for one in self.records)
        life = life_of(entries, self.arrived.id)
        assert life is not None, "a request without arrival"
        return life


@dataclass(slots=True)
class _Stretch:
    """The slowest requests that ended within some seconds, by each order; heaps."""

    began_ns: int
    slowest: dict[Order, list[tuple[int, int, Over]]] = field(
        default_factory=lambda: {"e2e": [], "ttft": []}
    )


class Recent:
    """See the module. For one thread."""

    def __init__(self) -> None:
        self._live: dict[str, list[OfRequest]] = {}
        self._stretches: deque[_Stretch] = deque(maxlen=_STRETCHES)
        self._count = 0
        self.refused: deque[Over | RequestRefused] = deque(maxlen=_LATEST)
        self.degraded: deque[Over] = deque(maxlen=_LATEST)
        self.changes: deque[Deployment | ReplicaChanged | FleetScaled] = deque(maxlen=_LATEST)

    def add(self, record: AnyRecord) -> None:
        """Take a record in."""
        match record:
            case FirstToken() | RequestDispatched() | RequestDegraded() | AttemptFailed():
                known = self._live.get(record.id)
                if known is not None and len(known) < _RECORDS_MAX:
                    known.append(record)
            case RequestArrived():
                self._live[record.id] = [record]
            case RequestEnded() | RequestRejected():
                self._over(record)
            case RequestRefused():
                self.refused.append(record)
            case Deployment() | ReplicaChanged() | FleetScaled():
                self.changes.append(record)
            case _:
                pass

    def _over(self, record: RequestEnded | RequestRejected) -> None:
        known = self._live.pop(record.id, None)
        if known is None:
            return
        over = Over((*known, record))
        if isinstance(record, RequestRejected):
            self.refused.append(over)
            return
        for one in known:
            if type(one) is RequestDegraded:
                self.degraded.append(over)
                break
        self._keep("e2e", record.t_ns, record.t_ns - record.arrived_ns, over)
        if record.ttft_ns is not None:
            self._keep("ttft", record.t_ns, record.ttft_ns, over)

    def _keep(self, order: Order, now_ns: int, duration_ns: int, over: Over) -> None:
        stretches = self._stretches
        if not stretches or now_ns - stretches[-1].began_ns >= _STRETCH_NS:
            stretches.append(_Stretch(now_ns))
        heap = stretches[-1].slowest[order]
        self._count += 1
        if len(heap) < _SLOWEST_EACH:
            heapq.heappush(heap, (duration_ns, self._count, over))
        elif duration_ns > heap[0][0]:
            heapq.heapreplace(heap, (duration_ns, self._count, over))

    def slowest(self, since_ns: int, order: Order, limit: int, model: str = "") -> list[Over]:
        """The slowest requests that ended since a time, slowest first; of all models for ``""``."""
        found = (
            entry
            for stretch in self._stretches
            if stretch.began_ns + _STRETCH_NS >= since_ns
            for entry in stretch.slowest[order]
            if entry[2].last.t_ns >= since_ns and model in {"", entry[2].arrived.model}
        )
        return [over for _, _, over in heapq.nlargest(limit, found)]

    def find(self, request_id: str) -> Over | None:
        """A request that is remembered, by its id."""
        return next((one for one in self._all() if one.arrived.id == request_id), None)

    def _all(self) -> Iterator[Over]:
        for stretch in self._stretches:
            for heap in stretch.slowest.values():
                yield from (over for _, _, over in heap)
        yield from (one for one in self.refused if isinstance(one, Over))
        yield from self.degraded
