"""The text side of one model in the gateway: calls to token ids, text pieces to tool calls.

Decides what a call means in tokens (template, prompt ids, room for output, grammar) and refuses
what cannot be meant. Whether there is capacity for it is the fleet's decision; sampling and stop
strings are carried out in the replica.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import assert_never

from sluice.cluster.classes import ServiceClasses
from sluice.core.errors import ContextExceeded, InternalError, InvalidRequest, Overloaded
from sluice.core.events import ReplicaLimits
from sluice.core.request import Request
from sluice.runtime.generation import (
    Call,
    ChatPrompt,
    Delta,
    ModelCard,
    RawPrompt,
    TextPrompt,
    TokenPrompt,
)
from sluice.runtime.grammar import format_grammar, tool_grammar
from sluice.runtime.grammar_trial import GrammarTrial
from sluice.runtime.messages import Submit
from sluice.runtime.output import OutputRules
from sluice.runtime.templates import ChatTemplate
from sluice.runtime.tokenizing import TextTokens
from sluice.runtime.tools import ToolCallParser, ToolFormat, tool_format

# Requests longer than this are rendered and tokenised on another thread: at about 5 MB/s a shorter
# one holds the event loop for a few milliseconds at most.
_INLINE_BYTES_MAX = 16_384
# Calls whose schemas are being tried or wait for it; a bad one takes about half a second.
_TRIALS_MAX = 8


class ServedModel:
    """One model that clients can ask for.

    ``limits`` are those of its replicas, ``None`` until one was ready. ``classes`` says in which
    class a call is served. ``new_id`` gives ids for tool calls. ``trial`` tries schemas
    before a replica has to; without one they are only read.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: TextTokens,
        template: ChatTemplate,
        classes: ServiceClasses,
        new_id: Callable[[], str],
        trial: GrammarTrial | None = None,
    ) -> None:
        self._card = card
        self.limits: ReplicaLimits | None = None
        self._tokenizer = tokenizer
        self._template = template
        self.classes = classes
        self._new_id = new_id
        self._trial = trial
        self._tool_format = tool_format(tokenizer.facts.chat_template or "")
        # Their own threads, so that bad schemas keep no prompt from being tokenised, and new ones
        # keep none that is known from being served.
        self._schema_threads = ThreadPoolExecutor(2, "schemas")
        self._trial_threads = ThreadPoolExecutor(1, "trials")
        self._trials = 0

    @property
    def card(self) -> ModelCard:
        """The model as clients see it, with the context that one request can really get."""
        return replace(self._card, context_tokens_max=self._context_tokens_max)

    def named(self, call: Call) -> Call:
        """The call with the name of the class that it is served in. Raises ``InvalidRequest``."""
        return self.classes.named(call)

    async def check_together(self, calls: Sequence[Call]) -> None:
        """Check the calls of one request against the limits of its tenant.

        Raises ``InvalidRequest`` where they are more than it may ever have.
        """
        self.classes.check_together(calls)
        if self.classes.counts_tokens(calls[0].tenant):
            requests = await asyncio.to_thread(lambda: [self.request_of(call) for call in calls])
            self.classes.check_tokens_together(requests)

    def request_of(self, call: Call) -> Request:
        """The request that a call would be; tokenises. Raises ``RequestError``."""
        call = self.named(call)
        self._check_tokens(call)
        return self._request(call, self._encode(call))

    def least(self, call: Call) -> Request:
        """The least that a call can be, whatever its prompt is: without one, and one token long."""
        return self.classes.request(call, (), 1)

    def holds(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens, prompt and output together, can ever run here."""
        return tokens <= self._context_tokens_max

    async def submit(self, call: Call) -> Submit:
        """Turn a call into what a replica is sent. Raises ``RequestError``."""
        call = self.named(call)
        self._check_tokens(call)
        if self._tokenizer.facts.made_up:
            self._check_made_up(call)
        if call.body_bytes > _INLINE_BYTES_MAX:
            prompt = await asyncio.to_thread(self._encode, call)
        else:
            prompt = self._encode(call)
        grammar = None
        if call.output_format.kind == "json_schema" or self.tool_calls(call) is not None:
            grammar = await self._schema_grammar(call)
        elif call.output_format.kind == "json_object":
            grammar, _ = self._grammar(call)
        return Submit(self._request(call, prompt), call.sampling, self._rules(call), grammar)

    def _request(self, call: Call, prompt: tuple[int, ...]) -> Request:
        output_tokens_max = call.output_tokens_max
        if output_tokens_max is None:
            output_tokens_max = max(1, self._context_tokens_max - len(prompt))
        return self.classes.request(call, prompt, output_tokens_max)

    def tool_calls(self, call: Call) -> "ToolCalls | None":
        """What takes tool calls out of the call's text, ``None`` where it offers no tools."""
        prompt = call.prompt
        if not isinstance(prompt, ChatPrompt) or not prompt.tools or prompt.tool_choice == "none":
            return None
        names = frozenset(tool["function"]["name"] for tool in prompt.tools)
        return ToolCalls(self._tool_format, names, self._new_id)

    def tokens_in(self, text: str) -> int:
        """How many tokens a piece of text has."""
        return len(self._tokenizer.encode_text(text))

    def text_of(self, tokens: Sequence[int]) -> str:
        """A prompt as the model sees it, special tokens included."""
        raw = self._tokenizer.table.raw
        return b"".join(raw[token] for token in tokens).decode("utf-8", "replace")

    # ------------------------------------------------------------------------------------ tokens

    @property
    def _context_tokens_max(self) -> int:
        if self.limits is None:
            return self._card.context_tokens_max
        pool_tokens = self.limits.block_size * self.limits.blocks_total
        return min(self.limits.context_tokens_max, pool_tokens)

    def _encode(self, call: Call) -> tuple[int, ...]:
        match call.prompt:
            case ChatPrompt():
                rendered = self._template.render(call.prompt)
                self._check_length(rendered, "messages")
                prompt = self._tokenizer.encode_chat(rendered)
            case TextPrompt():
                self._check_length(call.prompt.text, "prompt")
                prompt = self._tokenizer.encode_text(call.prompt.text)
            case TokenPrompt():
                prompt = call.prompt.tokens
            case RawPrompt():
                raise InternalError("a call that nobody has read came to a model that batches here")
            case _:
                assert_never(call.prompt)
        if not prompt:
            raise InvalidRequest("The prompt is empty; send at least one token.", param="prompt")
        return prompt

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a text that is too long however it is tokenised, before the work of doing so."""
        self._check_room(self._tokenizer.tokens_min(len(text.encode("utf-8", "replace"))), param)

    def _check_room(self, tokens_min: int, param: str) -> None:
        room = self._context_tokens_max
        if tokens_min >= room:
            raise ContextExceeded(
                f"The prompt has at least {tokens_min} tokens; {self._card.id} holds {room} tokens "
                "for prompt and output together. Shorten the prompt.",
                param=param,
            )

    def _check_tokens(self, call: Call) -> None:
        vocab_size = self._tokenizer.facts.vocab_size
        asked = [("logit_bias", tuple(call.sampling.logit_bias))]
        asked.append(("stop_token_ids", call.stop_tokens))
        if isinstance(call.prompt, TokenPrompt):
            self._check_room(len(call.prompt.tokens), "prompt")
            asked.append(("prompt", call.prompt.tokens))
        for param, tokens in asked:
            wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{param} has the token id {wrong}; {self._card.id} has ids from 0 to "
                    f"{vocab_size - 1}.",
                    param=param,
                )
        if call.output_tokens_min > 0 and len(call.stop_tokens) >= vocab_size // 2:
            self._check_choice_left(call)

    def _check_made_up(self, call: Call) -> None:
        """Refuse what only a model that is computed can do."""
        prompt, sampling = call.prompt, call.sampling
        forced = isinstance(prompt, ChatPrompt) and prompt.tool_choice not in {"auto", "none"}
        asked = {
            "logprobs": sampling.logprobs_top is not None,
            "logit_bias": bool(sampling.logit_bias),
            "response_format": call.output_format.kind != "text",
            "tool_choice": forced,
        }
        for param in (param for param, is_asked in asked.items() if is_asked):
            raise InvalidRequest(
                f"{self._card.id} is simulated: its text is made up and its tokens have no "
                f"probabilities, so {param} cannot be served; leave it out.",
                param=param,
            )

    def _check_choice_left(self, call: Call) -> None:
        """Refuse a call before whose minimum no token may come, since each would end it."""
        facts = self._tokenizer.facts
        ends = {*call.stop_tokens, *(() if call.ignore_end_token else facts.end_tokens)}
        if len(ends) >= facts.vocab_size:
            raise InvalidRequest(
                f"min_tokens is {call.output_tokens_min} and stop_token_ids holds every token of "
                f"{self._card.id}, so that none is left to begin with; ask for fewer.",
                param="stop_token_ids",
            )

    # -------------------------------------------------------------------------------------- text

    def _rules(self, call: Call) -> OutputRules:
        marker = self._marker_token if self.tool_calls(call) is not None else None
        return OutputRules(
            stop=call.stop,
            stop_tokens=call.stop_tokens,
            ignore_end_token=call.ignore_end_token,
            output_tokens_min=call.output_tokens_min,
            visible_tokens=() if marker is None else (marker,),
            continues_text=isinstance(call.prompt, TextPrompt),
        )

    async def _schema_grammar(self, call: Call) -> str | None:
        """The grammar of a call with a schema: checking it takes tens of milliseconds, or more."""
        loop = asyncio.get_running_loop()
        grammar, param = await loop.run_in_executor(self._schema_threads, self._grammar, call)
        if grammar is None or self._trial is None:
            return grammar
        if self._trial.knows(grammar):
            await loop.run_in_executor(self._schema_threads, self._trial.check, grammar, param)
            return grammar
        if self._trials >= _TRIALS_MAX:
            raise Overloaded(
                f"{self._trials} other schemas are being tried; send this one again later.",
                status=429,
                reason="queue_full",
                measured=self._trials,
                threshold=_TRIALS_MAX,
                retry_after_s=2,
            )
        self._trials += 1
        try:
            await loop.run_in_executor(self._trial_threads, self._trial.check, grammar, param)
        finally:
            self._trials -= 1
        return grammar

    def _grammar(self, call: Call) -> tuple[str | None, str]:
        """The grammar that holds a call's output, and the parameter that it comes from."""
        if isinstance(call.prompt, ChatPrompt):
            grammar = tool_grammar(call.prompt, self._tool_format, self._marker_token)
            if grammar is not None:
                return grammar, "tools"
        return format_grammar(call.output_format), "response_format"

    @property
    def _marker_token(self) -> int | None:
        """The opening marker of tool calls, where the vocabulary has it as a special token."""
        token = (
            self._tokenizer.token_id(self._tool_format.begin) if self._tool_format.begin else None
        )
        return token if token in self._tokenizer.special_tokens else None


class ToolCalls:
    """Takes tool calls out of the text of a call's choices."""

    def __init__(self, form: ToolFormat, names: frozenset[str], new_id: Callable[[], str]) -> None:
        self._form = form
        self._names = names
        self._new_id = new_id
        self._parsers: dict[int, ToolCallParser] = {}

    def read(self, delta: Delta) -> Delta:
        """The delta with its calls apart from its text."""
        parser = self._parsers.get(delta.choice)
        if parser is None:
            parser = ToolCallParser(self._form, self._names, self._new_id)
            self._parsers[delta.choice] = parser
        piece = parser.push(delta.text)
        return Delta(delta.choice, piece.content, delta.tokens, delta.logprobs, piece.tool_calls)

    def finish(self, choice: int) -> tuple[Delta | None, bool]:
        """What was held back of a choice that is complete, and whether it called a tool."""
        parser = self._parsers.get(choice)
        if parser is None:
            return None, False
        piece = parser.finish()
        rest = None
        if piece.content or piece.tool_calls:
            rest = Delta(choice, piece.content, 0, (), piece.tool_calls)
        return rest, parser.calls > 0
