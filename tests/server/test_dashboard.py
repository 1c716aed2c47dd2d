"""The dashboard's page is for everyone, its numbers for the operator, and nothing comes from
elsewhere."""

import re

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from tests.server.wire_client import ask

ADMIN = {"authorization": "Bearer boss"}
CLIENT = {"authorization": "Bearer sk-1"}
FILES = ("/dashboard", "/dashboard/style.css", "/dashboard/app.js", "/dashboard/charts.js")
NUMBERS = ("/dashboard/data", "/dashboard/request?id=r1")


def section(*, api: bool = True, admin: bool = True) -> ServerSection:
    return ServerSection(
        listen="127.0.0.1:0",
        api_key_digests=(digest("sk-1"),) if api else (),
        admin_key_digests=(digest("boss"),) if admin else (),
    )


@pytest.fixture
def operations() -> FakeOperations:
    made = FakeOperations()
    made.overview.shown = b'{"samples":[]}'
    made.overview.requests["r1"] = b'{"id":"r1"}'
    return made


@pytest.mark.parametrize("path", FILES)
def test_the_page_is_open_and_refers_to_no_other_place(serve_app, operations, path):
    server = serve_app(FakeGateway(), section(), None, operations)
    answer = ask(server, "GET", path)
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.body.decode()
    found = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert found == set()
    assert not re.search(r"""(src|href)=["'](?!/dashboard|data:,)""", text)


@pytest.mark.parametrize("path", NUMBERS)
def test_numbers_need_the_admin_key(serve_app, operations, path):
    server = serve_app(FakeGateway(), section(), None, operations)
    assert ask(server, "GET", path).status == 401
    assert ask(server, "GET", path, headers=CLIENT).status == 403
    answer = ask(server, "GET", path, headers=ADMIN)
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", NUMBERS)
def test_numbers_are_open_only_where_there_is_no_key_at_all(serve_app, operations, path):
    for api, admin, status in ((False, False, 200), (False, True, 401), (True, False, 403)):
        server = serve_app(FakeGateway(), section(api=api, admin=admin), None, operations)
        assert ask(server, "GET", path).status == status


def test_a_caller_asks_for_a_model_and_for_what_is_new(serve_app, operations):
    server = serve_app(FakeGateway(), section(), None, operations)
    path = "/dashboard/data?model=tiny&since=17.5&window=60"
    assert ask(server, "GET", path, headers=ADMIN).json() == {"samples": []}
    assert operations.overview.asked == [("tiny", 17.5, 60.0)]
    ask(server, "GET", "/dashboard/data", headers=ADMIN)
    assert operations.overview.asked[1] == ("", 0.0, 900.0)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("model=other", 404),
        ("since=x", 400),
        ("since=-1", 400),
        ("window=nan", 400),
        ("window=1e9", 400),
        ("&".join(f"a{n}=1" for n in range(20)), 400),
        ("%ff=%00", 200),
    ],
)
def test_a_query_that_means_nothing_is_refused(serve_app, operations, query, status):
    server = serve_app(FakeGateway(), section(), None, operations)
    assert ask(server, "GET", f"/dashboard/data?{query}", headers=ADMIN).status == status


def test_a_request_that_is_forgotten_is_not_found(serve_app, operations):
    server = serve_app(FakeGateway(), section(), None, operations)
    answer = ask(server, "GET", "/dashboard/request?id=r2", headers=ADMIN)
    assert (answer.status, "sluice trace" in answer.error["message"]) == (404, True)
