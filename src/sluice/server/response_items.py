"""Output items of a response as they grow, and the typed events that tell of it.

``Draft`` is the one owner of what a response holds so far; whole answers read it at the end and
streams send its events, each with the next sequence number.
"""

from dataclasses import dataclass, field
from typing import Any

from sluice.core.request import Usage
from sluice.runtime.generation import ChoiceEnded, Delta, Finished, TokenText, ToolCallDelta
from sluice.server.problems import Problem
from sluice.server.sse import encode_json
from sluice.server.stamp import Stamp, logprobs_json
from sluice.server.wire import Json

Event = tuple[str, Json]


@dataclass(slots=True)
class _Message:
    """The text item."""

    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)

    def part(self) -> Json:
        """The item's one content part."""
        return {
            "type": "output_text",
            "text": "".join(self.texts),
            "annotations": [],
            "logprobs": logprobs_json(tuple(self.logprobs)),
        }

    def json(self, status: str) -> Json:
        """The item; its part appears once it has begun to be complete."""
        content = [] if status == "in_progress" else [self.part()]
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def done(self, place: Json) -> list[Event]:
        """Events that close the part."""
        place = {**place, "content_index": 0}
        part = self.part()
        text = {**place, "text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", text),
            ("response.content_part.done", {**place, "part": part}),
        ]


@dataclass(slots=True)
class _FunctionCall:
    """One function call item."""

    id: str
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def json(self, status: str) -> Json:
        """The item."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.arguments),
        }

    def done(self, place: Json) -> list[Event]:
        """Events that close the arguments."""
        told = {**place, "name": self.name, "arguments": "".join(self.arguments)}
        return [("response.function_call_arguments.done", told)]


class Draft:
    """A response being made. ``settings`` are the fields that repeat the request."""

    def __init__(self, stamp: Stamp, settings: Json) -> None:
        self._stamp = stamp
        self._settings = settings
        self._items: list[_Message | _FunctionCall] = []
        self._message: tuple[int, _Message] | None = None  # with its place among the items
        self._calls: dict[int, tuple[int, _FunctionCall]] = {}
        self._finish: str | None = None
        self.usage: Usage | None = None

    def add(self, delta: Delta) -> list[Event]:
        """Add a piece and tell what changed."""
        events: list[Event] = []
        if delta.text or delta.logprobs:
            events += self._add_text(delta)
        for call in delta.tool_calls:
            events += self._add_call(call)
        return events

    def end(self, ended: ChoiceEnded) -> list[Event]:
        """Complete all items. An answer without any item gets an empty message."""
        events = [] if self._items else self._add_text(Delta(0, "", tokens=0))
        self._finish = ended.finish
        for index, item in enumerate(self._items):
            events += item.done({"item_id": item.id, "output_index": index})
            told = {"output_index": index, "item": item.json(self._item_status())}
            events.append(("response.output_item.done", told))
        return events

    def response(self, problem: Problem | None = None) -> Json:
        """The response object as it stands."""
        status = "failed" if problem is not None else self._status()
        incomplete = None
        if status == "incomplete":
            cut = self._finish == "length"
            incomplete = {"reason": "max_output_tokens" if cut else "content_filter"}
        error = None
        if problem is not None:
            code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
            error = {"code": code, "message": problem.error["message"]}
        fields = self._stamp.fields("response")
        created = fields.pop("created")
        return {
            **fields,
            "created_at": created,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "output": [item.json(self._item_status()) for item in self._items],
            **self._settings,
            "service_tier": self._stamp.service_tier,
            "usage": self._usage(),
        }

    def _usage(self) -> Json | None:
        if self.usage is None:
            return None
        return {**_usage_json(self.usage), **self._stamp.disclosure()}

    def _status(self) -> str:
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish in {"length", "content_filter"} else "completed"

    def _item_status(self) -> str:
        return self._status() if self._finish is not None else "incomplete"

    def _add_text(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        if self._message is None:
            self._message = len(self._items), _Message(f"msg_{self._stamp.id}")
            events.append(self._added(self._message[1]))
        at, item = self._message
        place: Json = {"item_id": item.id, "output_index": at, "content_index": 0}
        if events:
            events.append(("response.content_part.added", {**place, "part": item.part()}))
        item.texts.append(delta.text)
        item.logprobs.extend(delta.logprobs)
        if delta.text:
            told = {**place, "delta": delta.text, "logprobs": logprobs_json(delta.logprobs)}
            events.append(("response.output_text.delta", told))
        return events

    def _add_call(self, piece: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if piece.index not in self._calls:
            at = len(self._items)
            fresh = _FunctionCall(f"fc_{self._stamp.id}_{at}", piece.id or "", piece.name or "")
            self._calls[piece.index] = at, fresh
            events.append(self._added(fresh))
        at, item = self._calls[piece.index]
        item.arguments.append(piece.arguments)
        if piece.arguments:
            told = {"item_id": item.id, "output_index": at, "delta": piece.arguments}
            events.append(("response.function_call_arguments.delta", told))
        return events

    def _added(self, item: _Message | _FunctionCall) -> Event:
        told = {"output_index": len(self._items), "item": item.json("in_progress")}
        self._items.append(item)
        return "response.output_item.added", told


class ResponseEvents:
    """Encoder of typed response events with sequence numbers; see ``sse.Encoder``."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._sequence = 0
        self._begun = False

    def delta(self, delta: Delta) -> bytes:
        """Events for new text and function calls."""
        begin = self._begin()
        return begin + self._encode(self._draft.add(delta))

    def ended(self, ended: ChoiceEnded) -> bytes:
        """Events that complete the items."""
        begin = self._begin()
        return begin + self._encode(self._draft.end(ended))

    def finished(self, finished: Finished) -> bytes:
        """The last event: the whole response. There is no other terminator."""
        self._draft.usage = finished.usage
        response = self._draft.response()
        return self._encode([(f"response.{response['status']}", {"response": response})])

    def failed(self, problem: Problem) -> bytes:
        """The last event of a response that could not be completed."""
        return self._encode([("response.failed", {"response": self._draft.response(problem)})])

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        told = {"response": self._draft.response()}
        return self._encode([("response.created", told), ("response.in_progress", told)])

    def _encode(self, events: list[Event]) -> bytes:
        lines: list[bytes] = []
        for name, told in events:
            numbered: dict[str, Any] = {"type": name, "sequence_number": self._sequence, **told}
            self._sequence += 1
            lines.append(b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(numbered)))
        return b"".join(lines)


def _usage_json(usage: Usage) -> Json:
    """Token counts in the shape of responses."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
