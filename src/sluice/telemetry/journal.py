"""The journal: what happened, on disk.

One ``JournalWriter`` per process appends records to segments in a folder that several processes
share; ``JournalReader`` merges them by time. Serving never waits for a disk: ``append`` puts a
record in a bounded queue and a thread of the writer does the rest. What cannot be written (a full
disk, a folder that is gone) is dropped and counted, and writing goes on in a new segment when it
can. After a crash of the process all but about the last ``flush_s`` is on disk. The file format is
in ``segments``, the kinds of record in ``records``.
"""

import contextlib
import heapq
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sluice
from sluice.telemetry.records import AnyRecord, Gap, RequestText
from sluice.telemetry.segments import (
    FORMAT_VERSION,
    FrameEncoder,
    JournalUnreadable,
    SegmentHeader,
    SegmentReader,
    segment_name,
    segment_paths,
)

_log = logging.getLogger(__name__)

_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
_FRAME_RECORDS_MAX = 2000
_CLOSE_WAIT_S = 5.0
# After a failure, the wait before another segment is opened; it doubles each time.
_RETRY_NS_MIN = 1_000_000_000
_RETRY_NS_MAX = 30 * _RETRY_NS_MIN
# An empty segment older than this was left by a process that could not write.
_EMPTY_NS_MAX = 60 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where a writer reads the time, in nanoseconds: a monotonic clock and Unix time."""

    monotonic_ns: Callable[[], int]
    wall_ns: Callable[[], int]


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """Bounds of a journal folder and of one writer.

    ``keep_s`` and ``bytes_max`` hold for the folder: the oldest segments of any process go first.
    ``queue_records_max`` bounds what waits for the disk.
    """

    keep_s: float = 86400.0
    bytes_max: int = 1024**3
    queue_records_max: int = 20_000
    flush_s: float = 0.5

    @property
    def segment_bytes_max(self) -> int:
        """Size at which a segment is closed: small enough that deleting one loses little."""
        return max(4096, min(64 * 1024**2, self.bytes_max // 16))

    @property
    def segment_s_max(self) -> float:
        """Age at which a segment is closed."""
        return min(3600.0, self.keep_s / 8)


class _OpenSegment:
    """The file that is being written."""

    def __init__(self, path: Path, header: bytes, opened_ns: int) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        self._path = path
        self._inode = os.fstat(self._file.fileno()).st_ino
        self.opened_ns = opened_ns
        self.bytes = 0
        self._header_bytes = len(header)
        try:
            self.write(header)
        except OSError:
            self.close()
            raise

    def write(self, frame: bytes) -> None:
        """Write a whole frame. Raises ``OSError``, also where only a part could be written."""
        written = self._file.write(frame)
        if written != len(frame):
            raise OSError(f"only {written} of {len(frame)} bytes could be written")
        self.bytes += len(frame)

    def is_on_disk(self) -> bool:
        """Whether the file is still the one at its path."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Close the file, and delete it where it holds no whole frame of records.

        What fails here was not written before either.
        """
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            if self.bytes <= self._header_bytes and self.is_on_disk():
                self._path.unlink()


class JournalWriter:
    """Appends records of this process. ``append`` is for one thread; the rest for any."""

    def __init__(
        self,
        folder: Path,
        source: str,
        clocks: Clocks,
        limits: JournalLimits,
        *,
        record_text: bool = False,
    ) -> None:
        self._folder = folder
        self._source = source
        self._clocks = clocks
        self._limits = limits
        self._record_text = record_text
        self._queue: deque[AnyRecord] = deque()
        self._dropped_before_queue = 0
        self._dropped_at_disk = 0
        self._dropped_told = 0
        self._error = ""
        self._retry_ns = 0
        self._retry_wait_ns = _RETRY_NS_MIN
        self._segment: _OpenSegment | None = None
        self._serial = 0
        self._encoder = FrameEncoder()
        self._wake = threading.Event()
        self._stopping = False
        self._flushes: deque[threading.Event] = deque()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- any thread

    @property
    def dropped(self) -> int:
        """Records that were not written, since the start."""
        return self._dropped_before_queue + self._dropped_at_disk

    @property
    def records_text(self) -> bool:
        """Whether prompts and outputs are recorded."""
        return self._record_text

    @property
    def error(self) -> str:
        """Why the latest write failed; empty while writing works."""
        return self._error

    def append(self, record: AnyRecord) -> None:
        """Record something. Never blocks and never fails."""
        if type(record) is RequestText and not self._record_text:
            return
        queue = self._queue
        if self._stopping or len(queue) >= self._limits.queue_records_max:
            self._dropped_before_queue += 1
            return
        queue.append(record)
        if len(queue) == _FRAME_RECORDS_MAX:
            self._wake.set()

    def flush(self, wait_s: float = _CLOSE_WAIT_S) -> bool:
        """Hand all that was appended to the file system; false where that takes longer."""
        done = threading.Event()
        self._flushes.append(done)
        self._wake.set()
        return done.wait(wait_s)

    def close(self) -> None:
        """Write what waits and stop. Safe to call twice; what is appended later is dropped."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_CLOSE_WAIT_S)

    # -------------------------------------------------------------------------------- own thread

    def _run(self) -> None:
        stopping = False
        while not stopping:
            self._wake.wait(self._limits.flush_s)
            self._wake.clear()
            stopping = self._stopping
            waiting = [self._flushes.popleft() for _ in range(len(self._flushes))]
            while self._queue:
                count = min(len(self._queue), _FRAME_RECORDS_MAX)
                self._write([self._queue.popleft() for _ in range(count)])
            for done in waiting:
                done.set()
        self._leave_segment()

    def _write(self, records: list[AnyRecord]) -> None:
        count, lost = len(records), self.dropped - self._dropped_told
        if lost:
            records.insert(0, Gap(records[0].t_ns, lost, self._error or "the queue was full"))
        if self._segment is None and self._clocks.monotonic_ns() < self._retry_ns:
            self._dropped_at_disk += count
            return
        try:
            frame = self._encode(records)
            self._current_segment().write(frame)
        except OSError as error:
            if not self._error:
                _log.warning("journal records are being dropped: %s", error)
            self._error = str(error)
            self._dropped_at_disk += count
            # A part of the frame may be on disk, and nothing may stand after a torn frame.
            self._leave_segment()
            self._retry_ns = self._clocks.monotonic_ns() + self._retry_wait_ns
            self._retry_wait_ns = min(2 * self._retry_wait_ns, _RETRY_NS_MAX)
            return
        self._retry_wait_ns = _RETRY_NS_MIN
        if self._error:
            _log.warning("journal writing works again; %d records were dropped", lost)
        self._error = ""
        self._dropped_told += lost

    def _encode(self, records: Sequence[AnyRecord]) -> bytes:
        try:
            return self._encoder.records(records)
        except ValueError:
            return self._encoder.records([record for record in records if self._encodes(record)])

    def _encodes(self, record: AnyRecord) -> bool:
        try:
            self._encoder.records([record])
        except ValueError as error:
            _log.warning("a journal record cannot be written: %s", error)
            self._dropped_at_disk += 1
            return False
        return True

    def _current_segment(self) -> _OpenSegment:
        segment, limits = self._segment, self._limits
        if segment is not None:
            age_s = (self._clocks.monotonic_ns() - segment.opened_ns) / 1e9
            is_full = segment.bytes >= limits.segment_bytes_max or age_s >= limits.segment_s_max
            if is_full or not segment.is_on_disk():
                self._leave_segment()
        if self._segment is None:
            self._prune()
            self._segment = self._open_segment()
        return self._segment

    def _open_segment(self) -> _OpenSegment:
        monotonic_ns, wall_ns = self._clocks.monotonic_ns(), self._clocks.wall_ns()
        header = SegmentHeader(
            format=FORMAT_VERSION,
            source=self._source,
            pid=os.getpid(),
            monotonic_ns=monotonic_ns,
            wall_ns=wall_ns,
            sluice_version=sluice.__version__,
            boot_id=_boot_id(),
        )
        self._serial += 1
        path = self._folder / segment_name(header, self._serial)
        return _OpenSegment(path, self._encoder.header(header), monotonic_ns)

    def _leave_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _prune(self) -> None:
        """Delete segments that are too old, and the oldest while the folder is too large.

        A quarter of ``bytes_max`` is left for segments that processes are writing.
        """
        found = []
        for path in segment_paths(self._folder):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, path, stat.st_size))
        total = sum(size for _, _, size in found)
        now_ns = self._clocks.wall_ns()
        oldest_ns = now_ns - round(self._limits.keep_s * 1e9)
        for written_ns, path, size in sorted(found):
            if size == 0 and written_ns < now_ns - _EMPTY_NS_MAX:
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            if written_ns >= oldest_ns and total <= self._limits.bytes_max * 3 // 4:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _boot_id() -> str:
    try:
        return _BOOT_ID_PATH.read_text(encoding="ascii").strip()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Entry:
    """A record with its wall-clock time and the source that wrote it."""

    wall_ns: int
    source: str
    record: AnyRecord


