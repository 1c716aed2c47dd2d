"""Reads a journal folder while it is being written: each call gives what was added since.

For one reader that keeps up, such as the export of spans. Whole journals are read by ``journal``.
"""

import contextlib
from pathlib import Path
from typing import BinaryIO

from sluice.telemetry.journal import Entry
from sluice.telemetry.segments import JournalUnreadable, SegmentReader, segment_paths

# A file that ends in the middle of a frame for this many looks is damaged there, or left.
_PATIENCE = 20


class _Followed:
    """One segment and how far it was read."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._reader = SegmentReader(file, name)
        header = self._reader.header
        self._source, self._offset_ns = header.source, header.wall_ns - header.monotonic_ns
        self._good = file.tell()
        self.idle = 0

    def news(self) -> list[Entry]:
        """The records of the frames that were added."""
        found: list[Entry] = []
        self._file.seek(self._good)
        for frame in self._reader.frames():
            self._good = self._file.tell()
            found += (Entry(one.t_ns + self._offset_ns, self._source, one) for one in frame.records)
        self.idle = 0 if found else self.idle + 1
        return found

    def close(self) -> None:
        """Read no more of it."""
        self._file.close()


class Follower:
    """Follows ``folder`` from ``since_ns`` (Unix time) on; older records are left out."""

    def __init__(self, folder: Path, since_ns: int) -> None:
        self._folder = folder
        self._since_ns = since_ns
        self._open: dict[Path, _Followed] = {}
        self._done: set[Path] = set()

    def news(self) -> list[Entry]:
        """What was added since the last call, in the order of time as far as it is here."""
        paths = segment_paths(self._folder)
        found: list[Entry] = []
        for path in paths:
            found += self._news_of(path)
        for path in [path for path in self._open if path not in paths]:
            self._open.pop(path).close()  # it was deleted
        self._done &= set(paths)
        found.sort(key=lambda entry: entry.wall_ns)
        return [entry for entry in found if entry.wall_ns >= self._since_ns]

    def _news_of(self, path: Path) -> list[Entry]:
        if path in self._done:
            return []
        followed = self._open.get(path)
        try:
            if followed is None:
                if path.stat().st_mtime_ns < self._since_ns:
                    self._done.add(path)
                    return []
                followed = self._begin(path)
            elif followed.idle > _PATIENCE and not self._is_latest(path):
                self._done.add(path)
                self._open.pop(path).close()
                return []
            return followed.news()
        except (OSError, JournalUnreadable):
            return []  # not yet written so far, or gone; the next look tells

    def _begin(self, path: Path) -> _Followed:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            followed = self._open[path] = _Followed(file, path.name)
            stack.pop_all()
        return followed

    def _is_latest(self, path: Path) -> bool:
        """Whether its process may still write to it: no later segment of the same one is there."""
        process = path.name.rpartition("-")[0]
        source = process.rpartition("-")[0].rpartition("-")[0]
        return not any(
            other.name.startswith(f"{source}-") and other.name > path.name for other in self._open
        )

    def close(self) -> None:
        """Close all files."""
        for followed in self._open.values():
            followed.close()
        self._open.clear()
