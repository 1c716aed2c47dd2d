"""``POST /v1/completions``: text in, text out, without a chat template.

A request may carry several prompts; each becomes one ``Call``, and choice ``c`` of prompt ``p`` has
the index ``p * n + c``. ``merged`` joins the calls into one generation. Log-probabilities have the
old shape of parallel lists.
"""

from dataclasses import dataclass

from sluice.core.errors import InvalidRequest
from sluice.runtime.generation import (
    Call,
    ChoiceEnded,
    Delta,
    Finished,
    TextPrompt,
    TokenPrompt,
    TokenText,
)
from sluice.server.exchange import Exchange
from sluice.server.merged import generate_all
from sluice.server.options import (
    LOGPROBS_MAX,
    check_options,
    deadline_of,
    output_tokens_min_of,
    sampling_of,
    slo_class_of,
    stops_of,
)
from sluice.server.ports import Gateway, Generation
from sluice.server.sse import DONE, answer_headers, complete_pieces, encode_json, stream
from sluice.server.stamp import Stamp, usage_json
from sluice.server.wire import CompletionRequest, Json, decode, decode_completion

# What clients get that set no limit: OpenAI's default for this route.
_OUTPUT_TOKENS_DEFAULT = 16


async def completions(exchange: Exchange, gateway: Gateway, stamp: Stamp) -> None:
    """Answer one text completion."""
    request = decode(decode_completion, await exchange.json_body())
    exchange.model = request.model
    calls = calls_of(request, exchange)
    echoes = _echoes(request, calls)
    async with exchange.attended():
        exchange.handed_over = True
        generation = await generate_all(gateway, calls)
        try:
            if request.stream:
                options = request.stream_options
                with_usage = options is not None and bool(options.include_usage)
                stamp = stamp.with_model(generation.model)
                chunks = CompletionChunks(stamp, echoes, with_usage=with_usage)
                await stream(exchange, generation, chunks)
            else:
                body = await _whole(generation, stamp, echoes)
                await exchange.reply(200, body, answer_headers(generation))
        finally:
            generation.cancel()


def calls_of(request: CompletionRequest, exchange: Exchange) -> list[Call]:
    """Check a request and make each prompt a ``Call``. Raises ``InvalidRequest``."""
    check_options(request, exchange.limits.choices_max)
    prompts = prompts_of(request.prompt)
    choices = request.n or 1
    if len(prompts) * choices > exchange.limits.choices_max:
        message = (
            f"{len(prompts)} prompts times n={choices} is over the limit of "
            f"{exchange.limits.choices_max} choices in one request; send fewer prompts."
        )
        raise InvalidRequest(message, param="prompt")
    _refuse_unsupported(request, prompts)
    output_tokens_max = _OUTPUT_TOKENS_DEFAULT if request.max_tokens is None else request.max_tokens
    sampling = sampling_of(request, request.logprobs)
    return [
        Call(
            id=exchange.call_id if len(prompts) == 1 else f"{exchange.call_id}-{number}",
            model=request.model,
            arrived_ns=exchange.arrived_ns,
            prompt=prompt,
            sampling=sampling,
            choices=choices,
            output_tokens_max=output_tokens_max,
            output_tokens_min=output_tokens_min_of(request, output_tokens_max),
            stop=stops_of(request.stop),
            stop_tokens=tuple(request.stop_token_ids or ()),
            ignore_end_token=bool(request.ignore_eos),
            tenant=exchange.tenant,
            slo_class=slo_class_of(exchange),
            client_id=exchange.client_id,
            deadline_ns=deadline_of(exchange),
        )
        for number, prompt in enumerate(prompts)
    ]


