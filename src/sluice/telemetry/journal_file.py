"""A journal that is written at once, by the clock of its records: for time that is not real.

The same segments as those of ``journal.JournalWriter``, without a thread, without limits of age and
size, and without anything of this machine or this moment in them: the same records give the same
bytes. Virtual time begins at the start of 1970.
"""

from pathlib import Path
from typing import Protocol

import sluice
from sluice.telemetry.records import AnyRecord, RequestText
from sluice.telemetry.segments import (
    FORMAT_VERSION,
    FrameEncoder,
    SegmentHeader,
    segment_name,
    segment_paths,
)

_FRAME_RECORDS_MAX = 2000


class Journal(Protocol):
    """What can be written to as a journal."""

    @property
    def records_text(self) -> bool:
        """Whether prompts and outputs are recorded."""
        ...

    def append(self, record: AnyRecord) -> None:
        """Record something."""
        ...

    def close(self) -> None:
        """Write what waits."""
        ...


class JournalFile:
    """One segment in a folder that holds none yet.

    Raises ``FileExistsError`` where it does, and ``OSError`` where it cannot be written.
    """

    records_text = False

    def __init__(self, folder: Path, source: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if segment_paths(folder):
            raise FileExistsError(17, "it holds a journal already", str(folder))
        header = SegmentHeader(
            format=FORMAT_VERSION,
            source=source,
            pid=0,
            monotonic_ns=0,
            wall_ns=0,
            sluice_version=sluice.__version__,
            boot_id="virtual",
        )
        self._encoder = FrameEncoder()
        self._file = (folder / segment_name(header, 1)).open("xb")
        self._file.write(self._encoder.header(header))
        self._waiting: list[AnyRecord] = []

    def append(self, record: AnyRecord) -> None:
        """Record something. Raises ``OSError``."""
        if isinstance(record, RequestText):
            return
        self._waiting.append(record)
        if len(self._waiting) == _FRAME_RECORDS_MAX:
            self._write()

    def close(self) -> None:
        """Write what waits; safe to call twice."""
        if not self._file.closed:
            self._write()
            self._file.close()

    def _write(self) -> None:
        if self._waiting:
            self._file.write(self._encoder.records(self._waiting))
            self._waiting = []
