"""Where an answer tells what was retrieved for it, however its engine writes JSON."""

import json
from collections.abc import AsyncIterator

import pytest

from sluice.runtime.generation import Relaying, Retrieval, Source, Terms
from sluice.testing.gateway import FakeGateway, Script, finished
from tests.server.wire_client import post

CHAT = "/v1/chat/completions"
ASKED = {"model": "docs", "messages": [{"role": "user", "content": "How?"}]}
ANSWER = {"id": "x", "choices": [{"index": 0, "message": {"content": "So."}}]}
FOUND = Retrieval("docs", 5_000_000, None, 1, 20, (Source(1, "a#1", "a", "A", 1.0),))


class Engine:
    """What a remote engine answers, in these pieces."""

    content_type = "application/json"

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]:
        for number, piece in enumerate(self._pieces, 1):
            yield piece, number == len(self._pieces)


@pytest.fixture
def ask(serve_app):
    def go(*pieces: bytes, **more):
        script = Script((finished(),), terms=Terms(retrieval=FOUND), relay=Engine(*pieces))
        remote = Relaying(frozenset({"docs"}))
        server = serve_app(FakeGateway(lambda _: script, models=("docs",), relaying=remote))
        return post(server, CHAT, {**ASKED, **more})

    return go


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", " : ")])
@pytest.mark.parametrize("begin", [b"", b" \n"])
def test_a_whole_answer_tells_it_beside_its_own_members(ask, indent, separators, begin):
    body = begin + json.dumps(ANSWER, indent=indent, separators=separators).encode()
    answer = ask(body)
    told = answer.json()
    assert told.pop("retrieval")["sources"][0]["document"] == "a"
    assert told == ANSWER
    assert int(answer.headers["content-length"]) == len(answer.body)


def test_an_answer_with_a_blank_behind_its_brace_is_told_it_at_its_outermost_object(ask):
    told = ask(b'{ "id": "x", "choices": [{"index": 0}]}').json()
    assert list(told) == ["retrieval", "id", "choices"]
    assert told["choices"] == [{"index": 0}]


@pytest.mark.parametrize("body", [b"[]", b"{}", b'"text"'])
def test_an_answer_without_an_object_is_as_it_came(ask, body):
    answer = ask(body)
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers["x-sluice-retrieval"].startswith("pipeline=docs")


def test_the_first_event_of_a_stream_tells_it(ask):
    events = (b": hello\n\n", b'data: { "id": "x", "choices": [{"index": 0}]}\n\n')
    answer = ask(*events, b'data: {"id": "y"}\n\n', b"data: [DONE]\n\n", stream=True)
    first, second, *_ = answer.events()
    assert (first["id"], first["retrieval"]["pipeline"]) == ("x", "docs")
    assert second == {"id": "y"}
