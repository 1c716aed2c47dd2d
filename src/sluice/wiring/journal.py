"""Opens the journal of a process from its settings."""

from collections.abc import Callable

from sluice.config.sections import JournalSection
from sluice.runtime.clock import monotonic_ns, wall_ns
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter


def open_journal(
    section: JournalSection, source: str, clock: Callable[[], int] = monotonic_ns
) -> JournalWriter | None:
    """A writer for this process, ``None`` where no journal is kept.

    ``clock`` is the one that the times of its records are of.
    """
    if not section.enabled:
        return None
    return JournalWriter(
        section.dir,
        source,
        Clocks(clock, wall_ns),
        JournalLimits(keep_s=section.keep_s, bytes_max=section.bytes_max),
        record_text=section.record_text,
    )
