"""Nothing that a service sends is trusted: shapes, sizes and numbers are checked."""

import asyncio
import json
from typing import Any

import pytest

from sluice.retrieval.http_service import HttpEmbeddings, HttpReranker, HttpRetriever
from sluice.retrieval.passages import PASSAGE_CHARS_MAX, RetrievalFailed
from sluice.testing.retrievers import passages


class Posted:
    """Answers with these bytes and notes what was asked."""

    def __init__(self, answer):
        self.answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.asked = None

    async def __call__(self, body, within_s):
        self.asked = json.loads(body)
        return self.answer

    async def close(self):
        pass


def find(answer, limit=3):
    post = Posted(answer)
    return asyncio.run(HttpRetriever(post, "default").find("q", limit, 1.0)), post.asked


def test_passages_of_a_service_come_in_its_order_and_no_more_than_asked_for():
    found, asked = find(
        {
            "passages": [
                {"text": "one", "document": "a", "number": 4, "title": "A", "score": 0.9},
                {"text": "  "},
                {"text": "two", "more": "ignored"},
                {"text": "three"},
            ],
            "took": 3,
        }
    )
    assert asked == {"query": "q", "limit": 3, "collection": "default"}
    assert [(one.id, one.text) for one in found] == [("a#4", "one"), ("unnamed#1", "two")]
    assert find({"passages": []})[0] == []


def test_texts_and_names_are_cut():
    (one,), _ = find({"passages": [{"text": "x" * 50_000, "document": "d" * 5000}]})
    assert len(one.text) == PASSAGE_CHARS_MAX
    assert len(one.document) == 500


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"garbage", b"<html><body>502 Bad Gateway</body></html>", b"[]", b"null",
        b'{"passages": null}', b'{"passages": [{"text": 1}]}', b'{"passages": [{}]}', b"\xff\xfe",
        b'{"passages": [{"text": "a", "score": 1e999}]}', b"[" * 100_000,
        b'{"error": "no such collection"}',
    ],
    ids=range(12),
)  # fmt: skip
def test_anything_else_is_a_failure_in_words_without_its_text(answer):
    with pytest.raises(RetrievalFailed) as failed:
        find(answer)
    assert len(str(failed.value)) < 120
    assert "Gateway" not in str(failed.value)


def rerank(answer, count=3):
    post = Posted(answer)
    found = asyncio.run(HttpReranker(post, "m").rerank("q", passages(count), 1.0))
    return [(one.number, one.score) for one in found], post.asked


def test_a_reranker_puts_passages_into_its_order():
    ranked = [{"index": 2, "relevance_score": 0.2}, {"index": 0, "relevance_score": 0.7}]
    found, asked = rerank({"results": ranked, "usage": {}})
    assert found == [(1, 0.7), (3, 0.2), (2, 0.5)]
    assert (asked["model"], asked["query"], asked["top_n"]) == ("m", "q", 3)
    assert asked["documents"] == [one.text for one in passages(3)]


@pytest.mark.parametrize(
    "answer",
    [
        b"no", {"results": []}, {"results": [{"index": 9, "relevance_score": 1}]},
        {"results": [{"index": -1, "relevance_score": 1}]}, {"results": [{"index": 0}]},
    ],
    ids=range(5),
)  # fmt: skip
def test_a_reranker_that_ranks_nothing_or_others_fails(answer):
    with pytest.raises(RetrievalFailed):
        rerank(answer)


def test_an_embedding_is_a_list_of_finite_numbers():
    def vector(answer):
        return asyncio.run(HttpEmbeddings(Posted(answer), "e").vector("q", 1.0))

    assert vector({"data": [{"embedding": [0.5, 1]}], "model": "e"}) == [0.5, 1.0]
    wrong: Any
    for wrong in ([], [{"embedding": []}], [{"embedding": "AAA"}]):
        with pytest.raises(RetrievalFailed):
            vector({"data": wrong})
