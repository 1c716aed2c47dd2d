"""Retrievers and rerankers behind HTTP: what is sent, and what of the answer is believed.

The contract of a retriever is ours (docs/pipelines.md); rerankers speak the form that Cohere, Jina,
vLLM and others share, and embeddings come in OpenAI's. Nothing that comes is trusted: sizes, types
and numbers are checked here. How bytes travel is ``Post``'s business.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sluice.retrieval.passages import (
    NAME_CHARS_MAX,
    PASSAGE_CHARS_MAX,
    Passage,
    Post,
    RetrievalFailed,
)

_EMBEDDING_NUMBERS_MAX = 65_536


class _Found(msgspec.Struct):
    text: str
    document: str = ""
    number: int = 1
    title: str = ""
    score: float | None = None


class _FoundAll(msgspec.Struct):
    passages: list[_Found]


class _Ranked(msgspec.Struct):
    index: int
    relevance_score: float


class _RankedAll(msgspec.Struct):
    results: list[_Ranked]


class _Embedding(msgspec.Struct):
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    vectors: list[_Embedding] = msgspec.field(name="data")


class HttpRetriever:
    """Asks a service for passages; see ``passages.Retriever``."""

    def __init__(self, post: Post, collection: str) -> None:
        self._post, self._collection = post, collection

    async def find(self, question: str, passages_max: int, within_s: float) -> Sequence[Passage]:
        """The service's passages in its order. Raises ``RetrievalFailed``."""
        asked = {"query": question, "limit": passages_max, "collection": self._collection}
        answer = await self._post(msgspec.json.encode(asked), within_s)
        found = _decoded(answer, _FoundAll).passages
        return [
            Passage(
                document=one.document[:NAME_CHARS_MAX] or "unnamed",
                number=one.number,
                text=one.text[:PASSAGE_CHARS_MAX],
                title=one.title[:NAME_CHARS_MAX],
                score=_finite(1.0 / place if one.score is None else one.score),
            )
            for place, one in enumerate(found[:passages_max], 1)
            if one.text.strip()
        ]

    async def close(self) -> None:
        """Close its connections."""
        await self._post.close()


class HttpReranker:
    """Asks a reranking model for a better order; see ``passages.Reranker``."""

    def __init__(self, post: Post, model: str) -> None:
        self._post, self._model = post, model

    async def rerank(
        self, question: str, passages: Sequence[Passage], within_s: float
    ) -> Sequence[Passage]:
        """The passages that it ranked, best first, and behind them the others."""
        texts = [one.text for one in passages]
        asked = {"model": self._model, "query": question, "documents": texts, "top_n": len(texts)}
        answer = await self._post(msgspec.json.encode(asked), within_s)
        ranked = _decoded(answer, _RankedAll).results
        scores = {one.index: _finite(one.relevance_score) for one in ranked}
        if not scores or not all(0 <= index < len(passages) for index in scores):
            raise RetrievalFailed("the reranker ranked none of the passages, or others")
        places = sorted(scores, key=lambda index: (-scores[index], index))
        best = [replace(passages[index], score=scores[index]) for index in places]
        return [*best, *(one for index, one in enumerate(passages) if index not in scores)]

    async def close(self) -> None:
        """Close its connections."""
        await self._post.close()


class HttpEmbeddings:
    """Asks an engine for the vector of a text, by ``/v1/embeddings``."""

    def __init__(self, post: Post, model: str) -> None:
        self._post, self._model = post, model

    async def vector(self, text: str, within_s: float) -> list[float]:
        """The embedding. Raises ``RetrievalFailed``."""
        asked = {"model": self._model, "input": [text]}
        answer = await self._post(msgspec.json.encode(asked), within_s)
        vectors = _decoded(answer, _Embeddings).vectors
        if len(vectors) != 1 or not 1 <= len(vectors[0].embedding) <= _EMBEDDING_NUMBERS_MAX:
            raise RetrievalFailed("the engine gave no embedding")
        return [_finite(number) for number in vectors[0].embedding]

    async def close(self) -> None:
        """Close its connections."""
        await self._post.close()


def _decoded(answer: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        begins = "it looks like HTML" if answer.lstrip()[:1] == b"<" else type(error).__name__
        raise RetrievalFailed(f"the answer is not what the contract says: {begins}") from None


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise RetrievalFailed("a number in the answer is not finite")
    return number
