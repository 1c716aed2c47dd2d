"""What the events of one answer mean for a load test: times of chunks, tokens, the ending.

``connection.py`` feeds pieces of the body with the time of their receipt. Several events in one
piece were received together and have one time. Nothing is kept of the text.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from sluice.executors.event_stream import EventCutter, EventTooLong, payload_of
from sluice.loadtest.trial import Ending

_EVENT_BYTES_MAX = 4 * 1024**2
_DONE = b"[DONE]"
_S = 1e-9
_ABSENT = msgspec.Raw(b"null")
_BROKEN = frozenset({"abort", "error"})
_REASON_CHARACTERS_MAX = 200


# Of an answer that counts otherwise nothing is believed.
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Tokens | None = None
    reasoning_tokens: _Tokens | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Output(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None
    delta: _Output | None = None
    message: _Output | None = None
    text: str | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT
    object: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Reading:
    """One answer while it comes. Times are monotonic nanoseconds.

    ``ending`` is set once the answer is over, ``ended_ns`` with it. ``finish`` is the first
    choice's finish reason. ``gaps_s`` are times between chunks of the same choice and
    ``gap_tokens`` what the server said that the later chunk of each holds, empty where it counts
    only in the end.
    """

    __slots__ = (
        "_counted",
        "_cutter",
        "_finished",
        "_last_by_choice_ns",
        "cached_tokens",
        "chunks",
        "ended_ns",
        "ending",
        "finish",
        "first_ns",
        "first_tokens",
        "gap_tokens",
        "gaps_s",
        "last_ns",
        "output_tokens",
        "prompt_tokens",
        "reason",
        "reasoning_tokens",
        "shown_ns",
    )

    def __init__(self) -> None:
        self._cutter = EventCutter(_EVENT_BYTES_MAX)
        self._last_by_choice_ns: dict[int, int] = {}
        self._finished = set[int]()
        self._counted = 0
        self.ending: Ending | None = None
        self.ended_ns: int | None = None
        self.first_ns: int | None = None
        self.shown_ns: int | None = None
        self.last_ns: int | None = None
        self.chunks = 0
        self.gaps_s = array("d")
        self.gap_tokens = array("d")
        self.first_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.finish = ""
        self.reason = ""

    @property
    def choices(self) -> int:
        """Choices that had output."""
        return max(1, len(self._last_by_choice_ns))

    def feed(self, t_ns: int, piece: bytes) -> None:
        """A piece of an event stream."""
        if (payload := self._cutter.sole_payload(piece)) is not None:
            self._event(t_ns, payload)
            return
        try:
            events = self._cutter.feed(piece)
        except EventTooLong:
            self._end(t_ns, Ending.GARBAGE, f"an event is over {_EVENT_BYTES_MAX} bytes")
            return
        for event in events:
            kind, payload = payload_of(event)
            if payload is not None:
                self._event(t_ns, payload, kind)

    def close(self, t_ns: int) -> None:
        """The body of the stream ended in order."""
        if self.ending is None and self._cutter.rest():
            self.feed(t_ns, b"\n\n")  # some leave out the blank line behind the last event
        if self.ending is not None:
            return
        if self._finished and not self._last_by_choice_ns.keys() - self._finished:
            self._end(t_ns, Ending.DONE, "")
        else:
            self._end(t_ns, Ending.TRUNCATED, "the stream ended without a finish")

    def read_whole(self, t_ns: int, body: bytes) -> None:
        """An answer that is not streamed."""
        self._event(t_ns, body)
        if self.ending is None:
            self._end(t_ns, Ending.DONE, "")
        self.first_ns = self.shown_ns = self.last_ns = None

    def _event(self, t_ns: int, payload: bytes, kind: str = "") -> None:
        if self.ending is not None:
            return
        if payload.startswith(_DONE):
            self._end(t_ns, Ending.DONE, "")
            return
        try:
            seen = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._end(t_ns, Ending.GARBAGE, f"an event is no JSON of an answer: {error}")
            return
        if (
            (seen.error is not _ABSENT and bytes(seen.error) != b"null")
            or seen.object == "error"
            or kind == "error"
        ):
            self._end(t_ns, Ending.ERROR_IN_STREAM, reason_in(payload))
            return
        usage = seen.usage
        if usage is not None and usage.completion_tokens is not None:
            self._note_usage(usage)
        for choice in seen.choices:
            self._choice(t_ns, choice)
            if self.ending is not None:
                return

    def _choice(self, t_ns: int, choice: _Choice) -> None:
        output = choice.delta or choice.message
        shown, thought = bool(choice.text), False
        if output is not None:
            shown = bool(output.content or output.refusal or output.tool_calls)
            thought = bool(output.reasoning_content or output.reasoning)
        if shown or thought:
            self._chunk(t_ns, choice.index)
            if shown and self.shown_ns is None:
                self.shown_ns = t_ns
        if choice.finish_reason:
            if choice.finish_reason in _BROKEN:
                words = f"the server ended the output: {choice.finish_reason}"
                self._end(t_ns, Ending.ERROR_IN_STREAM, words)
                return
            self._finished.add(choice.index)
            self.finish = self.finish or choice.finish_reason
            if self.first_ns is None:
                # An answer without any output is known by its end.
                self.first_ns = self.last_ns = t_ns

    def _chunk(self, t_ns: int, index: int) -> None:
        self.chunks += 1
        last_ns = self._last_by_choice_ns.get(index)
        self._last_by_choice_ns[index] = self.last_ns = t_ns
        counted, self._counted = self._counted, self.output_tokens or 0
        if last_ns is None:
            if self.first_ns is None:
                self.first_ns = t_ns
                self.first_tokens = self._counted or None
            return
        self.gaps_s.append((t_ns - last_ns) * _S)
        if self._counted > counted:
            self.gap_tokens.append(self._counted - counted)

    def _note_usage(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens_details is not None:
            self.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens

    def _end(self, t_ns: int, ending: Ending, reason: str) -> None:
        self.ending, self.ended_ns, self.reason = ending, t_ns, reason


def reason_in(body: bytes) -> str:
    """What an error body says: its code and message, cut to a line."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:_REASON_CHARACTERS_MAX].decode("utf-8", "replace").strip()
    if isinstance(found, dict) and isinstance(found.get("error"), dict | str):
        found = found["error"]
    if isinstance(found, dict):
        parts: Sequence[Any] = [found.get("code") or found.get("type"), found.get("message")]
        found = ": ".join(str(part) for part in parts if part)
    return str(found)[:_REASON_CHARACTERS_MAX]