@dataclass(frozen=True, slots=True)
class _Segment:
    path: Path
    header: SegmentHeader
    offset_ns: int  # added to monotonic times


class JournalReader:
    """Reads a journal folder, also one that is being written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: dict[str, None] = {}

    @property
    def problems(self) -> list[str]:
        """What could not be read so far, each once."""
        return list(self._problems)

    def entries(self, since_ns: int | None = None, containing: str = "") -> Iterator[Entry]:
        """All records merged by time, each source in its own order.

        ``since_ns`` (Unix time) leaves out segments that were finished before, and earlier records.
        ``containing`` leaves out frames without this text: a quick way to the neighbourhood of an
        id, in which the caller still looks at each record.
        """
        chains: dict[tuple[str, int], list[_Segment]] = {}
        for segment in self._segments(since_ns):
            key = (segment.header.source, segment.header.pid)
            chains.setdefault(key, []).append(segment)
        streams = [self._read(chain, containing) for chain in chains.values()]
        for entry in heapq.merge(*streams, key=lambda entry: entry.wall_ns):
            if since_ns is None or entry.wall_ns >= since_ns:
                yield entry

    def bodies(self) -> Iterator[tuple[int, bytes]]:
        """Frames as msgpack arrays of records, for who reads millions of them and decodes only a
        part of each; in the order of segments, not of time.

        The number with each is what to add to its monotonic times.
        """
        for segment in self._segments(None):
            try:
                with segment.path.open("rb") as file:
                    reader = SegmentReader(file, segment.path.name)
                    for body in reader.bodies():
                        yield segment.offset_ns, body
            except (OSError, JournalUnreadable) as error:
                self._problems[str(error)] = None
                continue
            if reader.is_torn:
                self._torn(segment)

    def _torn(self, segment: _Segment) -> None:
        self._problems[f"{segment.path.name} ends in a torn frame, which was left out"] = None

    def _segments(self, since_ns: int | None) -> list[_Segment]:
        found: list[tuple[SegmentHeader, Path]] = []
        for path in segment_paths(self._folder):
            try:
                if since_ns is not None and path.stat().st_mtime_ns < since_ns:
                    continue
                with path.open("rb") as file:
                    found.append((SegmentReader(file, path.name).header, path))
            except (OSError, JournalUnreadable) as error:
                self._problems[str(error)] = None
        found.sort(key=lambda pair: (pair[0].wall_ns, pair[1].name))
        # One offset for each boot: the wall clock may be set between two segments.
        offsets: dict[str, int] = {}
        segments = []
        for header, path in found:
            offset_ns = header.wall_ns - header.monotonic_ns
            if header.boot_id:
                offset_ns = offsets.setdefault(header.boot_id, offset_ns)
            segments.append(_Segment(path, header, offset_ns))
        return segments

    def _read(self, chain: Sequence[_Segment], containing: str) -> Iterator[Entry]:
        for segment in chain:
            try:
                with segment.path.open("rb") as file:
                    reader = SegmentReader(file, segment.path.name)
                    yield from self._read_segment(segment, reader, containing)
            except (OSError, JournalUnreadable) as error:
                self._problems[str(error)] = None

    def _read_segment(
        self, segment: _Segment, reader: SegmentReader, containing: str
    ) -> Iterator[Entry]:
        source, offset_ns = segment.header.source, segment.offset_ns
        skipped = 0
        for frame in reader.frames(containing):
            skipped += frame.skipped
            for record in frame.records:
                yield Entry(record.t_ns + offset_ns, source, record)
        if reader.is_torn:
            self._torn(segment)
        if skipped:
            self._problems[f"{segment.path.name} has {skipped} records of unknown kinds"] = None
