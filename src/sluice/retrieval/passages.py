"""The protocols of the retrieval stage, declared by what uses them, and their values.

Implemented by ``embedded``, ``http_service`` and ``qdrant``; called by ``cluster/retrieving``. A
retriever keeps its deadline itself as far as it can; its caller gives up when the deadline passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Of one passage no more is taken, whoever sends it.
PASSAGE_CHARS_MAX = 20_000
# Names and titles that are longer are no names.
NAME_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document. ``number`` is its place in it; a higher ``score`` fits better."""

    document: str
    number: int
    text: str
    title: str = ""
    score: float = 0.0

    @property
    def id(self) -> str:
        """Names the passage among all of its collection."""
        return f"{self.document}#{self.number}"


class RetrievalFailed(Exception):
    """Nothing was found out; the message says why, in words without text of documents."""


class RetrievalLate(RetrievalFailed):
    """The deadline passed first."""


class Retriever(Protocol):
    """Finds passages for a question."""

    async def find(self, question: str, passages_max: int, within_s: float) -> Sequence[Passage]:
        """The best passages, best first; empty where nothing fits. Raises ``RetrievalFailed``."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


class Reranker(Protocol):
    """Puts passages into a better order."""

    async def rerank(
        self, question: str, passages: Sequence[Passage], within_s: float
    ) -> Sequence[Passage]:
        """The same passages, best first, with new scores. Raises ``RetrievalFailed``."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


class Post(Protocol):
    """Sends JSON to one address and gives the body of the answer; wiring makes it."""

    async def __call__(self, body: bytes, within_s: float) -> bytes:
        """The body of a 2xx answer. Raises ``RetrievalFailed``."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...
