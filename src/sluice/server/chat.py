"""``POST /v1/chat/completions``: from the body to a ``Call``.

The route checks the body, calls the gateway and streams or collects. Ranges are in ``options``,
shapes of messages and tools in ``messages``, chunks and whole answers in ``chat_answers``, the
order of events in ``sse``.

``max_completion_tokens`` wins over ``max_tokens`` where both are given. Log-probabilities are those
of the model, before temperature. ``user`` is accepted and changes nothing.
"""

from sluice.core.errors import InvalidRequest
from sluice.runtime.generation import Call, ChatPrompt
from sluice.server.chat_answers import ChatChunks, whole_chat
from sluice.server.exchange import Exchange
from sluice.server.messages import check_messages, tool_choice_of, tools_of
from sluice.server.options import (
    call_for,
    check_options,
    output_format_of,
    wants_usage,
    with_options,
)
from sluice.server.ports import Gateway, Generation
from sluice.server.relay import Surface, serve_call
from sluice.server.sse import answer_headers, stream
from sluice.server.stamp import Stamp
from sluice.server.wire import ChatRequest, decode, decode_chat


async def chat(exchange: Exchange, gateway: Gateway, stamp: Stamp) -> None:
    """Answer one chat completion."""
    await serve_call(exchange, gateway, stamp, Surface(_understand, _answer))


def _understand(exchange: Exchange, body: bytes) -> tuple[ChatRequest, list[Call]]:
    request = decode(decode_chat, body)
    exchange.model = request.model
    return request, [call_of(request, exchange)]


async def _answer(
    exchange: Exchange, generation: Generation, stamp: Stamp, request: ChatRequest
) -> None:
    if request.stream:
        chunks = ChatChunks(stamp, with_usage=wants_usage(request))
        await stream(exchange, generation, chunks)
    else:
        body = await whole_chat(generation, stamp, request.n or 1)
        await exchange.reply(200, body, answer_headers(generation))


def call_of(request: ChatRequest, exchange: Exchange) -> Call:
    """Check a request and make it a ``Call``. Raises ``InvalidRequest``."""
    check_options(request, exchange.limits.choices_max)
    _refuse_unsupported(request)
    logprobs_top = _logprobs_top(request)
    tools = tools_of(request.tools)
    prompt = ChatPrompt(
        messages=check_messages(request.messages),
        tools=tools,
        tool_choice=tool_choice_of(request.tool_choice, tools),
        template_options=request.chat_template_kwargs or {},
    )
    output_tokens_max = request.max_completion_tokens
    if output_tokens_max is None:
        output_tokens_max = request.max_tokens
    output_format = output_format_of(request.response_format)
    call = call_for(exchange, request, prompt, output_format)
    return with_options(call, request, output_tokens_max, logprobs_top)


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
