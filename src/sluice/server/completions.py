"""``POST /v1/completions``: text in, text out, without a chat template.

A request may carry several prompts; each becomes one ``Call``, and choice ``c`` of prompt ``p`` has
the index ``p * n + c``. ``merged`` makes one generation of them. Log-probabilities have the
old shape of parallel lists.
"""

from dataclasses import dataclass, replace

from sluice.core.errors import InvalidRequest
from sluice.runtime.generation import (
    Call,
    ChoiceEnded,
    Delta,
    Finished,
    OutputFormat,
    TextPrompt,
    TokenPrompt,
    TokenText,
)
from sluice.server.chunks import ChunkFrame
from sluice.server.exchange import Exchange
from sluice.server.options import LOGPROBS_MAX, call_for, check_options, wants_usage, with_options
from sluice.server.ports import Gateway, Generation
from sluice.server.relay import Surface, serve_call
from sluice.server.sse import answer_headers, complete_pieces, encode_json, stream
from sluice.server.stamp import Stamp
from sluice.server.wire import CompletionRequest, Json, decode, decode_completion

# What clients get that set no limit: OpenAI's default for this route.
_OUTPUT_TOKENS_DEFAULT = 16


async def completions(exchange: Exchange, gateway: Gateway, stamp: Stamp) -> None:
    """Answer one text completion."""
    await serve_call(exchange, gateway, stamp, Surface(_understand, _answer))


def _understand(
    exchange: Exchange, body: bytes
) -> tuple[tuple[CompletionRequest, list[str]], list[Call]]:
    request = decode(decode_completion, body)
    exchange.model = request.model
    calls = calls_of(request, exchange)
    return (request, _echoes(request, calls)), calls


async def _answer(
    exchange: Exchange,
    generation: Generation,
    stamp: Stamp,
    asked: tuple[CompletionRequest, list[str]],
) -> None:
    request, echoes = asked
    if request.stream:
        chunks = CompletionChunks(stamp, echoes, with_usage=wants_usage(request))
        await stream(exchange, generation, chunks)
    else:
        body = await _whole(generation, stamp, echoes)
        await exchange.reply(200, body, answer_headers(generation))


def calls_of(request: CompletionRequest, exchange: Exchange) -> list[Call]:
    """Check a request and make each prompt a ``Call``. Raises ``InvalidRequest``."""
    check_options(request, exchange.limits.choices_max)
    prompts = prompts_of(request.prompt, request.n or 1, exchange.limits.choices_max)
    _refuse_unsupported(request, prompts)
    output_tokens_max = _OUTPUT_TOKENS_DEFAULT if request.max_tokens is None else request.max_tokens
    call = call_for(exchange, request, prompts[0], OutputFormat())
    call = with_options(call, request, output_tokens_max, request.logprobs)
    if len(prompts) == 1:
        return [call]
    return [
        replace(call, id=f"{call.id}-{number}", prompt=prompt, likeness=call.likeness + number)
        for number, prompt in enumerate(prompts)
    ]


def prompts_of(
    prompt: str | list[int | str | list[int]], choices: int, choices_max: int
) -> list[TextPrompt | TokenPrompt]:
    """A string, a list of token ids, or a list of these. Raises ``InvalidRequest``.

    Each prompt makes ``choices`` choices, all together at most ``choices_max``.
    """
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    if all(isinstance(part, int) for part in prompt):
        prompt = [[part for part in prompt if isinstance(part, int)]]
    if len(prompt) * choices > choices_max:
        message = (
            f"{len(prompt)} prompts times n={choices} is over the limit of "
            f"{choices_max} choices in one request; send fewer prompts."
        )
        raise InvalidRequest(message, param="prompt")
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
    """Encoder of ``text_completion`` events."""

    def __init__(self, stamp: Stamp, echoes: list[str], *, with_usage: bool) -> None:
        self._frame = ChunkFrame(stamp, "text_completion", "text", with_usage=with_usage)
        self._text_end = self._frame.end()
        self._unsaid = dict(enumerate(echoes))
        self._logprobs = [OldLogprobs(len(echo)) for echo in echoes]

    def delta(self, delta: Delta) -> bytes:
        """One chunk of new text, after the echoed prompt at first."""
        text = self._unsaid.pop(delta.choice, "") + delta.text
        begin = self._frame.begin(delta.choice) + encode_json(text)
        if not delta.logprobs:
            return begin + self._text_end
        logprobs = self._logprobs[delta.choice].json(delta.logprobs)
        return begin + self._frame.end(encode_json(logprobs))

    def ended(self, ended: ChoiceEnded) -> bytes:
        """The one chunk of the choice that carries its finish_reason."""
        text = encode_json(self._unsaid.pop(ended.choice, ""))
        return self._frame.begin(ended.choice) + text + self._frame.end(finish=ended.finish)

    def finished(self, finished: Finished) -> bytes:
        """Usage, where asked for, and the terminator."""
        return self._frame.last(finished.usage)


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
                usage = stamp.usage(piece.usage)
    choices = [
        {
            "index": index,
            "text": "".join(text),
            "logprobs": OldLogprobs(len(echoes[index])).json(tuple(tokens)) if tokens else None,
            "finish_reason": finish,
        }
        for index, (text, tokens, finish) in enumerate(zip(texts, logprobs, finishes, strict=True))
    ]
    fields = stamp.fields("text_completion")
    return encode_json({**fields, "choices": choices, "usage": usage})
