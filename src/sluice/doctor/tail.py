"""A journal that is watched: each look reads what was added, and what is old is forgotten.

Called by who looks again and again; a single diagnosis reads with ``reading.read_journal``.
"""

from collections.abc import Callable
from pathlib import Path

from sluice.doctor.columns import Journal, NoRequests
from sluice.doctor.reading import Reading
from sluice.telemetry.following import Follower

# Forgetting copies what is kept, so it is done when this share more than that has come together.
_SLACK = 0.25


class JournalTail:
    """The last ``keep_s`` of a journal folder that is written to, as of the last look.

    ``wall_ns`` gives Unix time: segments that were finished before are not opened.
    """

    def __init__(self, folder: Path, keep_s: float, wall_ns: Callable[[], int]) -> None:
        self._keep_ns = keep_s * 1e9
        self._follower = Follower(folder, int(wall_ns() - self._keep_ns))
        self._reading = Reading()

    @property
    def records(self) -> int:
        """How many records were read since the beginning."""
        return self._reading.records

    def look(self) -> Journal | None:
        """What is known after reading what was added; ``None`` while there is no request."""
        for offset_ns, body in self._follower.bodies():
            self._reading.take(offset_ns, body)
        horizon_ns = self._reading.latest_ns() - self._keep_ns
        if self._reading.oldest_ns() < horizon_ns - _SLACK * self._keep_ns:
            self._reading.forget_before(horizon_ns)
        try:
            return self._reading.journal()
        except NoRequests:
            return None

    def close(self) -> None:
        """Close the files."""
        self._follower.close()
