"""What events and bodies in OpenAI's shapes mean, as far as phases, usage and endings need it.

``remote.py`` feeds the bytes of one answer in and gets chunks and faults out. Bytes are passed on
as they came; only usage is taken out or put in where the request says so. Chat completions,
completions and responses are understood; other JSON passes unread. Each event is decoded once, with
everything that is not needed here skipped: that costs less than searching it for the few words.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sluice.executors.event_stream import EventCutter, EventTooLong, payload_of
from sluice.executors.faults import Source, fault_of_error
from sluice.executors.stream import (
    Chunk,
    EngineTimes,
    Garbage,
    Headers,
    Lost,
    Reply,
    UpstreamError,
    UpstreamFailed,
    UpstreamUsage,
    UsageEvents,
)

_DONE = b"[DONE]"
_ABSENT = frozenset({b"", b"null"})
_NO_RAW = msgspec.Raw()  # the one that stands for a field that is not there
# Engines' words for an output that was cut; a client must not take it for a whole one.
_BROKEN_FINISHES = frozenset({"abort", "error"})
# No request takes longer; what is told beyond it is no time.
_SECONDS_MAX = 86_400
# No answer has more; what is told beyond it is no count, as is what is below nothing.
_TOKENS_MAX = 2**31 - 1
# What English text takes per token with the usual vocabularies, for upstreams that do not count.
_CHARACTERS_PER_TOKEN = 4

_RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete"})

NO_TIMES = EngineTimes()

Number = int | float


class _TokenDetails(msgspec.Struct):
    cached_tokens: Number | None = None


class _Usage(msgspec.Struct):
    """Usage by both of OpenAI's sets of names."""

    prompt_tokens: Number | None = None
    completion_tokens: Number | None = None
    input_tokens: Number | None = None
    output_tokens: Number | None = None
    prompt_tokens_details: _TokenDetails | None = None
    input_tokens_details: _TokenDetails | None = None


class _Output(msgspec.Struct):
    """A delta or a message."""

    content: str | list[msgspec.Raw] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    delta: _Output | None = None
    message: _Output | None = None
    text: str | None = None


class _Response(msgspec.Struct):
    """The state of a response within an event of ``/v1/responses``."""

    usage: msgspec.Raw = _NO_RAW
    error: msgspec.Raw = _NO_RAW


