"""Pieces of a generation as chat answers: chunks of a stream, or one body.

Called by ``chat``; what is streamed and when is decided in ``sse``.
"""

from dataclasses import dataclass, field
from typing import Any

from sluice.runtime.generation import ChoiceEnded, Delta, Finished, TokenText, ToolCallDelta
from sluice.server.chunks import ChunkFrame
from sluice.server.ports import Generation
from sluice.server.sse import complete_pieces, encode_json
from sluice.server.stamp import Stamp, logprobs_json
from sluice.server.wire import Json


class ChatChunks:
    """Encoder of ``chat.completion.chunk`` events.

    The parts of a chunk that stay the same are built once per request and choice: a chunk of text
    then costs one string escape and one join.
    """

    def __init__(self, stamp: Stamp, *, with_usage: bool) -> None:
        self._frame = ChunkFrame(stamp, "chat.completion.chunk", "delta", with_usage=with_usage)
        self._text_end = b"}" + self._frame.end()
        self._text_begins: dict[int, bytes] = {}

    def delta(self, delta: Delta) -> bytes:
        """Chunks for new text, tool calls and log-probabilities; the first one brings the role."""
        begin = self._text_begins.get(delta.choice)
        if begin is None:
            return self._introduce(delta.choice) + self.delta(delta)
        if not delta.tool_calls and not delta.logprobs:
            return begin + encode_json(delta.text) + self._text_end
        changes: dict[str, Any] = {}
        if delta.text or not delta.tool_calls:
            changes["content"] = delta.text
        if delta.tool_calls:
            changes["tool_calls"] = [_tool_call_json(call) for call in delta.tool_calls]
        end = self._frame.end(encode_json(_logprobs(delta.logprobs)))
        return self._frame.begin(delta.choice) + encode_json(changes) + end

    def ended(self, ended: ChoiceEnded) -> bytes:
        """The one chunk of the choice that carries its finish_reason."""
        role = b"" if ended.choice in self._text_begins else self._introduce(ended.choice)
        return role + self._frame.begin(ended.choice) + b"{}" + self._frame.end(finish=ended.finish)

    def finished(self, finished: Finished) -> bytes:
        """Usage, where asked for, and the terminator."""
        return self._frame.last(finished.usage)

    def _introduce(self, choice: int) -> bytes:
        begin = self._frame.begin(choice)
        self._text_begins[choice] = begin + b'{"content":'
        return begin + b'{"role":"assistant","content":""' + self._text_end


def _tool_call_json(call: ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    piece: Json = {"index": call.index, "function": function}
    if call.name is not None:
        function["name"] = call.name
        piece["id"] = call.id
        piece["type"] = "function"
    return piece


def _logprobs(tokens: tuple[TokenText, ...]) -> Json | None:
    return {"content": logprobs_json(tokens), "refusal": None} if tokens else None


@dataclass(slots=True)
class _FunctionCall:
    """A tool call put together from its pieces; the first one names it."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def json(self) -> Json:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    calls: dict[int, _FunctionCall] = field(default_factory=dict)
    finish: str = "stop"

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            begun = _FunctionCall(piece.id or "", piece.name or "")
            self.calls.setdefault(piece.index, begun).arguments.append(piece.arguments)

    def json(self, index: int) -> Json:
        content = "".join(self.texts)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = [call.json() for _, call in sorted(self.calls.items())]
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(tuple(self.logprobs)),
            "finish_reason": self.finish,
        }


async def whole_chat(generation: Generation, stamp: Stamp, choices: int) -> bytes:
    """The body of an answer that is not streamed."""
    said = [_Choice() for _ in range(choices)]
    usage: Json = {}
    async for piece in complete_pieces(generation):
        match piece:
            case Delta():
                said[piece.choice].add(piece)
            case ChoiceEnded():
                said[piece.choice].finish = piece.finish
            case Finished():
                usage = stamp.usage(piece.usage)
    return encode_json(
        {
            **stamp.fields("chat.completion"),
            "choices": [choice.json(index) for index, choice in enumerate(said)],
            "usage": usage,
        }
    )
