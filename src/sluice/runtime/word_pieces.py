"""Tokens of models that have no vocabulary here: texts counted about as theirs would be.

Decides how a text is cut into pieces, one token each: words up to ``WORD_LETTERS`` letters with the
space before them, longer ones in parts, up to three digits, up to two letters of other scripts,
runs of punctuation and of spaces. English prose and code come out within 15 % of what the
tokenizer of SmolLM2 makes of them, other scripts with fewer. Equal pieces have equal ids, so that
prompts that begin alike share their prefix; ids stand for pieces by a checksum, and only those of
``WORDS``, of which simulated answers are made, can be turned back into text.
"""

import re
from dataclasses import replace
from functools import cached_property
from zlib import crc32

from sluice.core.errors import InvalidRequest
from sluice.executors.base import TokenMask
from sluice.runtime.detokenizing import TokenTable
from sluice.runtime.model_folder import ModelFacts
from sluice.runtime.output import OutputRules, SequenceOutput

WORD_LETTERS = 8
_PIECES = re.compile(
    rf" ?[A-Za-z]{{1,{WORD_LETTERS}}}| ?[^\W\d_A-Za-z]{{1,2}}|\d{{1,3}}"
    r"| ?[^\w\s]{1,3}|_{1,8}|\s{1,8}"
)
END_TOKEN = 0
# What simulated answers are made of, again and again. No word stands twice, so that an answer that
# comes back in the next prompt has the tokens that it was made of.
_ANSWER = (
    "this answer is made up by a replica that exists as cost model only so it says nothing about "
    "your question while its timing tells how fast real hardware would be each word stands for one "
    "token and comes when the step with such batch ends count them cancel halfway or send many "
    "more until queues grow then watch what happens"
)
WORDS = tuple(" " + word for word in _ANSWER.split())
ANSWER_VOCABULARY = 1 + len(WORDS)
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
# A chat template that costs what usual ones do: a marker before each message and one behind it.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def made_up_facts(name: str, context_tokens_max: int, vocab_size: int) -> ModelFacts:
    """The facts of a model whose text is made up."""
    return ModelFacts(
        name=name,
        architecture="simulated",
        context_tokens_max=context_tokens_max,
        vocab_size=max(vocab_size, 2 * ANSWER_VOCABULARY),
        eos_token=END_TOKEN,
        end_tokens=(END_TOKEN,),
        chat_template=CHAT_TEMPLATE,
        made_up=True,
    )


class WordPieces:
    """Stands in for ``tokenizing.Tokenizer`` where there is no ``tokenizer.json``."""

    special_tokens = frozenset({END_TOKEN})

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self._ids = {word: 1 + place for place, word in enumerate(WORDS)}
        self._others = facts.vocab_size - ANSWER_VOCABULARY

    def encode_text(self, text: str) -> tuple[int, ...]:
        """One id for each piece of the text. Raises ``InvalidRequest`` for invalid Unicode."""
        try:
            return tuple(map(self._id, _PIECES.findall(text)))
        except UnicodeEncodeError as error:
            words = "the text is not valid Unicode: a surrogate stands alone"
            raise InvalidRequest(words) from error

    encode_chat = encode_text

    def _id(self, piece: str) -> int:
        token = self._ids.get(piece)
        if token is None:
            token = ANSWER_VOCABULARY + crc32(piece.encode()) % self._others
        return token

    def tokens_min(self, text_bytes: int) -> int:
        """No text of so many bytes has fewer tokens."""
        return -(-text_bytes // (4 * (WORD_LETTERS + 1)))

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so, ``None`` where there is none."""
        return self._ids.get(text)

    @cached_property
    def table(self) -> TokenTable:
        """The bytes of each id that has any."""
        return answer_table(self.facts.vocab_size)


def answer_table(vocab_size: int = ANSWER_VOCABULARY) -> TokenTable:
    """What the tokens of simulated answers look like, and a replacement character for others."""
    words = (b"", *(word.encode() for word in WORDS))
    others = (UNKNOWN,) * (vocab_size - len(words))
    return TokenTable((*words, *others), frozenset({END_TOKEN}), strips_first_space=True)


class MadeUpOutputs:
    """Opens the outputs of simulated sequences: the ``Outputs`` of a replica that has no model."""

    def __init__(self) -> None:
        self._table = answer_table()

    def open(
        self, choice: int, rules: OutputRules, grammar: str | None
    ) -> tuple[SequenceOutput, TokenMask | None]:
        """See ``sequence_texts.Outputs``. Nothing can be held to a grammar: the gateway refuses."""
        assert grammar is None, "made-up text follows no grammar"
        rules = replace(rules, visible_tokens=())
        output = SequenceOutput(choice, self._table, (END_TOKEN,), rules)
        return output, output.mask

    def warm_up(self) -> None:
        """Nothing is made later."""