class _Event(msgspec.Struct):
    """What is looked at of an event, or of a whole body."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _NO_RAW
    error: msgspec.Raw = _NO_RAW
    object: str | None = None
    type: str | None = None
    delta: msgspec.Raw = _NO_RAW
    response: _Response | None = None
    timings: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode


class StreamReader:
    """Reads one event stream.

    ``usage`` is the last that came, ``times`` what the engine said of its own; ``tokens`` and
    ``characters`` count the output. ``activity`` grows with each event that carries anything:
    comments, which proxies send to keep a connection alive, are no sign of life of an engine.
    """

    def __init__(self, source: Source, usage_events: UsageEvents, event_bytes_max: int) -> None:
        self._source, self._usage_events = source, usage_events
        self._cutter = EventCutter(event_bytes_max)
        self._event_bytes_max = event_bytes_max
        self._open_choices: dict[int, bool] = {}
        self._raw: list[bytes] = []
        self._chunk_tokens = 0
        self._chunk_finishes: list[tuple[int, str]] = []
        self._chunk_usage: UpstreamUsage | None = None
        self.usage: UpstreamUsage | None = None
        self.times = NO_TIMES
        self.tokens = 0
        self.characters = 0
        self.activity = 0
        self.ended = False

    def feed(self, piece: bytes) -> list[Chunk | UpstreamError]:
        """What the bytes mean, in order. A fault is the last entry; nothing is to follow it."""
        if self.ended:
            return []  # nothing that comes after the end belongs to the answer
        if (payload := self._cutter.sole_payload(piece)) and (chunk := self._plain(piece, payload)):
            return [chunk]
        try:
            events = self._cutter.feed(piece)
        except EventTooLong:
            self.ended = True
            return [self._garbage(f"an event is over {self._event_bytes_max} bytes")]
        out: list[Chunk | UpstreamError] = []
        for event in events:
            if alone := self._take(event):
                out += self._flush()
                out += alone
            if self.ended:
                return out
        return out + self._flush()

    def end(self) -> list[Chunk | UpstreamError]:
        """The body is over. Whether it was whole is said by the last entry."""
        if self.ended:
            return []
        # Some leave out the blank line behind the last event.
        out = self.feed(b"\n\n") if self._cutter.rest() else []
        if out and isinstance(out[-1], Garbage):
            out[-1] = self._lost("the stream ended within an event")
        if self.ended:
            return out
        self.ended = True
        if not self._open_choices or any(self._open_choices.values()):
            return [*out, self._lost("the stream ended before its finish")]
        return [*out, Chunk(b"", last=True)]

    def _plain(self, event: bytes, payload: bytes) -> Chunk | None:
        """The chunk of an event with text for a choice that is under way and nothing else.

        Nearly all events are such; this is their short way through what ``_take`` does for all.
        """
        try:
            seen = _decode_event(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        choices = seen.choices
        if choices is None or len(choices) != 1 or seen.error is not _NO_RAW:
            return None
        choice = choices[0]
        output, usage = choice.delta, seen.usage
        if (
            output is None
            or not output.content
            or output.tool_calls
            or choice.finish_reason
            or not self._open_choices.get(choice.index)
            or (usage is not _NO_RAW and bytes(usage) != b"null")
            or seen.timings
            or seen.metrics
        ):
            return None
        self.activity += 1
        self.tokens += 1
        self.characters += len(output.content)
        return Chunk(event, 1)

    def _take(self, event: bytes) -> Sequence[Chunk | UpstreamError]:
        """Note one event. Returns what must stand apart from the events before it."""
        kind, payload = payload_of(event)
        if payload is None:
            self._raw.append(event)
            return ()
        self.activity += 1
        if payload.strip() == _DONE:
            return self._done(event)
        try:
            seen = _decode_event(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.ended = True
            return (self._garbage(f"an event is no JSON of an answer: {error}"),)
        kind = kind or seen.type or ""
        if fault := _fault_in(self._source, seen, kind, payload, self.tokens):
            self.ended = True
            return (fault,)
        if seen.timings or seen.metrics:
            self.times = times_of_fields(seen.timings or {}, seen.metrics or {})
        self._note_usage(seen)
        self._note_choices(seen.choices or ())
        if kind.startswith("response."):
            return self._take_response(seen, kind, event)
        if shown := self._shown(event, seen):
            self._raw.append(shown)
        return ()

    def _take_response(self, seen: _Event, kind: str, event: bytes) -> Sequence[Chunk]:
        """An event of ``/v1/responses``; its last one carries the usage and is the end."""
        self._raw.append(event)
        quotes = 2
        if kind.endswith(".delta") and len(bytes(seen.delta)) > quotes:
            self._count(len(bytes(seen.delta)) - quotes, 1)
        if kind not in _RESPONSE_ENDS:
            return ()
        self._chunk_finishes.append((0, kind.removeprefix("response.")))
        self.ended = True
        return (Chunk(b"", last=True),)

    def _note_usage(self, seen: _Event) -> None:
        raw = bytes(seen.usage)
        if raw in _ABSENT and seen.response is not None:
            raw = bytes(seen.response.usage)
        if usage := _usage_of(raw):
            self.usage = self._chunk_usage = usage

    def _note_choices(self, choices: Sequence[_Choice]) -> None:
        characters = tokens = 0
        for choice in choices:
            length = _characters(choice)
            if length or choice.index not in self._open_choices:
                self._open_choices[choice.index] = True
            if length:
                characters += length
                tokens += 1
            if choice.finish_reason:
                self._open_choices[choice.index] = False
                self._chunk_finishes.append((choice.index, choice.finish_reason))
        if tokens and self._chunk_usage is not None:
            # Usage that comes along tells how many tokens an event holds.
            tokens = max(tokens, self._chunk_usage.completion_tokens - self.tokens)
        self._count(characters, tokens)

    def _count(self, characters: int, tokens: int) -> None:
        self.characters += characters
        self.tokens += tokens
        self._chunk_tokens += tokens

    def _shown(self, event: bytes, seen: _Event) -> bytes:
        """The event as the client gets it; empty if not at all."""
        usage = bytes(seen.usage)
        if self._usage_events is UsageEvents.AS_SENT or usage in _ABSENT:
            return event
        if not seen.choices:
            return b""
        # As JSON text the object cannot occur within a string, where its quotes would be escaped.
        before, _, after = event.rpartition(usage)
        return before + b"null" + after

    def _done(self, event: bytes) -> Sequence[Chunk | UpstreamError]:
        self.ended = True
        unfinished = [index for index, is_open in self._open_choices.items() if is_open]
        if unfinished:
            return (self._lost(f"choice {unfinished[0]} has no finish reason"),)
        return (Chunk(event, last=True),)

    def _flush(self) -> list[Chunk | UpstreamError]:
        if not (self._raw or self._chunk_tokens or self._chunk_finishes or self._chunk_usage):
            return []
        raw = self._raw[0] if len(self._raw) == 1 else b"".join(self._raw)
        finishes = tuple(self._chunk_finishes)
        chunk = Chunk(raw, self._chunk_tokens, finishes, self._chunk_usage)
        self._raw.clear()
        self._chunk_finishes.clear()
        self._chunk_tokens, self._chunk_usage = 0, None
        return [chunk]

    def _garbage(self, message: str) -> Garbage:
        return Garbage(self._source.name, message, self.tokens)

    def _lost(self, message: str) -> Lost:
        return Lost(self._source.name, message, self.tokens)


def read_whole(source: Source, body: bytes) -> tuple[Chunk | UpstreamError, EngineTimes]:
    """What a body that is not a stream means, as one chunk, and the engine's own times."""
    times = NO_TIMES
    try:
        seen = _decode_event(body)
    except msgspec.ValidationError:
        return Chunk(body, last=True), times  # JSON of another shape; not ours to judge
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Garbage(source.name, f"the answer is not JSON: {error}"), times
    if fault := _fault_in(source, seen, "", body, 0):
        return fault, times
    if seen.timings or seen.metrics:
        times = times_of_fields(seen.timings or {}, seen.metrics or {})
    choices = seen.choices or ()
    finishes = tuple([(c.index, c.finish_reason) for c in choices if c.finish_reason])
    usage = _usage_of(bytes(seen.usage))
    if usage is None and choices:
        usage = estimated_usage(len(choices), sum(_characters(choice) for choice in choices))
    tokens = usage.completion_tokens if usage else 0
    return Chunk(body, tokens, finishes, usage, last=True), times


