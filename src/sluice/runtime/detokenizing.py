"""Token ids to text, one token at a time.

Decides which bytes of a growing output are certain: text leaves here as valid UTF-8 only, bytes of
an unfinished character stay. Joined pieces equal the decoding of all tokens at once. Used in the
replica for each sampled token, so a push costs about a microsecond. Stop strings are not looked at
here.
"""

import codecs
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What detokenising needs to know about a vocabulary.

    ``raw`` holds the bytes of each token id; ``shown`` the same with nothing for special tokens,
    which are no text. ``strips_first_space`` is set for SentencePiece vocabularies, whose first
    space is an artefact.
    """

    raw: tuple[bytes, ...]
    special: frozenset[int] = frozenset()
    strips_first_space: bool = False
    shown: tuple[bytes, ...] = field(init=False)

    def __post_init__(self) -> None:
        shown = tuple(b"" if i in self.special else b for i, b in enumerate(self.raw))
        object.__setattr__(self, "shown", shown)


class Detokenizer:
    """The text of one sequence as it grows."""

    def __init__(
        self,
        table: TokenTable,
        *,
        visible: frozenset[int] = frozenset(),
        continues_text: bool = False,
    ) -> None:
        """``visible`` are special tokens to show as they are written (tool-call markers).

        ``continues_text`` keeps a first space: the output goes on from a text instead of starting
        one.
        """
        self._table = table
        self._shown = table.shown
        self._visible = visible
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = table.strips_first_space and not continues_text

    def push(self, token: int) -> str:
        """The text that became certain with this token, often its own and sometimes none."""
        if token in self._visible:
            text = self._decode(self._table.raw[token])
        else:
            text = self._decode(self._shown[token])
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """The rest: U+FFFD for bytes that never became a character."""
        return self._decode(b"", final=True)
