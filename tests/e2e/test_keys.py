"""Case D-14 against a running server: every route and spelling needs its key."""

import os

import pytest

from sluice.telemetry.journal import JournalReader
from tests.e2e.clients import CHAT, COMPLETIONS, ask, post
from tests.e2e.processes import ServerProcess, eventually

pytestmark = pytest.mark.model

KEY, ADMIN = "sk-right-key-0123456789", "sk-admin-key-0123456789"
OPEN = {"/health", "/ready", "/metrics"}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("GET", "/admin/replicas"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
]
BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'


def spellings(path: str) -> list[str]:
    return [
        path, path + "/", "/" + path, path.replace("/v1", "//v1"), path.upper(),
        path.replace("models", "%6dodels").replace("chat", "c%68at"), path + "?key=x", path + "%00",
        path + ";x", "/health/.." + path, "/./" + path[1:], path.replace("/", "%2F"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def guarded(smollm2_folder, tmp_path_factory):
    environment = {**os.environ, "E2E_KEY": KEY, "E2E_ADMIN": ADMIN}
    settings = (
        f"models.tiny.source={smollm2_folder}", "models.tiny.kv_bytes=64MiB",
        "server.api_keys_env=E2E_KEY", "server.admin_key_env=E2E_ADMIN",
    )  # fmt: skip
    arguments = [part for one in settings for part in ("--set", one)]
    running = ServerProcess(tmp_path_factory.mktemp("keys"), arguments, environment)
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_d14_no_spelling_of_a_route_answers_without_its_key(guarded: ServerProcess, method, path):
    for spelling in spellings(path):
        for verb in (method, "HEAD", "OPTIONS", "PUT"):
            for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": KEY}):
                told = {"content-type": "application/json", **headers}
                answer = ask(guarded.target, verb, spelling, BODY, told)
                assert answer.status in {400, 401, 404, 405}, (verb, spelling, headers)
                if spelling == path and verb == method:
                    assert answer.status == 401
                    assert answer.error["code"] == "invalid_api_key"


def test_d14_the_open_routes_answer_and_the_right_key_serves(guarded: ServerProcess):
    for path in OPEN:
        assert ask(guarded.target, "GET", path).status == 200
    right = {"authorization": f"Bearer {KEY}"}
    assert ask(guarded.target, "GET", "/v1/models", headers=right).status == 200
    assert post(guarded.target, CHAT, BODY, right).status == 200


def test_d14_admin_needs_a_key_of_its_own(guarded: ServerProcess):
    right = {"authorization": f"Bearer {KEY}"}
    admin = {"authorization": f"Bearer {ADMIN}"}
    assert ask(guarded.target, "GET", "/admin/replicas", headers=right).status in {401, 403}
    assert ask(guarded.target, "GET", "/admin/replicas", headers=admin).status != 401
    assert post(guarded.target, CHAT, BODY, admin).status in {401, 403}


def test_keys_appear_nowhere(guarded: ServerProcess):
    post(guarded.target, CHAT, b"{", {"authorization": f"Bearer {KEY}"})
    metrics = ask(guarded.target, "GET", "/metrics").body.decode()
    for secret in (KEY, ADMIN):
        assert secret not in guarded.output
        assert secret not in metrics


def test_what_clients_send_and_get_is_in_no_log_and_no_journal(guarded: ServerProcess):
    right = {"authorization": f"Bearer {KEY}"}
    mark = "xyzzy-plugh"
    chat = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": mark}]}
    said = post(guarded.target, CHAT, {**chat, "logprobs": True}, right).text
    # A grammar makes the output known: it is searched for like the prompt.
    schema = {"type": "object", "properties": {mark: {"const": mark}}, "required": [mark]}
    form = {"type": "json_schema", "json_schema": {"name": "m", "strict": True, "schema": schema}}
    forced = post(guarded.target, CHAT, {**chat, "max_tokens": 60, "response_format": form}, right)
    assert mark in forced.text
    wrong = {"stop": [mark] * 99, "temperature": mark, "messages": mark, "response_format": mark}
    for field, value in wrong.items():
        refused = post(guarded.target, CHAT, {**chat, field: value}, right)
        assert refused.status == 400
        assert mark not in refused.body.decode()
    assert post(guarded.target, COMPLETIONS, {"model": "tiny", "prompt": mark * 9999}, right).status
    eventually(lambda: len(written(guarded)) > 10)
    for text in (guarded.output, *written(guarded)):
        assert mark not in text
        assert len(said) < 20 or said not in text


def written(server: ServerProcess) -> list[str]:
    """The records of all its processes that are on disk."""
    return [repr(entry.record) for entry in JournalReader(server.journal).entries()]
