"""Routes, identity of requests, errors of one request, and what the log may say."""

import asyncio
import logging
import time

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.core.errors import Overloaded
from sluice.runtime.generation import Absent, Delta, Readiness, ReplicaStatus
from sluice.server import routes
from sluice.testing.gateway import FakeGateway, Script, refuse, speak
from tests.server.wire_client import ask, chat, connected, post, raw_post, read_until


@pytest.fixture(scope="module")
def gateway():
    return FakeGateway(models=("tiny", "org/large model"))


@pytest.fixture(scope="module")
def server(serve_module, gateway):
    return serve_module(gateway)


# ---------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize("path", [path.decode() for path in routes.ROUTES])
def test_every_route_refuses_other_methods_in_the_usual_shape(server, path):
    if path.startswith("/admin"):
        return  # closed here; see test_auth
    answer = ask(server, "DELETE", path)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert ask(server, "OPTIONS", path).headers["allow"] == answer.headers["allow"]
    head, get = ask(server, "HEAD", path), ask(server, "GET", path)
    assert head.status == get.status
    assert head.body == b""
    if get.status == 200:
        assert head.headers["content-length"] == str(len(get.body))


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat/completions/", "/v1/embeddings", "/%00"])
def test_unknown_paths_are_answered_in_the_usual_shape(server, path):
    answer = ask(server, "GET", path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completion", "nearest: POST /v1/chat/completions."),
        ("/v1/chat/completions/", "nearest: POST /v1/chat/completions."),
        ("/chat/completions", "nearest: POST /v1/chat/completions."),
        ("/nothing/here", "Served: POST /v1/chat/completions"),
        ("/v1/embeddings", "Embeddings are not supported here. Served: POST /v1/chat"),
        ("/v1/responses/resp_1", "Stored responses are not supported here. Served: "),
        ("/" + "x" * 5000, "Nothing is served at this path. Served: "),
    ],
)
def test_an_unknown_path_is_told_what_is_there(server, path, words):
    for method in ("GET", "POST"):
        answer = ask(server, method, path)
        assert answer.status == 404
        assert words in answer.error["message"]


def test_a_wrong_method_is_told_the_right_one(server):
    assert ask(server, "GET", "/v1/responses").error["message"] == "This path takes POST."
    assert ask(server, "POST", "/v1/models").error["message"] == "This path takes GET."


def test_the_admin_path_alone_is_told_what_is_below_it(serve_app):
    section = ServerSection(listen="127.0.0.1:0", admin_key_digests=(digest("boss"),))
    headers = {"authorization": "Bearer boss"}
    answer = ask(serve_app(FakeGateway(), section), "GET", "/admin", headers=headers)
    assert answer.error["message"].endswith("nearest: GET /admin/replicas.")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_an_empty_body_is_called_empty(server, path):
    for body in (b"", b" \n"):
        answer = post(server, path, body)
        assert (answer.status, answer.error["param"]) == (400, "body")
        assert answer.error["message"] == "The body is empty; send JSON."


def test_storing_is_ignored_in_chats_and_refused_in_responses(server, gateway):
    gateway.script = lambda call: speak(call, "x")
    assert [chat(server, store=store).status for store in (True, False, None)] == [200] * 3
    answers = [
        post(server, "/v1/responses", {"model": "tiny", "input": "x", "store": store})
        for store in (True, False, None)
    ]
    assert [answer.status for answer in answers] == [400, 200, 200]
    assert answers[0].error["param"] == "store"


@pytest.mark.parametrize("spelling", ["org/large model", "org%2Flarge%20model"])
def test_a_model_whose_name_has_a_slash_can_be_asked_for(server, spelling):
    answer = ask(server, "GET", "/v1/models/" + spelling.replace(" ", "%20"))
    assert answer.json() == {
        "id": "org/large model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "sluice",
        "max_model_len": 2048,
    }


def test_models_are_listed(server):
    listed = ask(server, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "org/large model"]


def test_readiness_follows_the_gateway_and_liveness_does_not(server, gateway):
    assert ask(server, "GET", "/ready").json() == {"ready": True, "reason": ""}
    gateway.status = Readiness(ready=False, reason="loading tiny")
    try:
        answer = ask(server, "GET", "/ready")
        assert answer.status == 503
        assert answer.json() == {"ready": False, "reason": "loading tiny"}
        assert ask(server, "GET", "/health").status == 200
    finally:
        gateway.status = Readiness(ready=True, reason="")


def test_readiness_tells_how_long_an_absent_model_takes_and_what_becomes_of_requests(
    server, gateway
):
    absent = (Absent("tiny", 20.04, held=True), Absent("huge", None, held=False))
    gateway.status = Readiness(ready=True, reason="", absent=absent)
    try:
        answer = ask(server, "GET", "/ready")
        assert answer.status == 200
        assert answer.json()["absent"] == [
            {"model": "tiny", "ready_in_s": 20.0, "requests": "held"},
            {"model": "huge", "ready_in_s": None, "requests": "refused"},
        ]
    finally:
        gateway.status = Readiness(ready=True, reason="")


def test_metrics_are_passed_on(server):
    answer = ask(server, "GET", "/metrics")
    assert answer.body == b"sluice_fake 1\n"
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_operators_see_replicas(serve_app):
    status = ReplicaStatus("tiny-0", "tiny", "backoff", "exit status 9", 3, 4.04)
    gateway = FakeGateway(readiness=Readiness(ready=False, reason="no replica", replicas=(status,)))
    section = ServerSection(listen="127.0.0.1:0", admin_key_digests=(digest("boss"),))
    answer = ask(
        serve_app(gateway, section), "GET", "/admin/replicas",
        headers={"authorization": "Bearer boss"},
    )  # fmt: skip
    assert answer.json()["replicas"] == [
        {
            "id": "tiny-0", "model": "tiny", "state": "backoff", "error": "exit status 9",
            "losses": 3, "starts_in_s": 4.0,
        }
    ]  # fmt: skip


