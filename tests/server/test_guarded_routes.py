"""Every route that takes work is bounded: by keys, bodies, limits of tenants. None can be left out.

The tests walk over the routes themselves. A route that takes work needs a line in ``WORK``.
"""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection, TenantSection
from sluice.runtime.generation import Relaying
from sluice.server.auth import Permission, permission_of
from sluice.server.limits import Limits
from sluice.server.routes import ROUTES, routes
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from sluice.testing.upstream import Received, Script, Until, whole
from sluice.wiring.gateway import tenant_limits
from tests.cluster.relay_rig import answering, engine, relay
from tests.server.test_overload_page import KEY, SECTION, Start, start
from tests.server.wire_client import ask, connected, post, read_until

__all__ = ["start"]
MESSAGES = [{"role": "user", "content": "x"}]
# A small request for each route that takes work.
WORK: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
# Take a small body and no work: nothing is computed for it.
TOLD = {"/v1/feedback"}
PATHS = sorted(WORK)
HERE = sorted(path for path in WORK if path.encode() in ROUTES)
LIMITS = ["requests_per_minute", "tokens_per_minute", "concurrency"]


def test_every_route_that_takes_work_is_listed_here():
    served = routes(remote=True).exact
    taking = {path.decode() for path, route in served.items() if route.method == "POST"}
    assert taking == set(WORK) | TOLD
    assert {permission_of(path.encode()) for path in TOLD} == {Permission.INFERENCE}


def test_every_other_route_reads_no_body_or_is_the_operators():
    served = routes(FakeOperations(), remote=True)
    for path, route in {**served.exact, **served.beginning}.items():
        if path.decode() not in {*WORK, *TOLD}:
            assert route.method == "GET" or permission_of(path) is Permission.ADMIN


@pytest.fixture(scope="module")
def server(serve_module):
    section = ServerSection(
        listen="127.0.0.1:0", body_bytes_max=2000, api_key_digests=(digest("right"),)
    )
    gateway = FakeGateway(relaying=Relaying(always=frozenset({"tiny"})))
    return serve_module(gateway, section, Limits(body_bytes_max=2000, body_s_max=0.05))


def head(path: str, key: str, *lines: str) -> bytes:
    told = (f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}",
            "content-type: application/json", *lines)  # fmt: skip
    return ("\r\n".join(told) + "\r\n\r\n").encode()


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_key_is_refused_before_a_byte_of_the_body_is_sent(server, path):
    with connected(server) as opened:
        opened.sendall(head(path, "wrong", "content-length: 1000"))
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", PATHS)
def test_a_body_over_the_limit_is_refused(server, path):
    with connected(server) as opened:
        opened.sendall(head(path, "right", "content-length: 2001"))
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_comes_too_slowly_is_refused(server, path):
    with connected(server) as opened:
        opened.sendall(head(path, "right", "content-length: 1000") + b"{")
        assert read_until(opened, b"\r\n").startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", PATHS)
def test_another_type_than_json_is_refused(server, path):
    """Web pages can make a browser send other types here without asking first."""
    headers = {"authorization": "Bearer right", "content-type": "text/plain"}
    body = json.dumps({"model": "tiny", **WORK[path]}).encode()
    answer = ask(server, "POST", path, body, headers)
    assert (answer.status, answer.error["param"]) == (400, "content-type")


def limited(limit: str) -> TenantSection:
    """A tenant that may have one of a kind."""
    return replace(TenantSection(), **{limit: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_tenant_cannot_pass_its_limits_on_any_route(start: Start, path, limit):
    tenants = {"acme": limited(limit)}
    server, rig = start(SECTION, tenants=tenant_limits(tenants), sections=tenants)
    if limit == "requests_per_minute":
        assert post(server, path, {"model": "tiny", **WORK[path]}, KEY).status == 200
    if limit == "concurrency":
        server.call(lambda: rig.generate("runs", tenant="acme"))
    answer = post(server, path, {"model": "tiny", **WORK[path]}, KEY)
    assert (answer.status, answer.error["code"]) == (429, limit)
    assert answer.headers["x-sluice-reason"].startswith(limit)


@pytest.fixture(scope="module")
def remote():
    """A remote model, and a tenant for each limit and each route, whose key is their names."""
    tenants = {
        f"{limit}{path.replace('/', '.')}": limited(limit) for limit in LIMITS for path in PATHS
    }
    keys = tuple((digest(name), name) for name in tenants)
    section = ServerSection(listen="127.0.0.1:0", tenant_key_digests=keys)

    gates: list[asyncio.Event] = []

    def answer(request: Received) -> Script:
        whole_answer = whole(b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}')
        return [Until(gates[-1]), *whole_answer] if b"hold" in request.body else whole_answer

    with relay(answering(answer), settings={"server": section, "tenants": tenants}) as rig:
        yield rig, gates


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_tenant_cannot_pass_its_limits_on_any_route_of_a_remote_model(remote, path, limit):
    rig, gates = remote
    gates.append(asyncio.Event())
    key = {"authorization": f"Bearer {limit}{path.replace('/', '.')}"}
    work = {"model": "big", **WORK[path]}
    if limit == "requests_per_minute":
        assert rig.post(path, work, **key).status == 200
    with ThreadPoolExecutor(1) as threads:
        held = None
        if limit == "concurrency":
            sent = len(rig.sent())
            held = threads.submit(rig.post, path, {**work, "user": "hold"}, **key)
            rig.eventually(lambda: len(rig.sent()) > sent)
        answer = rig.post(path, work, **key)
        assert (answer.status, answer.error["code"]) == (429, limit)
        if held is not None:
            rig.thread.loop.call_soon_threadsafe(gates[-1].set)
            assert held.result().status == 200
            assert rig.post(path, work, **key).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_limit_that_an_engine_may_not_heed_reserves_no_less(path):
    tenants = {"acme": replace(TenantSection(), tokens_per_minute=500)}
    section = ServerSection(listen="127.0.0.1:0", tenant_key_digests=((digest("k"), "acme"),))
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    with relay(engine(), settings={"server": section, "tenants": tenants}) as rig:
        for large in names:
            body = {**WORK[path], "model": "big", **dict.fromkeys(names, 1), large: 600}
            answer = rig.post(path, body, authorization="Bearer k")
            assert (answer.status, answer.error["code"]) == (429, "tokens_per_minute")
        assert not rig.sent()


@pytest.mark.parametrize("fields", [{"n": 129}, {"prompt": ["x"] * 65, "n": 2}])
def test_choices_of_one_request_are_bounded_for_remote_models_too(fields):
    with relay(engine()) as rig:
        answer = rig.post("/v1/completions", {"model": "big", "prompt": "x", **fields})
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert "the limit is 128" in answer.error["message"]
        assert not rig.sent()
