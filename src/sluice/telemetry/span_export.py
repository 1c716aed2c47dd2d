"""From the journal to a collector: which requests are kept, and spans on their way.

Run by a process of its own (``wiring.span_exporter``), so that a slow collector and the work of
making spans cost the gateway nothing. Kept are all requests that missed their targets, failed or
were refused, those whose client keeps their trace, and a share of the others. Spans wait in a
bounded queue for the thread that sends them; what finds no room, and what the collector does not
take, is dropped and counted.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.telemetry.journal import Entry
from sluice.telemetry.life import Life, life_of
from sluice.telemetry.lives import Lives, Records
from sluice.telemetry.metric_table import Outcome
from sluice.telemetry.spans import Span, beside_of, spans_of
from sluice.telemetry.trace_context import is_in_share, parent_of, trace_id_of

BATCH_SPANS_MAX = 512
_KNOWN_PARENTS_MAX = 50_000
_SOON_S = 0.5


class Sender(Protocol):
    """Sends spans somewhere. Blocks."""

    def send(self, spans: Sequence[Span]) -> bool:
        """Send a batch; whether it arrived."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class Counted:
    """Spans since the start of the process, and requests that were kept."""

    exported: int = 0
    dropped: int = 0
    kept: int = 0


def keeping_probability(life: Life, share: float) -> float | None:
    """With which probability a request like this one is kept; ``None`` where it is not."""
    ending = life.ending
    if (
        ending is None
        or ending.outcome in {Outcome.MISSED, ""}
        or any(one.error for one in life.decisions)
    ):
        return 1.0
    parent = parent_of(life.traceparent)
    if parent is not None and parent.sampled:
        return 1.0
    return share if is_in_share(trace_id_of(life.id, parent), share) else None


class SpanQueue:
    """Spans that wait for the collector, and the thread that brings them there."""

    def __init__(self, sender: Sender, spans_max: int) -> None:
        self._sender = sender
        self._spans_max = spans_max
        self._waiting: deque[Span] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self.exported = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, spans: Iterable[Span]) -> None:
        """Let spans be sent; those that find no room are dropped. Never blocks.

        Raises ``RuntimeError`` where the thread that sends them has died: its process is to end
        then, and to be started again.
        """
        if not self._stopping and not self._thread.is_alive():
            raise RuntimeError("the thread that sends spans has died")
        for span in spans:
            if len(self._waiting) >= self._spans_max:
                self.dropped += 1
            else:
                self._waiting.append(span)
        if len(self._waiting) >= BATCH_SPANS_MAX:
            self._wake.set()

    def close(self, wait_s: float) -> None:
        """Send what waits, for so long at most."""
        self._stopping = True
        self._wake.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._stopping or self._waiting:
            self._wake.wait(_SOON_S)
            self._wake.clear()
            while self._waiting:
                count = min(len(self._waiting), BATCH_SPANS_MAX)
                batch = [self._waiting.popleft() for _ in range(count)]
                if self._sender.send(batch):
                    self.exported += count
                else:
                    self.dropped += count
        self._sender.close()


class SpanExport:
    """Takes records in and puts the spans of those requests into the queue that are kept.

    ``clock`` gives monotonic nanoseconds.
    """

    def __init__(self, queue: SpanQueue, share: float, clock: Callable[[], int]) -> None:
        self._queue = queue
        self._share = share
        self._clock = clock
        self._lives = Lives()
        self._parents: OrderedDict[str, str] = OrderedDict()
        self._kept = 0

    @property
    def counted(self) -> Counted:
        """What became of the spans so far."""
        dropped = self._queue.dropped + self._lives.dropped
        return Counted(self._queue.exported, dropped, self._kept)

    def take(self, entries: Iterable[Entry]) -> None:
        """Take records in, and let go of the requests that are over."""
        now_ns = self._clock()
        for entry in entries:
            self._lives.add(entry, now_ns)
        for records in self._lives.finished(now_ns):
            self._keep(records)

    def finish(self) -> None:
        """Let go of all that are over: no more records come."""
        for records in self._lives.drain():
            self._keep(records)

    def _keep(self, records: Records) -> None:
        arrived = records.arrived
        if arrived is not None and arrived.traceparent:
            self._parents[records.id] = arrived.traceparent
            if len(self._parents) > _KNOWN_PARENTS_MAX:
                self._parents.popitem(last=False)
        # What decides needs no steps, which are most of the work.
        life = life_of(records.entries, records.id)
        probability = None if life is None else keeping_probability(life, self._share)
        if probability is None:
            return
        whole = life_of(records.all(), records.id) or life
        assert whole is not None
        self._kept += 1
        beside = beside_of(records.id, records.steps, self._parents)
        self._queue.put(spans_of(whole, probability, beside))
