"""The Qdrant retriever against the client's own local mode."""

import asyncio
import json

import pytest
from qdrant_client import AsyncQdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams

from sluice.retrieval.http_service import HttpEmbeddings
from sluice.retrieval.passages import RetrievalFailed, RetrievalLate
from sluice.retrieval.qdrant import QdrantRetriever, connected
from tests.retrieval.test_http_service import Posted

VECTORS = {"cats": [1.0, 0.0, 0.0], "dogs": [0.0, 1.0, 0.0], "cars": [0.0, 0.0, 1.0]}


async def made(vector, **more):
    client = AsyncQdrantClient(":memory:")
    await client.create_collection(
        "default", vectors_config=VectorParams(size=3, distance=Distance.COSINE)
    )
    points = [
        PointStruct(
            id=number,
            vector=vector_of,
            payload={"text": f"about {name}", "document": f"{name}.md", "number": 2, "title": name},
        )
        for number, (name, vector_of) in enumerate(VECTORS.items())
    ]
    points.append(PointStruct(id=9, vector=[0.5, 0.5, 0.0], payload={"text": 7, "number": "x"}))
    await client.upsert("default", points)
    embeddings = HttpEmbeddings(Posted({"data": [{"embedding": vector}]}), "e")
    return QdrantRetriever(client, more.get("collection", "default"), embeddings)


def test_the_nearest_points_are_found_with_their_payload():
    async def run():
        retriever = await made([0.1, 0.9, 0.0])
        found = await retriever.find("puppies", 3, 10.0)
        assert [(one.id, one.text, one.title) for one in found] == [
            ("dogs.md#2", "about dogs", "dogs"),
            ("cats.md#2", "about cats", "cats"),
        ]
        assert found[0].score > found[1].score
        await retriever.close()

    asyncio.run(run())


def test_a_collection_that_is_not_there_or_has_other_vectors_fails_in_words():
    async def run():
        for retriever in (await made([1.0, 0.0, 0.0], collection="none"), await made([1.0])):
            with pytest.raises(RetrievalFailed, match="Qdrant failed"):
                await retriever.find("q", 3, 10.0)
            await retriever.close()

    asyncio.run(run())


def test_a_server_that_is_down_or_silent_fails_within_its_deadline():
    async def run():
        async def silent(_reader, writer):
            await over.wait()
            writer.close()

        over = asyncio.Event()
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        vector = json.dumps({"data": [{"embedding": [1.0]}]}).encode()
        embeddings = HttpEmbeddings(Posted(vector), "e")
        retriever = QdrantRetriever(connected(f"http://127.0.0.1:{port}", None), "c", embeddings)
        with pytest.raises(RetrievalLate):
            await retriever.find("q", 3, 0.05)
        over.set()
        server.close()
        await server.wait_closed()
        with pytest.raises(RetrievalFailed):
            await retriever.find("q", 3, 5.0)
        await retriever.close()

    asyncio.run(run())
