"""Prompts of exact token lengths: words that are one token each, cut out of one long text.

The server counts, not the client: ``calibration.py`` finds the words and what the server's template
adds. Equal parts of a plan are equal text, and a longer part of the same text begins with the
shorter one, so that prefix caches see what the plan says. Making a prompt is a copy of bytes,
cheap enough for the moment before it is sent.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Protocol

from sluice.workload.asks import Ask, BadWorkload

# Common words without what JSON would escape; with the blank before it, each is one token of the
# usual vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body back parent face "
    "others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split())
# Drawn words that all texts are cut out of. Multiplied with an odd number, every text number has a
# place of its own until there are as many texts as words.
_SIZE = 1 << 17
_STEP = 2_654_435_769
_FILE_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the server makes of words: each of ``words`` is one token, and ``frame_tokens`` are
    what its template adds to a prompt."""

    words: tuple[str, ...] = WORDS
    frame_tokens: int = 0


class Prompts(Protocol):
    """Gives the text of a request as the inside of a JSON string."""

    def text(self, ask: Ask) -> bytes:
        """The prompt."""
        ...


class DrawnPrompts:
    """Prompts of drawn words. Another ``salt`` gives other texts from their first words on."""

    def __init__(self, vocabulary: Vocabulary, salt: str = "") -> None:
        self._frame_tokens = vocabulary.frame_tokens
        words = Random(f"{salt}/texts").choices(vocabulary.words, k=_SIZE)
        self._raw = (" " + " ".join(words)).encode()
        self._starts = (0, *accumulate(len(word) + 1 for word in words))

    def text(self, ask: Ask) -> bytes:
        """See ``Prompts``. The template's tokens are taken off the first part; a prompt has one
        word at least."""
        left = self._frame_tokens
        parts = []
        for part in ask.prompt:
            taken = min(left, part.tokens)
            left -= taken
            parts.append(self._cut(part.text, part.tokens - taken))
        return b"".join(parts) or self._cut(ask.prompt[0].text, 1)

    def _cut(self, text: int, words: int) -> bytes:
        start = text * _STEP % _SIZE
        found = b""
        while words > 0:
            end = min(start + words, _SIZE)
            found += self._raw[self._starts[start] : self._starts[end]]
            words -= end - start
            start = 0
        return found


class FilePrompts:
    """Prompts of a file, in turn. Their lengths are what they are."""

    def __init__(self, texts: Sequence[bytes], salt: str = "") -> None:
        self._texts = texts
        self._salt = f"[{salt}] ".encode() if salt else b""

    def text(self, ask: Ask) -> bytes:
        """See ``Prompts``."""
        return self._salt + self._texts[ask.number % len(self._texts)]


def texts_of(path: Path) -> list[bytes]:
    """The prompts of a file: one JSON object with ``prompt`` per line, or one text per line.

    Raises ``BadWorkload``.
    """
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise BadWorkload(f"the prompts {path} are over 1 GiB; give a part of them")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadWorkload(f"cannot read the prompts {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadWorkload(f"the prompts {path} are not UTF-8 text") from None
    found = [
        json.dumps(_prompt_in(path, number, line))[1:-1].encode()
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise BadWorkload(f"the prompts {path} are empty")
    return found


def _prompt_in(path: Path, number: int, line: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        prompt = json.loads(line).get("prompt")
    except (ValueError, RecursionError) as error:
        raise BadWorkload(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(prompt, str) or not prompt:
        raise BadWorkload(f'{path}:{number}: "prompt" is missing or no text')
    return prompt