def prompts_of(prompt: str | list[int | str | list[int]]) -> list[TextPrompt | TokenPrompt]:
    """A string, a list of token ids, or a list of these. Raises ``InvalidRequest``."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    if all(isinstance(part, int) for part in prompt):
        prompt = [[part for part in prompt if isinstance(part, int)]]
    prompts: list[TextPrompt | TokenPrompt] = []
    for number, part in enumerate(prompt):
        if isinstance(part, str):
            prompts.append(TextPrompt(part))
        elif isinstance(part, list) and part:
            prompts.append(_token_prompt(part))
        else:
            message = f"prompt[{number}] must be a string or a list of token ids."
            raise InvalidRequest(message, param=f"prompt[{number}]")
    return prompts


def _token_prompt(tokens: list[int]) -> TokenPrompt:
    if min(tokens) < 0 or max(tokens) > 2**31 - 1:
        raise InvalidRequest("Token ids must not be negative or over 31 bits.", param="prompt")
    return TokenPrompt(tuple(tokens))


def _refuse_unsupported(
    request: CompletionRequest, prompts: list[TextPrompt | TokenPrompt]
) -> None:
    if request.suffix:
        raise InvalidRequest("suffix is not supported: text is only continued.", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest(
            "best_of is not supported; leave it out or equal to n.", param="best_of"
        )
    if request.logprobs is not None and not 0 <= request.logprobs <= LOGPROBS_MAX:
        raise InvalidRequest(f"logprobs must be 0 to {LOGPROBS_MAX}.", param="logprobs")
    if not request.echo:
        return
    if request.logprobs is not None:
        message = "echo with logprobs is not supported: prompt tokens have no log-probabilities."
        raise InvalidRequest(message, param="echo")
    if any(isinstance(prompt, TokenPrompt) for prompt in prompts):
        raise InvalidRequest("echo needs prompts that are text, not token ids.", param="echo")


def _echoes(request: CompletionRequest, calls: list[Call]) -> list[str]:
    """Text that goes before each choice, by index: the prompt with ``echo``, else nothing."""
    return [
        call.prompt.text if request.echo and isinstance(call.prompt, TextPrompt) else ""
        for call in calls
        for _ in range(call.choices)
    ]


# ---------------------------------------------------------------------------- log-probabilities


@dataclass(slots=True)
class OldLogprobs:
    """Offsets of the tokens in the text of one choice, carried from chunk to chunk."""

    offset: int

    def json(self, tokens: tuple[TokenText, ...]) -> Json:
        """The tokens in the old shape. ``top_logprobs`` holds the sampled token as well."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token.sampled.text)
        return {
            "tokens": [token.sampled.text for token in tokens],
            "token_logprobs": [token.sampled.logprob for token in tokens],
            "top_logprobs": [
                {top.text: top.logprob for top in (token.sampled, *token.top)} for token in tokens
            ],
            "text_offset": offsets,
        }


# ------------------------------------------------------------------------------------- streaming


class CompletionChunks:
    """Encoder of ``text_completion`` events; see ``chat.ChatChunks``."""

    def __init__(self, stamp: Stamp, echoes: list[str], *, with_usage: bool) -> None:
        self._with_usage = with_usage
        self._head = b"data: {" + stamp.head("text_completion")
        self._tail = b"}]" + (b',"usage":null' if with_usage else b"") + b"}\n\n"
        self._text_tail = b',"logprobs":null,"finish_reason":null' + self._tail
        self._unsaid = dict(enumerate(echoes))
        self._logprobs = [OldLogprobs(len(echo)) for echo in echoes]

    def delta(self, delta: Delta) -> bytes:
        """One chunk of new text, after the echoed prompt at first."""
        text = self._unsaid.pop(delta.choice, "") + delta.text
        start = self._start(delta.choice) + encode_json(text)
        if not delta.logprobs:
            return start + self._text_tail
        logprobs = encode_json(self._logprobs[delta.choice].json(delta.logprobs))
        return start + b',"logprobs":%b,"finish_reason":null' % logprobs + self._tail

    def ended(self, ended: ChoiceEnded) -> bytes:
        """The one chunk of the choice that carries its finish_reason."""
        text = encode_json(self._unsaid.pop(ended.choice, ""))
        finish = b',"logprobs":null,"finish_reason":"%b"' % ended.finish.encode()
        return self._start(ended.choice) + text + finish + self._tail

    def finished(self, finished: Finished) -> bytes:
        """Usage, where asked for, and the terminator."""
        if not self._with_usage:
            return DONE
        usage = encode_json(usage_json(finished.usage))
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\n" + DONE

    def _start(self, choice: int) -> bytes:
        return self._head + b',"choices":[{"index":%d,"text":' % choice


async def _whole(generation: Generation, stamp: Stamp, echoes: list[str]) -> bytes:
    """The body of an answer that is not streamed."""
    texts = [[echo] for echo in echoes]
    logprobs: list[list[TokenText]] = [[] for _ in echoes]
    finishes = ["stop" for _ in echoes]
    usage: Json = {}
    async for piece in complete_pieces(generation):
        match piece:
            case Delta():
                texts[piece.choice].append(piece.text)
                logprobs[piece.choice].extend(piece.logprobs)
            case ChoiceEnded():
                finishes[piece.choice] = piece.finish
            case Finished():
                usage = usage_json(piece.usage)
    choices = [
        {
            "index": index,
            "text": "".join(text),
            "logprobs": OldLogprobs(len(echoes[index])).json(tuple(tokens)) if tokens else None,
            "finish_reason": finish,
        }
        for index, (text, tokens, finish) in enumerate(zip(texts, logprobs, finishes, strict=True))
    ]
    fields = stamp.with_model(generation.model).fields("text_completion")
    return encode_json({**fields, "choices": choices, "usage": usage})
