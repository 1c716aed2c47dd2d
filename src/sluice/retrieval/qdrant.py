"""The retriever over Qdrant, by its own client; the only importer of ``qdrant_client``.

A question becomes a vector by an engine's ``/v1/embeddings``. Points carry their passage in the
payload: ``text``, and ``document``, ``number`` and ``title`` where they have them. Loaded only
where a pipeline names it (extra ``retrieval``).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from qdrant_client import AsyncQdrantClient
from qdrant_client.http.exceptions import ApiException

from sluice.retrieval.http_service import HttpEmbeddings
from sluice.retrieval.passages import (
    NAME_CHARS_MAX,
    PASSAGE_CHARS_MAX,
    Passage,
    RetrievalFailed,
    RetrievalLate,
)


def connected(url: str, key: str | None) -> AsyncQdrantClient:
    """A client of a server; it connects when it is used."""
    return AsyncQdrantClient(url=url, api_key=key, check_compatibility=False)


class QdrantRetriever:
    """Finds the points nearest to a question; see ``passages.Retriever``."""

    def __init__(
        self, client: AsyncQdrantClient, collection: str, embeddings: HttpEmbeddings
    ) -> None:
        self._client, self._collection, self._embeddings = client, collection, embeddings

    async def find(self, question: str, passages_max: int, within_s: float) -> Sequence[Passage]:
        """The nearest passages. Raises ``RetrievalFailed``."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        vector = await self._embeddings.vector(question, within_s)
        left_s = ends_s - loop.time()
        try:
            async with asyncio.timeout(left_s):
                found = await self._client.query_points(
                    self._collection, query=vector, limit=passages_max, with_payload=True
                )
        except TimeoutError:
            raise RetrievalLate("Qdrant did not answer within its deadline") from None
        except (ApiException, ValueError) as error:
            # Their words may hold addresses and bodies.
            raise RetrievalFailed(f"Qdrant failed: {type(error).__name__}") from error
        passages = (_passage(point.id, point.payload or {}, point.score) for point in found.points)
        return [one for one in passages if one.text.strip()]

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()
        await self._embeddings.close()


def _passage(point_id: object, payload: Mapping[str, Any], score: float) -> Passage:
    number = payload.get("number")
    return Passage(
        document=_text(payload, "document")[:NAME_CHARS_MAX] or str(point_id),
        number=number if type(number) is int else 1,
        text=_text(payload, "text")[:PASSAGE_CHARS_MAX],
        title=_text(payload, "title")[:NAME_CHARS_MAX],
        score=score,
    )


def _text(payload: Mapping[str, Any], name: str) -> str:
    value = payload.get(name)
    return value if isinstance(value, str) else ""
