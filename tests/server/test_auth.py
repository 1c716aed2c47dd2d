"""D-14: without a key only listed paths answer, whatever the spelling and the method."""

from itertools import product
from urllib.parse import quote

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.core.errors import Unauthorized
from sluice.server import auth, routes
from sluice.server.auth import Keys, Permission, permission_of
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from tests.server.wire_client import MESSAGES, ask, post

RIGHT = {"authorization": "Bearer right"}
WRONG = {"authorization": "Bearer wrong"}
ADMIN = {"authorization": "Bearer boss"}
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE")
# Every path that may answer without a key; adding one is a decision, not a side effect.
OPEN = {"/health", "/ready", "/metrics"}
OPEN |= {"/dashboard", "/dashboard/style.css", "/dashboard/app.js", "/dashboard/charts.js"}


def section(**fields) -> ServerSection:
    return ServerSection(
        listen="127.0.0.1:0",
        api_key_digests=(digest("other"), digest("right")),
        admin_key_digests=(digest("boss"),),
        **fields,
    )


@pytest.fixture(scope="module")
def server(serve_module):
    return serve_module(FakeGateway(), section(), None, FakeOperations())


def all_paths() -> list[str]:
    served = routes.routes(FakeOperations())
    found = [path.decode() for path in (*served.exact, *served.beginning)]
    return [*found, "/v1/models/tiny", "/admin/replicas/a/drain", "/", "/docs", "/metricsx"]


def spellings(path: str) -> list[str]:
    encoded = "/" + "".join(f"%{ord(c):02x}" for c in path[1:])
    return [
        path + "/",
        path + "//",
        "/" + path,
        path.replace("/", "//"),
        path.upper(),
        path.title(),
        encoded,
        "/" + quote(path, safe=""),
        "http://host" + path,
        "/x/.." + path,
        path + "/.",
        path + ";x=1",
        path + "%20",
        path + "%00",
        path + ".json",
        path.replace("/v1", ""),
        "/v1" + path,
    ]


@pytest.mark.parametrize("path", all_paths())
@pytest.mark.parametrize("headers", [{}, WRONG], ids=["no key", "wrong key"])
def test_d14_only_listed_paths_answer_without_a_key(server, path, headers):
    for method in METHODS:
        answer = ask(server, method, path, headers=headers)
        if path in OPEN:
            assert answer.status in {200, 405}, (method, path)
            continue
        assert answer.status == 401, (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert answer.error["code"] == "invalid_api_key"
            assert set(answer.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", all_paths())
def test_d14_no_spelling_of_a_path_goes_around_the_key(server, path):
    for spelling, method in product(spellings(path), ("GET", "HEAD", "OPTIONS", "POST")):
        if spelling.removeprefix("http://host") not in OPEN:
            assert ask(server, method, spelling).status == 401, (method, spelling)


def test_d14_an_open_path_of_another_host_is_still_that_path(server):
    assert ask(server, "GET", "http://host/health").status == 200
    assert ask(server, "GET", "http://health/v1/models").status == 401


def test_d14_a_query_does_not_change_the_path(server):
    assert ask(server, "GET", "/health?key=1").status == 200
    assert ask(server, "GET", "/v1/models?/health").status == 401
    assert ask(server, "GET", "/v1/models?authorization=right").status == 401


def test_d14_a_new_route_is_protected_unless_it_is_listed(serve_app, monkeypatch):
    monkeypatch.setitem(routes.ROUTES, b"/v1/brand-new", routes.ROUTES[b"/v1/models"])
    server = serve_app(FakeGateway(), section(), None, FakeOperations())
    assert ask(server, "GET", "/v1/brand-new").status == 401
    assert ask(server, "GET", "/v1/brand-new", headers=RIGHT).status == 200


def test_d14_the_list_of_open_paths_is_the_documented_one():
    without = {Permission.OPEN, Permission.METRICS}
    listed = {path.decode() for path, asked in auth.PERMISSIONS.items() if asked in without}
    assert listed == OPEN


def test_d14_the_right_key_opens_inference(server):
    assert ask(server, "GET", "/v1/models", headers=RIGHT).status == 200
    body = {"model": "tiny", "messages": MESSAGES}
    assert post(server, "/v1/chat/completions", body, RIGHT).status == 200
    assert (
        ask(server, "GET", "/v1/models", headers={"authorization": "bearer  right "}).status == 200
    )


def test_d14_admin_needs_a_permission_of_its_own(server):
    assert ask(server, "GET", "/admin/replicas", headers=ADMIN).status == 200
    refused = ask(server, "GET", "/admin/replicas", headers=RIGHT)
    assert (refused.status, refused.error["code"]) == (403, "permission_denied")
    assert ask(server, "GET", "/v1/models", headers=ADMIN).status == 403


def test_admin_is_closed_without_an_admin_key(serve_app):
    server = serve_app(FakeGateway())
    assert ask(server, "GET", "/v1/models").status == 200
    for headers in ({}, RIGHT):
        answer = ask(server, "GET", "/admin/replicas", headers=headers)
        assert (answer.status, answer.error["code"]) == (403, "permission_denied")


def test_metrics_can_be_closed(serve_app):
    server = serve_app(FakeGateway(), section(metrics_open=False))
    assert ask(server, "GET", "/metrics").status == 401
    assert ask(server, "GET", "/metrics", headers=RIGHT).status == 200
    assert ask(server, "GET", "/metrics", headers=ADMIN).status == 200
    assert ask(server, "GET", "/health").status == 200


@pytest.mark.parametrize(
    "authorization",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Basic cmlnaHQ6"],
        [b"right"],
        [b"Bearer right", b"Bearer right"],
        [b"Bearer right x"],
        [digest("right").encode()],
        [b"Bearer " + digest("right").encode()],
    ],
)
def test_other_authorization_headers_are_refused(authorization):
    with pytest.raises(Unauthorized):
        Keys.of(section()).admit(b"/v1/models", authorization)


def test_paths_ask_for_inference_unless_listed_or_admin():
    assert permission_of(b"/anything") is Permission.INFERENCE
    assert permission_of(b"/admin") is Permission.ADMIN
    assert permission_of(b"/administrator") is Permission.ADMIN
    assert permission_of(b"/health/") is Permission.INFERENCE


def test_keys_of_different_callers_are_different_tenants():
    keys = Keys.of(section())
    tenants = {keys.admit(b"/v1/models", [b"Bearer " + key]) for key in (b"right", b"other")}
    assert len(tenants) == 2
    assert not any("right" in tenant or "other" in tenant for tenant in tenants)
