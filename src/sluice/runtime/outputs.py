"""The text side of one model in a replica process: opens the output of each of its sequences.

Holds what all sequences share (vocabulary as bytes, compiled grammars). What a single output does
is in ``output``, what a grammar allows in ``grammar``.
"""

from functools import cached_property

from sluice.executors.base import TokenMask
from sluice.runtime.grammar import GrammarOpener
from sluice.runtime.output import OutputRules, SequenceOutput
from sluice.runtime.tokenizing import Tokenizer


class TextOutputs:
    """Opens outputs over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.table

    def open(
        self, choice: int, rules: OutputRules, grammar: str | None
    ) -> tuple[SequenceOutput, TokenMask | None]:
        """Start one sequence. Raises ``InvalidRequest`` for a grammar that cannot be followed."""
        opened = None if grammar is None else self._grammars.open(grammar)
        ends = self._tokenizer.facts.end_tokens
        output = SequenceOutput(choice, self._table, ends, rules, opened)
        return output, output.mask

    def warm_up(self) -> None:
        """Make what the first request for a format would otherwise wait for."""
        _ = self._grammars

    @cached_property
    def _grammars(self) -> GrammarOpener:
        return GrammarOpener(self._tokenizer)
