"""What the operator's routes, feedback and the dashboard's numbers make of hostile requests."""

import json

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.server.limits import Limits
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from tests.server.wire_client import ask, post

ADMIN = {"authorization": "Bearer boss"}
SECTION = ServerSection(listen="127.0.0.1:0", admin_key_digests=(digest("boss"),))
TAKING = ("/admin/events", "/admin/scale", "/v1/feedback")
DEEP = b"[" * 200_000
BODIES = {
    "nothing": b"",
    "null": b"null",
    "a number": b"7",
    "a list": b"[]",
    "not UTF-8": b'{"what": "\xff", "route": "\xff"}',
    "a number that is none": b'{"model": "m", "replicas": "3"}',
    "less than none": b'{"model": "m", "replicas": -1}',
    "a part of one": b'{"model": "m", "replicas": 1.5}',
    "half a surrogate": b'{"what": "\\ud800", "route": "\\ud800"}',
    "deep": DEEP,
    "deep in a member": b'{"what": ' + DEEP + b', "route": ' + DEEP,
    "deep in an unknown member": b'{"x": ' + DEEP,
    "many members": b"{" + b",".join(b'"k%d":1' % n for n in range(250_000)) + b"}",
    "not a number": b'{"route": "auto", "id": "x", "ok": NaN}',
    "an infinite number": b'{"route": "auto", "id": "x", "ok": 1e999}',
    "a huge number": b'{"route": "auto", "id": "x", "ok": ' + b"9" * 400 + b"}",
    "the same member twice": b'{"what": 1, "what": {}, "route": 1, "route": []}',
}


@pytest.fixture(scope="module")
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture(scope="module")
def server(serve_module, operations):
    return serve_module(FakeGateway(), SECTION, None, operations)


@pytest.mark.parametrize("path", TAKING)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_no_body_is_more_than_a_mistake_of_its_sender(server, operations, path, body):
    answer = post(server, path, body, ADMIN if path.startswith("/admin") else {})
    assert answer.status == 400
    assert len(answer.body) < 2000
    assert (operations.noted, operations.pinned) == ([], {})


@pytest.mark.parametrize("path", TAKING)
def test_a_body_over_the_limit_is_refused(server, path):
    body = b'{"what": "' + b"x" * Limits().body_bytes_max + b'"}'
    headers = ADMIN if path.startswith("/admin") else {}
    assert post(server, path, body, headers).status == 413


def test_a_body_that_nobody_asked_for_changes_nothing(server, operations):
    assert post(server, "/admin/reload", b"[" * 100_000, ADMIN).status == 200
    assert ask(server, "GET", "/health").status == 200
    assert operations.reloads == 1


@pytest.mark.parametrize(
    ("path", "method", "right"),
    [
        ("/admin/events", "GET", "POST"),
        ("/admin/events", "DELETE", "POST"),
        ("/admin/reload", "GET", "POST"),
        ("/admin/reload", "PUT", "POST"),
        ("/admin/scale", "GET", "POST"),
        ("/admin/scaling", "POST", "GET"),
        ("/v1/feedback", "GET", "POST"),
        ("/v1/feedback", "PATCH", "POST"),
        ("/metrics", "POST", "GET"),
        ("/dashboard", "POST", "GET"),
        ("/dashboard/data", "POST", "GET"),
        ("/dashboard/request", "PUT", "GET"),
    ],
)
def test_another_method_is_refused_with_the_right_one(server, operations, path, method, right):
    answer = ask(server, method, path, headers=ADMIN)
    if path in {"/v1/feedback", "/metrics", "/dashboard"}:
        answer = ask(server, method, path)
    assert answer.status == 405
    assert answer.headers["allow"].startswith(right)
    assert operations.noted == []


@pytest.mark.parametrize(
    "query",
    [
        "model=%3Cscript%3Ealert(1)%3C/script%3E",
        "model=" + "x" * 4000,
        "model=%00",
        "model=%ff%fe",
        "since=1e999",
        "since=-inf",
        "window=%F0%9F%92%A5",
        "window=9" + "9" * 5000,
    ],
)
def test_a_query_of_the_dashboard_is_refused_and_never_said_back(server, query):
    answer = ask(server, "GET", f"/dashboard/data?{query}", headers=ADMIN)
    assert answer.status in {400, 404}
    assert answer.headers["content-type"] == "application/json"
    assert b"script" not in answer.body
    assert len(answer.body) < 1000


@pytest.mark.parametrize("name", ["%00", "../../etc/passwd", "x" * 6000, "%3Cb%3E", "%ff"])
def test_a_request_that_nobody_made_is_not_found(server, name):
    answer = ask(server, "GET", f"/dashboard/request?id={name}", headers=ADMIN)
    assert answer.status == 404
    assert "<b>" not in json.dumps(answer.json())