# -------------------------------------------------------------------------------------- identity


def test_a_request_id_is_made_or_kept(server, gateway):
    gateway.script = lambda call: speak(call, "x")
    made = chat(server)
    assert made.headers["x-request-id"] == gateway.recorded.calls[-1].id
    assert made.json()["id"] == f"chatcmpl-{gateway.recorded.calls[-1].id}"
    assert chat(server, {"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    assert gateway.recorded.calls[-1].client_id == "mine-7"
    # The call keeps an id of its own, because clients repeat theirs when they retry.
    assert gateway.recorded.calls[-1].id != "mine-7"
    assert chat(server, {"x-request-id": "mine-7"}, n=0).headers["x-request-id"] == "mine-7"


@pytest.mark.parametrize("own", ["", "a b", "x" * 129, "né", 'a"b'])
def test_a_request_id_that_could_harm_is_replaced(server, own):
    answer = chat(server, {"x-request-id": own})
    assert answer.headers["x-request-id"] != own


def test_d23_a_request_arrives_with_its_first_byte(server, gateway):
    """However long its body takes, and whatever waits before the tokeniser."""
    gateway.script = lambda call: speak(call, "x")
    request = raw_post()
    with connected(server) as opened:
        opened.sendall(request[:40])
        server.call(lambda: asyncio.sleep(0.02))
        between_ns = time.monotonic_ns()
        opened.sendall(request[40:])
        read_until(opened, b"chatcmpl")
    assert gateway.recorded.calls[-1].arrived_ns < between_ns


# ---------------------------------------------------------------------------------------- errors


def test_d07_a_refusal_says_when_to_retry_and_why(server, gateway):
    refused = Overloaded(
        "The queue of tiny holds 2 requests, its limit.",
        status=429, reason="queue_full", measured=2, threshold=2, retry_after_s=2.2,
    )  # fmt: skip
    gateway.script = lambda call: refuse(refused)
    for stream in (False, True):
        answer = chat(server, stream=stream)
        assert answer.status == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.headers["retry-after-ms"] == "2200"
        assert answer.headers["x-should-retry"] == "true"
        assert answer.headers["x-sluice-reason"] == "queue_full; measured=2; threshold=2"
        assert answer.headers["content-type"] == "application/json"
        assert answer.error == {
            "message": "The queue of tiny holds 2 requests, its limit.",
            "type": "rate_limit_exceeded",
            "param": None,
            "code": "queue_full",
            "measured": 2,
            "threshold": 2,
        }


def test_a_bug_is_answered_without_leaking_and_logged_without_the_prompt(server, gateway, caplog):
    secret = "the-prompt-is-secret"
    gateway.script = lambda call: refuse(ValueError(f"cannot tokenise {secret}"))
    with caplog.at_level(logging.DEBUG):
        answer = chat(
            server, {"x-request-id": "mine"}, messages=[{"role": "user", "content": secret}]
        )
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "false"
    assert secret not in answer.body.decode()
    assert secret not in caplog.text
    assert "request mine: ValueError" in caplog.text
    assert "gateway.py" in caplog.text


def test_a_bug_in_a_stream_is_an_error_event(server, gateway):
    gateway.script = lambda call: Script([Delta(0, "Half", 1), KeyError("x")])
    *_, last = chat(server, stream=True).events()
    assert last["error"]["code"] == "internal_error"
    gateway.script = lambda call: speak(call, "fine")
    assert chat(server).status == 200


def test_pieces_that_end_without_an_ending_are_a_bug(server, gateway):
    gateway.script = lambda call: Script([Delta(0, "Half", 1)])
    assert chat(server).status == 500
    assert chat(server, stream=True).events()[-1]["error"]["code"] == "internal_error"


def test_no_prompt_or_output_text_is_logged(server, gateway, caplog):
    gateway.script = lambda call: speak(call, "output-text")
    with caplog.at_level(logging.DEBUG):
        chat(server, messages=[{"role": "user", "content": "prompt-text"}])
        chat(server, messages=[{"role": "prompt-text", "content": "prompt-text"}])
        post(server, "/v1/completions", {"model": "tiny", "prompt": "prompt-text", "n": 0})
        post(server, "/v1/responses", b'{"input":"prompt-text')
    assert "prompt-text" not in caplog.text
    assert "output-text" not in caplog.text


# ------------------------------------------------------------------------------------------ CORS


def test_web_pages_are_not_invited_by_default(server):
    answer = ask(server, "GET", "/v1/models", headers={"origin": "https://a.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_listed_origins_may_call(serve_app):
    section = ServerSection(
        listen="127.0.0.1:0",
        cors_origins=("https://a.example",),
        api_key_digests=(digest("right"),),
    )
    server = serve_app(FakeGateway(), section)
    asking = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    path = "/v1/chat/completions"
    allowed = ask(server, "OPTIONS", path, headers={"origin": "https://a.example", **asking})
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = ask(server, "OPTIONS", path, headers={"origin": "https://b.example", **asking})
    assert "access-control-allow-origin" not in other.headers
    # The key is still asked for.
    got = ask(server, "GET", "/v1/models", headers={"origin": "https://a.example"})
    assert got.status == 401
