"""The text side of one sequence: sampled tokens in, pieces of text and a reason to stop out.

Decides when a sequence is over (end token, stop string, completed grammar), which text is certain,
and which log-probabilities go with it. The replica calls ``push`` for each sampled token and
``finish`` when a sequence ends for another reason. Streaming and whole answers both come from here,
so that they cannot differ. Length limits belong to the policy, tool calls to the gateway.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from sluice.core.sampling import SampledLogprobs, TokenLogprob
from sluice.core.step import StopReason
from sluice.executors.base import TokenMask
from sluice.runtime.detokenizing import Detokenizer, TokenTable
from sluice.runtime.generation import Delta, TextLogprob, TokenText
from sluice.runtime.stops import StopMatcher


class Grammar(TokenMask, Protocol):
    """The state of a grammar in one sequence."""

    def accept(self, token: int) -> bool:
        """Advance by a token; whether the grammar is complete and allows nothing more.

        Raises ``InvalidRequest`` where the grammar cannot go on.
        """
        ...


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What a call says about the text of its output.

    ``visible_tokens`` are special tokens shown as text, for tool-call markers. ``continues_text``
    is set where the output goes on from a raw text prompt.
    """

    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_end_token: bool = False
    output_tokens_min: int = 0
    visible_tokens: tuple[int, ...] = ()
    continues_text: bool = False


class OutputPush(NamedTuple):
    """A piece of text, ``None`` where nothing became certain, and why the sequence must stop."""

    delta: Delta | None
    stop: StopReason | None


class _HeldLogprob(NamedTuple):
    start: int  # characters of text before the token's own
    entry: TokenText


class SequenceOutput:
    """The output of one sequence.

    ``Delta.tokens`` adds up to the number of pushed tokens once the sequence is over. Tokens whose
    text is held back are counted with the text that carries them. Log-probabilities of tokens that
    are no part of the shown text (the end token, a stop string) are left out.
    """

    def __init__(
        self,
        choice: int,
        table: TokenTable,
        end_tokens: tuple[int, ...],
        rules: OutputRules,
        grammar: Grammar | None = None,
    ) -> None:
        self._choice = choice
        self._table = table
        ends = () if rules.ignore_end_token else end_tokens
        self._ends = frozenset((*ends, *rules.stop_tokens))
        self._tokens_min = rules.output_tokens_min
        self._detokenizer = Detokenizer(
            table,
            visible=frozenset(rules.visible_tokens),
            continues_text=rules.continues_text,
        )
        self._stops = StopMatcher(rules.stop) if rules.stop else None
        self._grammar = grammar
        self._tokens = 0
        self._tokens_unsent = 0
        self._chars_certain = 0  # characters that left the detokenizer
        self._chars_sent = 0
        self._held: list[_HeldLogprob] = []
        self._over = False

    @property
    def mask(self) -> TokenMask | None:
        """What the executor must ask before it samples, ``None`` where every token may come."""
        if self._tokens_min > 0 and self._ends:
            return self
        return self._grammar

    def fill(self, words: memoryview) -> None:
        """Write the tokens that may come next: those of the grammar, no end before the minimum."""
        mask = words.cast("B")
        if self._grammar is not None:
            self._grammar.fill(words)
        else:
            mask[:] = b"\xff" * len(mask)
        if self._tokens < self._tokens_min:
            allowed = int.from_bytes(mask, "little") & all_but(self._ends, len(mask))
            mask[:] = allowed.to_bytes(len(mask), "little")

    @property
    def tokens(self) -> int:
        """Tokens pushed so far, the end token included."""
        return self._tokens

    def push(self, token: int, logprobs: SampledLogprobs | None = None) -> OutputPush:
        """Take a sampled token.

        With a reason to stop the sequence is over and its last text is in the piece. Raises
        ``InvalidRequest`` where the grammar cannot go on.
        """
        generated = self._tokens
        self._tokens = generated + 1
        self._tokens_unsent += 1
        complete = self._grammar is not None and self._grammar.accept(token)
        if token in self._ends and generated >= self._tokens_min:
            return OutputPush(self.finish(), StopReason.END_TOKEN)
        if logprobs is not None:
            self._held.append(_HeldLogprob(self._chars_certain, self._token_text(logprobs)))
        text = self._detokenizer.push(token)
        self._chars_certain += len(text)
        if self._stops is not None and generated >= self._tokens_min:
            text, stopped = self._stops.push(text)
            if stopped:
                return OutputPush(self._last(text), StopReason.STOP_STRING)
        if complete:
            return OutputPush(self._last(text + self._rest()), StopReason.GRAMMAR)
        return OutputPush(self._delta(text) if text else None, None)

    def finish(self) -> Delta | None:
        """The text held back, when the sequence ends without a reason of its own.

        ``None`` where nothing is left to say. Called again it gives ``None``.
        """
        return None if self._over else self._last(self._rest())

    def _rest(self) -> str:
        tail = self._detokenizer.finish()
        self._chars_certain += len(tail)
        if self._stops is None:
            return tail
        text, stopped = self._stops.push(tail)
        return text if stopped else text + self._stops.finish()

    def _last(self, text: str) -> Delta | None:
        self._over = True
        delta = self._delta(text) if text or self._tokens_unsent else None
        self._held.clear()
        return delta

    def _delta(self, text: str) -> Delta:
        tokens, self._tokens_unsent = self._tokens_unsent, 0
        self._chars_sent += len(text)
        if not self._held:
            return Delta(self._choice, text, tokens)
        certain = 0
        for held in self._held:
            if held.start >= self._chars_sent:
                break
            certain += 1
        entries = tuple(held.entry for held in self._held[:certain])
        del self._held[:certain]
        return Delta(self._choice, text, tokens, entries)

    def _token_text(self, logprobs: SampledLogprobs) -> TokenText:
        return TokenText(
            self._text_logprob(logprobs.sampled),
            tuple(self._text_logprob(alternative) for alternative in logprobs.top),
        )

    def _text_logprob(self, logprob: TokenLogprob) -> TextLogprob:
        raw = self._table.raw[logprob.token]
        return TextLogprob(raw.decode("utf-8", "replace"), raw, logprob.logprob)


@lru_cache(maxsize=8)
def all_but(tokens: frozenset[int], size: int) -> int:
    """A bit mask of ``size`` bytes, little-endian, in which these tokens are not set.

    Kept, since a request may name tens of thousands of tokens and asks for each it generates.
    """
    mask = bytearray(b"\xff" * size)
    for token in tokens:
        if token >> 3 < size:
            mask[token >> 3] &= ~(1 << (token & 7))
    return int.from_bytes(mask, "little")
