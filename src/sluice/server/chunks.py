"""The bytes around what is new in a chunk, the same for chat and for text completions."""

from sluice.core.request import Usage
from sluice.server.sse import DONE, encode_json
from sluice.server.stamp import Stamp


class ChunkFrame:
    """Frames the chunks of one answer.

    ``kind`` names their object and ``key`` the member that holds what is new.
    """

    def __init__(self, stamp: Stamp, kind: str, key: str, *, with_usage: bool) -> None:
        self._with_usage = with_usage
        self._stamp = stamp
        self._head = b"data: {" + stamp.head(kind)
        self._choice = self._head + b',"choices":[{"index":'
        self._key = b',"' + key.encode() + b'":'
        self._tail = b"}]" + (b',"usage":null' if with_usage else b"") + b"}\n\n"

    def begin(self, choice: int) -> bytes:
        """A chunk up to what is new."""
        return self._choice + b"%d" % choice + self._key

    def end(self, logprobs: bytes = b"null", finish: str | None = None) -> bytes:
        """The rest of the chunk; ``finish`` is set in the last one of a choice."""
        reason = b"null" if finish is None else b'"' + finish.encode() + b'"'
        return b',"logprobs":' + logprobs + b',"finish_reason":' + reason + self._tail

    def last(self, usage: Usage) -> bytes:
        """The end of the stream: usage, where asked for, and the terminator."""
        if not self._with_usage:
            return DONE
        return (
            self._head
            + b',"choices":[],"usage":'
            + encode_json(self._stamp.usage(usage))
            + b"}\n\n"
            + DONE
        )
