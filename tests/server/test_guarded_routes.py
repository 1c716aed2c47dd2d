"""Every route that takes work is bounded: by keys, bodies, limits of tenants. None can be left out.

The tests walk over the routes themselves. A route that takes work needs a line in ``WORK``.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection, TenantSection
from sluice.core.limits import TenantLimits
from sluice.server.auth import Permission, permission_of
from sluice.server.limits import Limits
from sluice.server.routes import ROUTES, routes
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from tests.server.test_overload_page import KEY, SECTION, Start, start
from tests.server.wire_client import ask, connected, post, read_until

__all__ = ["start"]
MESSAGES = [{"role": "user", "content": "x"}]
# A small request for each route that takes work.
WORK: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
}
PATHS = sorted(WORK)


def test_every_route_that_takes_work_is_listed_here():
    taking = {path.decode() for path, route in ROUTES.items() if route.method == "POST"}
    assert taking == set(WORK)


def test_every_other_route_reads_no_body_or_is_the_operators():
    served = routes(FakeOperations())
    for path, route in {**served.exact, **served.beginning}.items():
        if path.decode() not in WORK:
            assert route.method == "GET" or permission_of(path) is Permission.ADMIN


@pytest.fixture(scope="module")
def server(serve_module):
    section = ServerSection(
        listen="127.0.0.1:0", body_bytes_max=2000, api_key_digests=(digest("right"),)
    )
    return serve_module(FakeGateway(), section, Limits(body_bytes_max=2000, body_s_max=0.05))


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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "concurrency"])
def test_a_tenant_cannot_pass_its_limits_on_any_route(start: Start, path, limit):
    limits = {limit: 1}
    tenants = {"acme": TenantSection(**limits)}
    server, rig = start(SECTION, tenants=(TenantLimits("acme", **limits),), sections=tenants)
    if limit == "requests_per_minute":
        assert post(server, path, {"model": "tiny", **WORK[path]}, KEY).status == 200
    if limit == "concurrency":
        server.call(lambda: rig.generate("runs", tenant="acme"))
    answer = post(server, path, {"model": "tiny", **WORK[path]}, KEY)
    assert (answer.status, answer.error["code"]) == (429, limit)
    assert answer.headers["x-sluice-reason"].startswith(limit)
