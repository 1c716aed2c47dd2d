"""Retrievers and rerankers that do what a test says: passages, delays and failures.

Delays pass by the event loop's own clock, so that they take no time on a ``VirtualTimeLoop``.
"""

import asyncio
from collections.abc import Callable, Sequence

from sluice.retrieval.passages import Passage, RetrievalFailed


def passages(count: int, words: int = 40, document: str = "handbook") -> list[Passage]:
    """So many passages of one document, best first."""
    return [
        Passage(document, number, f"Fact {number} " + "word " * words, score=1.0 / number)
        for number in range(1, count + 1)
    ]


class FakeRetriever:
    """Answers every question alike. ``delay_s`` is asked for each; ``fails`` is raised after it.

    ``left`` counts the questions that were given up before.
    """

    def __init__(
        self,
        found: Sequence[Passage] = (),
        delay_s: Callable[[], float] = lambda: 0.0,
        fails: RetrievalFailed | None = None,
    ) -> None:
        self.found, self.delay_s, self.fails = found, delay_s, fails
        self.asked: list[tuple[str, int, float]] = []
        self.left = 0
        self.closed = False

    async def find(self, question: str, passages_max: int, within_s: float) -> Sequence[Passage]:
        """See ``retrieval.passages.Retriever``."""
        self.asked.append((question, passages_max, within_s))
        try:
            await asyncio.sleep(self.delay_s())
        except asyncio.CancelledError:
            self.left += 1
            raise
        if self.fails is not None:
            raise self.fails
        return self.found[:passages_max]

    async def close(self) -> None:
        """Note it."""
        self.closed = True


class FakeReranker:
    """Turns the order round after a delay, or fails."""

    def __init__(
        self,
        delay_s: Callable[[], float] = lambda: 0.0,
        fails: RetrievalFailed | None = None,
    ) -> None:
        self.delay_s, self.fails = delay_s, fails
        self.runs = 0

    async def rerank(
        self,
        question: str,  # noqa: ARG002
        passages: Sequence[Passage],
        within_s: float,  # noqa: ARG002
    ) -> Sequence[Passage]:
        """See ``retrieval.passages.Reranker``."""
        self.runs += 1
        await asyncio.sleep(self.delay_s())
        if self.fails is not None:
            raise self.fails
        return passages[::-1]

    async def close(self) -> None:
        """Nothing is held."""
