"""Text to terms of a full-text index, for storing and for asking, in any script.

SQLite's tokenizer finds words by the blanks between them. Chinese, Japanese, Korean and Thai have
none, so each of their characters is stored as a word, and neighbours are asked for as a phrase.
"""

import itertools
import re

# More terms make no better question, and each costs a scan of its postings.
TERMS_MAX = 48
_UNSPACED = (
    "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
)
_ONE = re.compile(f"([{_UNSPACED}])")
_WORD = re.compile(f"[{_UNSPACED}]+|[^\\W_{_UNSPACED}]+")
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]")


def indexed(text: str) -> str:
    """The text as it is given to the index."""
    return _ONE.sub(r" \1 ", text)


def asked(question: str) -> str:
    """A question in SQLite's full-text language; empty where it holds nothing to look for.

    Everything is quoted, so that no word of it is taken for an operator. Of a long question the
    longest terms count: they say most.
    """
    terms = dict.fromkeys(
        phrase for word in _WORD.findall(question) for phrase in _phrases(word.lower())
    )
    chosen = sorted(terms, key=len, reverse=True)[:TERMS_MAX]
    return " OR ".join(f'"{phrase}"' for phrase in chosen)


def _phrases(word: str) -> list[str]:
    if not _IS_UNSPACED.match(word):
        return [word]
    pairs = [f"{first} {second}" for first, second in itertools.pairwise(word)]
    return pairs or [word]
