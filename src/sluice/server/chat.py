"""``POST /v1/chat/completions``: from the body to a ``Call``, and from pieces to chat answers.

The route checks the body, calls the gateway and streams or collects. Ranges are in ``options``,
shapes of messages and tools in ``messages``, the order of events in ``sse``.

``max_completion_tokens`` wins over ``max_tokens`` where both are given. Log-probabilities are those
of the model, before temperature. ``user`` and ``service_tier`` are accepted and change nothing.
"""

from typing import Any

from sluice.core.errors import InvalidRequest
from sluice.runtime.generation import (
    Call,
    ChatPrompt,
    ChoiceEnded,
    Delta,
    Finished,
    TextLogprob,
    TokenText,
    ToolCallDelta,
)
from sluice.server.exchange import Exchange
from sluice.server.messages import check_messages, tool_choice_of, tools_of
from sluice.server.options import (
    check_options,
    deadline_of,
    output_format_of,
    output_tokens_min_of,
    sampling_of,
    slo_class_of,
    stops_of,
)
from sluice.server.ports import Gateway, Generation
from sluice.server.sse import DONE, answer_headers, complete_pieces, encode_json, stream
from sluice.server.stamp import Stamp, usage_json
from sluice.server.wire import ChatRequest, Json, decode, decode_chat


async def chat(exchange: Exchange, gateway: Gateway, stamp: Stamp) -> None:
    """Answer one chat completion."""
    request = decode(decode_chat, await exchange.json_body())
    exchange.model = request.model
    call = call_of(request, exchange)
    async with exchange.attended():
        exchange.handed_over = True
        generation = await gateway.generate(call)
        try:
            if request.stream:
                options = request.stream_options
                with_usage = options is not None and bool(options.include_usage)
                chunks = ChatChunks(stamp.with_model(generation.model), with_usage=with_usage)
                await stream(exchange, generation, chunks)
            else:
                body = await whole_chat(generation, stamp, call.choices)
                await exchange.reply(200, body, answer_headers(generation))
        finally:
            generation.cancel()


def call_of(request: ChatRequest, exchange: Exchange) -> Call:
    """Check a request and make it a ``Call``. Raises ``InvalidRequest``."""
    check_options(request, exchange.limits.choices_max)
    _refuse_unsupported(request)
    logprobs_top = _logprobs_top(request)
    tools = tools_of(request.tools)
    output_tokens_max = (
        request.max_tokens
        if request.max_completion_tokens is None
        else request.max_completion_tokens
    )
    return Call(
        id=exchange.call_id,
        model=request.model,
        arrived_ns=exchange.arrived_ns,
        prompt=ChatPrompt(
            messages=check_messages(request.messages),
            tools=tools,
            tool_choice=tool_choice_of(request.tool_choice, tools),
            template_options=request.chat_template_kwargs or {},
        ),
        sampling=sampling_of(request, logprobs_top),
        choices=request.n or 1,
        output_tokens_max=output_tokens_max,
        output_tokens_min=output_tokens_min_of(request, output_tokens_max),
        stop=stops_of(request.stop),
        stop_tokens=tuple(request.stop_token_ids or ()),
        ignore_end_token=bool(request.ignore_eos),
        output_format=output_format_of(request.response_format),
        tenant=exchange.tenant,
        slo_class=slo_class_of(exchange),
        client_id=exchange.client_id,
        deadline_ns=deadline_of(exchange),
    )


