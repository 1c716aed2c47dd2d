"""Routes that only engines have: what an answer there looks like is the engine's own business."""

from typing import Any

import pytest

from sluice.cluster.remote_model import NOT_GENERATING
from sluice.server.routes import FORWARDED
from sluice.testing.upstream import whole
from tests.cluster.relay_rig import CHAT, MESSAGES, answering, relay

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/tokenize": {"prompt": "hi"},
}
VECTORS = b'{"object":"list","data":[],"usage":{"prompt_tokens":3}}'


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("flag", [True, "yes", 1], ids=str)
def test_a_stream_flag_means_nothing_there_and_shuts_no_replica(path, flag):
    """The engines ignore it. Counted as their fault it would shut them for everyone."""
    with relay(answering(lambda _: whole(VECTORS))) as rig:
        for _ in range(6):
            answer = rig.post(path, {"model": "big", "stream": flag, **BODIES[path]})
            assert (answer.status, answer.body) == (200, VECTORS)
        assert len(rig.sent()) == 6
        assert rig.metric("attempts_failed_total") == 0
        assert rig.metric("prompt_tokens_total") == 18


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"\x00\x01\xff", "application/octet-stream"),
        (b'{"data":[{"embedding":[NaN]}]}', "application/json"),
        (b"", "text/plain; charset=utf-8"),
    ],
    ids=["bytes", "not a number", "nothing"],
)
def test_an_answer_of_any_kind_goes_on_as_it_came(body, kind):
    with relay(answering(lambda _: whole(body, kind=kind))) as rig:
        for _ in range(6):
            asked = {"model": "big", "input": "hi", "encoding_format": "bytes"}
            answer = rig.post("/v1/embeddings", asked)
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["content-type"] == kind
        assert rig.metric("attempts_failed_total") == 0


def test_an_answer_that_breaks_there_is_the_engines_fault_as_ever():
    with relay(answering(lambda _: whole(b"no", 500)), retries=0) as rig:
        assert rig.post("/v1/embeddings", {"model": "big", "input": "hi"}).status == 502
        assert rig.metric("attempts_failed_total", outcome="fault") == 1


def test_what_is_known_of_them_here_and_in_the_server_is_the_same():
    assert {path.decode() for path in FORWARDED} == NOT_GENERATING


def test_of_a_chat_the_kind_of_answer_is_still_looked_at():
    with relay(answering(lambda _: whole(b"\x00", kind="image/png")), retries=0) as rig:
        assert rig.post(CHAT, {"model": "big", "messages": MESSAGES}).status == 502
