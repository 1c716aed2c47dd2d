"""Reads a journal folder while it is being written: each call gives what was added since.

For one reader that keeps up: the export of spans, a doctor that watches. Whole journals are read by
``journal``.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, Union, get_args

from sluice.telemetry.journal import Entry
from sluice.telemetry.records import AnyRecord, PolicyRecord, Record
from sluice.telemetry.segments import JournalUnreadable, SegmentReader, segment_paths

# A file that ends in the middle of a frame for this many looks is damaged there, or left.
_PATIENCE = 20
Found = TypeVar("Found")


class _Passed(Record, frozen=True, tag="PolicyRecord"):
    """A record of policy, of which there are many, undecoded: it is for replay alone."""


_LEFT_OUT: frozenset[type] = frozenset({_Passed})
_KINDS: Any = Union[(_Passed, *(kind for kind in get_args(AnyRecord) if kind is not PolicyRecord))]


class _Followed:
    """One segment and how far it was read."""

    def __init__(self, file: BinaryIO, name: str, offsets: dict[str, int]) -> None:
        self._file = file
        self._reader = SegmentReader(file, name, _KINDS)
        header = self._reader.header
        self._source, offset_ns = header.source, header.wall_ns - header.monotonic_ns
        if header.boot_id:  # one offset for each boot: the wall clock may be set in between
            offset_ns = offsets.setdefault(header.boot_id, offset_ns)
        self._offset_ns = offset_ns
        self._good = file.tell()
        self.idle = 0

    def news(self) -> list[Entry]:
        """The records of the frames that were added, without those of policy."""
        found: list[Entry] = []
        self._file.seek(self._good)
        for frame in self._reader.frames():
            self._good = self._file.tell()
            found += (
                Entry(one.t_ns + self._offset_ns, self._source, one)
                for one in frame.records
                if type(one) not in _LEFT_OUT
            )
        return found

    def bodies(self) -> list[tuple[int, bytes]]:
        """The frames that were added; see ``Follower.bodies``."""
        found: list[tuple[int, bytes]] = []
        self._file.seek(self._good)
        for body in self._reader.bodies():
            self._good = self._file.tell()
            found.append((self._offset_ns, body))
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
        self._offsets: dict[str, int] = {}

    def news(self) -> list[Entry]:
        """What was added since the last call, in the order of time as far as it is here.

        Records of policy are left out.
        """
        found = self._added(_Followed.news)
        found.sort(key=lambda entry: entry.wall_ns)
        return [entry for entry in found if entry.wall_ns >= self._since_ns]

    def bodies(self) -> list[tuple[int, bytes]]:
        """The frames that were added, as ``journal.JournalReader.bodies`` gives them.

        Segments that were finished before ``since_ns`` are left out.
        """
        return self._added(_Followed.bodies)

    def _added(self, read: Callable[[_Followed], list[Found]]) -> list[Found]:
        paths = segment_paths(self._folder)
        found: list[Found] = []
        for path in paths:
            found += self._added_to(path, read)
        for path in [path for path in self._open if path not in paths]:
            self._open.pop(path).close()  # it was deleted
        self._done &= set(paths)
        return found

    def _added_to(self, path: Path, read: Callable[[_Followed], list[Found]]) -> Sequence[Found]:
        if path in self._done:
            return ()
        followed = self._open.get(path)
        try:
            if followed is None:
                if path.stat().st_mtime_ns < self._since_ns:
                    self._done.add(path)
                    return ()
                followed = self._begin(path)
            elif followed.idle > _PATIENCE and not self._is_latest(path):
                self._done.add(path)
                self._open.pop(path).close()
                return ()
            found = read(followed)
        except (OSError, JournalUnreadable):
            return ()  # not yet written so far, or gone; the next look tells
        followed.idle = 0 if found else followed.idle + 1
        return found

    def _begin(self, path: Path) -> _Followed:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            followed = self._open[path] = _Followed(file, path.name, self._offsets)
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
