"""How much of the processors this process got, and how long its threads waited for one.

A host that is shared shows in nothing else that a process can see of itself: its steps only become
slower. Linux tells it of each thread; elsewhere nothing is known.
"""

from dataclasses import dataclass
from pathlib import Path

_THREADS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Of all threads that live, since their start: time on a processor, and ready without one."""

    used_ns: int
    waited_ns: int


def processor_times(threads: Path = _THREADS) -> ProcessorTimes | None:
    """The times now; ``None`` where the system does not tell."""
    used_ns = waited_ns = 0
    try:
        for thread in threads.iterdir():
            try:
                used, waited, *_ = (thread / "schedstat").read_text().split()
            except FileNotFoundError:  # it has just ended
                continue
            used_ns += int(used)
            waited_ns += int(waited)
    except (OSError, ValueError):
        return None
    return ProcessorTimes(used_ns, waited_ns) if used_ns else None
