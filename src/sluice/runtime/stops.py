"""Stop strings in a growing text.

Decides how much of a text may be shown while one of the stop strings could still follow, and where
the text ends when one did. What is decided does not depend on how the text is cut into pieces: the
output ends at the first character that completes a stop string, and before the start of that
string. Where several are completed by the same character, the one that starts first counts.
"""

from typing import NamedTuple


class StopPush(NamedTuple):
    """Text that may be shown, and whether a stop string ended the output."""

    text: str
    stopped: bool


class StopMatcher:
    """Looks for stop strings in one sequence."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """``stops`` are not empty strings; the tuple may be empty."""
        self._stops = stops
        self._firsts = frozenset(stop[0] for stop in stops)
        self._tail_max = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> StopPush:
        """Add text. Only a suffix that could become a stop string stays held back."""
        text = self._held + text
        cut = self._cut(text)
        if cut is not None:
            self._held = ""
            return StopPush(text[:cut], stopped=True)
        start = self._held_from(text)
        self._held = text[start:]
        return StopPush(text[:start], stopped=False)

    def finish(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str) -> int | None:
        """Where the output ends, if a stop string is complete in ``text``."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                found = (start + len(stop), start)
                best = found if best is None else min(best, found)
        return None if best is None else best[1]

    def _held_from(self, text: str) -> int:
        """Start of the longest suffix that begins a stop string."""
        for start in range(max(0, len(text) - self._tail_max), len(text)):
            if text[start] in self._firsts:
                suffix = text[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return start
        return len(text)