def _logprobs_top(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _refuse_unsupported(request: ChatRequest) -> None:
    """Fields that would change the answer and that nothing here carries out."""
    if request.functions:
        raise InvalidRequest("functions is not supported; use tools.", param="functions")
    if request.modalities and request.modalities != ["text"]:
        raise InvalidRequest(
            "modalities must be text: nothing else is made here.", param="modalities"
        )


# ------------------------------------------------------------------------------------- streaming


class ChatChunks:
    """Encoder of ``chat.completion.chunk`` events.

    The parts of a chunk that stay the same are built once per request and choice: a chunk then
    costs one string escape and one join.
    """

    def __init__(self, stamp: Stamp, *, with_usage: bool) -> None:
        head = stamp.head("chat.completion.chunk")
        self._with_usage = with_usage
        self._head = b"data: {" + head
        self._tail = b"}]" + (b',"usage":null' if with_usage else b"") + b"}\n\n"
        self._text_tail = b'},"logprobs":null,"finish_reason":null' + self._tail
        self._text_heads: dict[int, bytes] = {}

    def delta(self, delta: Delta) -> bytes:
        """Chunks for new text, tool calls and log-probabilities; the first one brings the role."""
        head = self._text_heads.get(delta.choice)
        if head is None:
            return self._begin(delta.choice) + self.delta(delta)
        if not delta.tool_calls and not delta.logprobs:
            return head + encode_json(delta.text) + self._text_tail
        changes: dict[str, Any] = {}
        if delta.text or not delta.tool_calls:
            changes["content"] = delta.text
        if delta.tool_calls:
            changes["tool_calls"] = [_tool_call_json(call) for call in delta.tool_calls]
        logprobs = encode_json(logprobs_json(delta.logprobs)) if delta.logprobs else b"null"
        return (
            self._start(delta.choice)
            + encode_json(changes)
            + b',"logprobs":%b,"finish_reason":null' % logprobs
            + self._tail
        )

    def ended(self, ended: ChoiceEnded) -> bytes:
        """The one chunk of the choice that carries its finish_reason."""
        begin = b"" if ended.choice in self._text_heads else self._begin(ended.choice)
        finish = b'{},"logprobs":null,"finish_reason":"%b"' % ended.finish.encode()
        return begin + self._start(ended.choice) + finish + self._tail

    def finished(self, finished: Finished) -> bytes:
        """Usage, where asked for, and the terminator."""
        if not self._with_usage:
            return DONE
        usage = encode_json(usage_json(finished.usage))
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\n" + DONE

    def _start(self, choice: int) -> bytes:
        return self._head + b',"choices":[{"index":%d,"delta":' % choice

    def _begin(self, choice: int) -> bytes:
        start = self._start(choice)
        self._text_heads[choice] = start + b'{"content":'
        return start + b'{"role":"assistant","content":""' + self._text_tail


def _tool_call_json(call: ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    piece: Json = {"index": call.index, "function": function}
    if call.name is not None:
        function["name"] = call.name
        piece["id"] = call.id
        piece["type"] = "function"
    return piece


def logprobs_json(tokens: tuple[TokenText, ...]) -> Json:
    """Log-probabilities of a choice in the shape of chat completions."""
    return {
        "content": [
            {**_logprob_json(token.sampled), "top_logprobs": [_logprob_json(t) for t in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def _logprob_json(logprob: TextLogprob) -> Json:
    return {"token": logprob.text, "logprob": logprob.logprob, "bytes": list(logprob.utf8)}


# ----------------------------------------------------------------------------------------- whole


class _Choice:
    """What one choice has said so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenText] = []
        self.calls = ToolCalls()
        self.finish = "stop"

    def json(self, index: int) -> Json:
        content = "".join(self.texts)
        calls = self.calls.chat_json()
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = calls
        logprobs = logprobs_json(tuple(self.logprobs)) if self.logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish,
        }


class ToolCalls:
    """Tool calls put together from their pieces, by index."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, str, list[str]]] = {}

    def add(self, pieces: tuple[ToolCallDelta, ...]) -> None:
        """Add pieces; the first one of an index names the call."""
        for piece in pieces:
            begun = self.calls.setdefault(piece.index, (piece.id or "", piece.name or "", []))
            begun[2].append(piece.arguments)

    def chat_json(self) -> list[Json]:
        """The calls in the shape of chat completions, in order of their index."""
        return [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": "".join(arguments)},
            }
            for _, (call_id, name, arguments) in sorted(self.calls.items())
        ]


async def whole_chat(generation: Generation, stamp: Stamp, choices: int) -> bytes:
    """The body of an answer that is not streamed."""
    said = [_Choice() for _ in range(choices)]
    usage: Json = {}
    async for piece in complete_pieces(generation):
        match piece:
            case Delta():
                choice = said[piece.choice]
                choice.texts.append(piece.text)
                choice.logprobs.extend(piece.logprobs)
                choice.calls.add(piece.tool_calls)
            case ChoiceEnded():
                said[piece.choice].finish = piece.finish
            case Finished():
                usage = usage_json(piece.usage)
    return encode_json(
        {
            **stamp.with_model(generation.model).fields("chat.completion"),
            "choices": [choice.json(index) for index, choice in enumerate(said)],
            "usage": usage,
        }
    )
