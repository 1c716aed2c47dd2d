"""Cuts a stream of bytes into server-sent events without changing or copying more than needed.

Follows the event stream format of the HTML standard, section 9.2.6: lines end with LF, CRLF or CR,
a blank line ends an event, several ``data`` fields are joined by a line feed. Bytes may be cut
anywhere. What an event means is for ``answers.py``.
"""

import re
from collections.abc import Iterator

# The groups are atomic: a CRLF must not be read as two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BLANK_BYTES_MAX = 4
_PLAIN = b"data: "


class EventTooLong(Exception):
    """An event is over the limit; what came of it is dropped."""


class EventCutter:
    """Whole events out of pieces of a stream; the bytes of all events are the bytes fed."""

    def __init__(self, event_bytes_max: int) -> None:
        self._event_bytes_max = event_bytes_max
        self._pending = bytearray()

    def sole_payload(self, piece: bytes) -> bytes | None:
        """The data of a piece that is one event of one plain line, as nearly all are."""
        if (
            self._pending
            or piece.find(b"\n") != len(piece) - 2
            or not piece.startswith(_PLAIN)
            or not piece.endswith(b"\n\n")
            or b"\r" in piece
        ):
            return None
        return piece[len(_PLAIN) : -2]

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes, each with the blank line that ends it.

        Raises ``EventTooLong`` for an event without an end.
        """
        if not self._pending and piece.endswith(b"\n\n") and b"\r" not in piece:
            return [event + b"\n\n" for event in piece[:-2].split(b"\n\n")]
        searched = max(0, len(self._pending) - _BLANK_BYTES_MAX + 1)
        self._pending += piece
        events, begin = [], 0
        for end in _event_ends(self._pending, searched):
            events.append(bytes(self._pending[begin:end]))
            begin = end
        del self._pending[:begin]
        if len(self._pending) > self._event_bytes_max:
            self._pending.clear()
            raise EventTooLong
        return events

    def rest(self) -> bytes:
        """What has come of an event that was not ended."""
        return bytes(self._pending)


def _event_ends(buffer: bytearray, searched: int) -> Iterator[int]:
    for found in _BLANK_LINE.finditer(buffer, searched):
        end = found.end()
        # A CR at the end may be half of a CRLF whose other half would begin the next event.
        if end < len(buffer) or buffer[-1] != 0x0D:
            yield end


def payload_of(event: bytes) -> tuple[str, bytes | None]:
    """Type and data of an event. The type is empty where it names none, the data ``None``.

    Comments, ids and retry times mean nothing here.
    """
    if event.startswith(_PLAIN) and event.find(b"\n", 0, -2) < 0 and b"\r" not in event:
        return "", event[len(_PLAIN) : -2]
    kind, parts = "", []
    for line in _LINE_END.split(event):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            parts.append(value)
        elif name == b"event":
            kind = value.decode("utf-8", "replace")
        elif name == b"error":  # llama-server's former way to say `event: error`
            kind, parts = "error", [value]
    return kind, b"\n".join(parts) if parts else None
