"""``POST /v1/responses`` for text: from the body to a ``Call``, and from pieces to typed events.

Nothing is stored, so whatever refers to an earlier response is refused. Input items become chat
messages here; shapes of messages and tools are checked in ``messages``; output items and events are
in ``response_items``.
"""

from dataclasses import replace

from sluice.core.errors import InvalidRequest, SluiceError
from sluice.core.sampling import Sampling
from sluice.runtime.generation import Call, ChatPrompt, ChoiceEnded, Delta, Finished, OutputFormat
from sluice.server.exchange import Exchange
from sluice.server.messages import check_messages, text_of, tool_choice_of, tools_of
from sluice.server.options import call_for, check_ranges, schema_format
from sluice.server.ports import Gateway, Generation
from sluice.server.problems import problem_of
from sluice.server.relay import Surface, serve_call
from sluice.server.response_items import Draft, ResponseEvents
from sluice.server.sse import answer_headers, complete_pieces, encode_json, stream
from sluice.server.stamp import Stamp
from sluice.server.wire import Json, ResponsesRequest, decode, decode_responses

_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")


async def responses(exchange: Exchange, gateway: Gateway, stamp: Stamp) -> None:
    """Answer one response request."""
    await serve_call(exchange, gateway, stamp, Surface(_understand, _answer))


def _understand(exchange: Exchange, body: bytes) -> tuple[ResponsesRequest, list[Call]]:
    request = decode(decode_responses, body)
    exchange.model = request.model
    return request, [call_of(request, exchange)]


async def _answer(
    exchange: Exchange, generation: Generation, stamp: Stamp, request: ResponsesRequest
) -> None:
    draft = Draft(stamp, _settings(request))
    if request.stream:
        await _stream(exchange, generation, ResponseEvents(draft))
    else:
        body = await _whole(generation, draft)
        await exchange.reply(200, body, answer_headers(generation))


async def _stream(exchange: Exchange, generation: Generation, events: ResponseEvents) -> None:
    try:
        await stream(exchange, generation, events)
    except SluiceError as error:
        if not exchange.started:
            raise
        await exchange.close_stream(events.failed(problem_of(error)))


async def _whole(generation: Generation, draft: Draft) -> bytes:
    async for piece in complete_pieces(generation):
        match piece:
            case Delta():
                draft.add(piece)
            case ChoiceEnded():
                draft.end(piece)
            case Finished():
                draft.usage = piece.usage
    return encode_json(draft.response())


def call_of(request: ResponsesRequest, exchange: Exchange) -> Call:
    """Check a request and make it a ``Call``. Raises ``InvalidRequest``."""
    check_ranges(request)
    _refuse_unsupported(request)
    tools = tools_of(_chat_tools(request.tools or []))
    wants_logprobs = _LOGPROBS in (request.include or ())
    if request.top_logprobs and not wants_logprobs:
        message = f"top_logprobs needs {_LOGPROBS} in include."
        raise InvalidRequest(message, param="top_logprobs")
    prompt = ChatPrompt(
        messages=_messages(request),
        tools=tools,
        tool_choice=tool_choice_of(request.tool_choice, tools),
    )
    sampling = Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        logprobs_top=(request.top_logprobs or 0) if wants_logprobs else None,
    )
    call = call_for(exchange, request, prompt, _format(request))
    return replace(call, sampling=sampling, output_tokens_max=request.max_output_tokens)


def _refuse_unsupported(request: ResponsesRequest) -> None:
    """Fields that would change the answer and that nothing here carries out."""
    stored = "Responses are not stored here: send the whole conversation in input."
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} is not supported. {stored}", param=name)
    if request.store:
        raise InvalidRequest(f"store must be false or absent. {stored}", param="store")
    if request.background:
        raise InvalidRequest("background must be false or absent.", param="background")
    if request.prompt is not None:
        raise InvalidRequest("prompt templates are not kept here; use input.", param="prompt")
    if request.truncation not in {None, "disabled"}:
        message = "truncation must be disabled: input is never shortened here."
        raise InvalidRequest(message, param="truncation")


# ----------------------------------------------------------------------------------------- input


def _messages(request: ResponsesRequest) -> list[Json]:
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
        return messages
    if not request.input:
        raise InvalidRequest("input must not be empty.", param="input")
    for number, item in enumerate(request.input):
        _add_item(messages, item, f"input[{number}]")
    return _checked(messages)


def _checked(messages: list[Json]) -> list[Json]:
    """The chat rules, with ``input`` named in what they refuse."""
    try:
        return check_messages(messages)
    except InvalidRequest as error:
        message = error.message.replace("messages[", "input[")
        raise InvalidRequest(message, param="input") from None


def _add_item(messages: list[Json], item: Json, at: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        content = text_of(item.get("content"), f"{at}.content", _TEXT_PARTS)
        _check_role(item, at)
        messages.append({"role": item["role"], "content": content})
    elif kind == "function_call":
        call = {
            "id": _string(item, "call_id", at),
            "type": "function",
            "function": {
                "name": _string(item, "name", at),
                "arguments": _string(item, "arguments", at),
            },
        }
        # Calls made in one turn are one assistant message to a chat template.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = text_of(item.get("output"), f"{at}.output", _TEXT_PARTS)
        call_id = _string(item, "call_id", at)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind != "reasoning":  # kept by clients between turns; these models do not read it
        message = f"{at}.type {str(kind)[:40]!r} is not supported; see the documentation."
        raise InvalidRequest(message, param=f"{at}.type")


def _check_role(item: Json, at: str) -> None:
    if item.get("role") not in {"user", "assistant", "system", "developer"}:
        message = f"{at}.role must be user, assistant, system or developer."
        raise InvalidRequest(message, param=f"{at}.role")


def _string(item: Json, key: str, at: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{at}.{key} must be a string.", param=f"{at}.{key}")
    return value


def _chat_tools(tools: list[Json]) -> list[Json]:
    """Tools are flat in responses and nested in chat completions."""
    return [
        {
            "type": tool.get("type"),
            "function": {
                key: tool[key]
                for key in ("name", "description", "parameters", "strict")
                if tool.get(key) is not None
            },
        }
        for tool in tools
    ]


def _format(request: ResponsesRequest) -> OutputFormat:
    wanted = request.text.format if request.text is not None else None
    kind = "text" if wanted is None else wanted.get("type")
    if kind == "text":
        return OutputFormat()
    if kind == "json_object":
        return OutputFormat("json_object")
    if kind == "json_schema" and wanted is not None:
        return schema_format(wanted, "text.format")
    message = "text.format.type must be text, json_object or json_schema."
    raise InvalidRequest(message, param="text.format.type")


def _settings(request: ResponsesRequest) -> Json:
    """What a response object repeats of its request."""
    text_format = request.text.format if request.text is not None else None
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
