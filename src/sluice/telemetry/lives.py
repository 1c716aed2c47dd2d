"""Many requests' lives at once, from records as they come: for whoever follows a journal.

Records of a request are kept until a while after its ending, because the steps of its replica are
written by another process and may come later. Then ``finished`` gives them away. Everything is
bounded; what finds no room is dropped and counted.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from sluice.telemetry.journal import Entry
from sluice.telemetry.records import (
    RequestArrived,
    RequestEnded,
    RequestRefused,
    RequestRejected,
    Step,
)

LIVES_MAX = 20_000
STEPS_MAX = 4_000
# Writers flush every half second.
SETTLE_NS = 1_500_000_000
# Steps of a request that nothing else is known of: its arrival was dropped, or is still to come.
_ORPHAN_NS = 60_000_000_000


@dataclass(slots=True)
class Records:
    """What is known of one request, in the order in which it was read."""

    id: str
    entries: list[Entry] = field(default_factory=list)
    steps: list[Entry] = field(default_factory=list)
    seen_ns: int = 0
    over: bool = False

    def all(self) -> list[Entry]:
        """Everything by time."""
        # Arrival and ending are known to the request alone, so that a step may not precede it.
        return sorted((*self.entries, *self.steps), key=lambda entry: entry.wall_ns)

    @property
    def arrived(self) -> RequestArrived | None:
        """Its arrival, ``None`` where that was dropped."""
        found = (one.record for one in self.entries if isinstance(one.record, RequestArrived))
        return next(found, None)


class Lives:
    """Requests by id. Times are those of the reader's clock, in nanoseconds."""

    def __init__(self) -> None:
        self._known: dict[str, Records] = {}
        self._over: deque[tuple[int, str]] = deque()
        self.dropped = 0

    def add(self, entry: Entry, now_ns: int) -> None:
        """Take a record in."""
        record = entry.record
        if isinstance(record, Step):
            for computed in {*(one for one, _ in record.decode), *(c.id for c in record.prefill)}:
                known = self._of(computed, now_ns)
                if len(known.steps) < STEPS_MAX:
                    known.steps.append(entry)
            return
        request_id = getattr(record, "id", None)
        if request_id is None:
            return
        known = self._of(request_id, now_ns)
        known.entries.append(entry)
        if isinstance(record, RequestEnded | RequestRejected | RequestRefused) and not known.over:
            known.over = True
            self._over.append((now_ns, request_id))

    def finished(self, now_ns: int) -> Iterator[Records]:
        """The requests that are over for long enough; they are forgotten here."""
        while self._over and now_ns - self._over[0][0] >= SETTLE_NS:
            _, request_id = self._over.popleft()
            known = self._known.pop(request_id, None)
            if known is not None:
                yield known

    def drain(self) -> Iterator[Records]:
        """All that are over, because the reader stops."""
        while self._over:
            known = self._known.pop(self._over.popleft()[1], None)
            if known is not None:
                yield known

    def _of(self, request_id: str, now_ns: int) -> Records:
        known = self._known.get(request_id)
        if known is None:
            if len(self._known) >= LIVES_MAX:
                self._make_room(now_ns)
            known = self._known[request_id] = Records(request_id)
        known.seen_ns = now_ns
        return known

    def _make_room(self, now_ns: int) -> None:
        """Forget what nothing was heard of for long, else the oldest."""
        idle = [
            one for one, known in self._known.items() if now_ns - known.seen_ns > _ORPHAN_NS
        ] or [next(iter(self._known))]
        for request_id in idle:
            if any(
                isinstance(one.record, RequestArrived) for one in self._known[request_id].entries
            ):
                self.dropped += 1
            del self._known[request_id]