def estimated_usage(events: int, characters: int) -> UpstreamUsage:
    """The usage of an answer whose upstream gave none: at least a token for each event."""
    tokens = max(events, math.ceil(characters / _CHARACTERS_PER_TOKEN))
    return UpstreamUsage(None, tokens, estimated=True)


def times_of_fields(timings: Mapping[str, Any], metrics: Mapping[str, Any]) -> EngineTimes:
    """The engine's own times: llama-server's ``timings`` or vLLM's ``metrics``, both in ms."""
    return EngineTimes(
        queue_s=_seconds(metrics.get("queue_time_ms")),
        prefill_s=_seconds(timings.get("prompt_ms")),
        decode_s=_seconds(timings.get("predicted_ms", metrics.get("generation_time_ms"))),
        first_token_s=_seconds(metrics.get("time_to_first_token_ms")),
    )


def times_of_headers(headers: Headers) -> EngineTimes:
    """The engine's own times from TGI's headers (ms)."""
    for name, value in headers:
        if name == "x-queue-time":
            return EngineTimes(queue_s=_seconds(value))
    return NO_TIMES


def _fault_in(
    source: Source, seen: _Event, kind: str, payload: bytes, tokens: int
) -> UpstreamError | None:
    error = bytes(seen.error)
    if kind == "response.failed" and seen.response is not None:
        error = bytes(seen.response.error)
    # vLLM's older form, and the error event of `/v1/responses`: the event is the error.
    if error in _ABSENT and (seen.object == "error" or kind in {"error", "response.failed"}):
        error = payload
    if error not in _ABSENT:
        return fault_of_error(source, payload, error, tokens)
    for choice in seen.choices or ():
        if choice.finish_reason in _BROKEN_FINISHES:
            message = f"the engine ended the output: {choice.finish_reason}"
            return UpstreamFailed(source.name, Reply(500, (), payload), message, tokens)
    return None


def _usage_of(raw: bytes) -> UpstreamUsage | None:
    """Usage from its JSON; ``None`` if it is absent, null, of another shape or no counts.

    Accounts of tenants and predictions follow it: one absurd number must not spoil them.
    """
    if raw in _ABSENT:
        return None
    try:
        usage = _decode_usage(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    output = usage.completion_tokens
    output = output if output is not None else usage.output_tokens
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details else None
    if not all(0 <= count <= _TOKENS_MAX for count in (prompt or 0, output or 0, cached or 0)):
        return None
    return UpstreamUsage(
        None if prompt is None else int(prompt),
        int(output or 0),
        None if cached is None else int(cached),
    )


def _characters(choice: _Choice) -> int:
    """Length of the output of a choice; at least 1 where there is any."""
    characters = len(choice.text or "")
    output = choice.delta or choice.message
    if output is None:
        return characters
    for text in (output.content, output.reasoning_content or output.reasoning, output.refusal):
        characters += len(text or "")
    characters += sum(len(bytes(call)) for call in output.tool_calls or ())
    return characters + bool(output.function_call)


def _seconds(milliseconds: object) -> float | None:
    """A time; ``None`` for what cannot be one."""
    if not isinstance(milliseconds, int | float | str):
        return None
    try:
        seconds = float(milliseconds) / 1000
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds <= _SECONDS_MAX else None
