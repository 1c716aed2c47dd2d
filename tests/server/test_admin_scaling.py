"""The operator looks at the number of replicas, and decides it."""

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from tests.server.wire_client import ask, post

ADMIN = {"authorization": "Bearer boss"}
SECTION = ServerSection(listen="127.0.0.1:0", admin_key_digests=(digest("boss"),))


@pytest.fixture
def operations() -> FakeOperations:
    made = FakeOperations()
    made.overview.shown = b'{"models":[]}'
    return made


@pytest.fixture
def server(serve_app, operations):
    return serve_app(FakeGateway(), SECTION, None, operations)


def test_a_number_is_set_and_left_to_the_load_again(server, operations):
    answer = post(server, "/admin/scale", {"model": "tiny", "replicas": 2}, ADMIN)
    assert (answer.status, answer.json()) == (200, {"models": []})
    assert operations.pinned == {"tiny": 2}
    assert post(server, "/admin/scale", {"model": "tiny", "replicas": None}, ADMIN).status == 200
    assert operations.pinned == {"tiny": None}
    assert ask(server, "GET", "/admin/scaling", headers=ADMIN).json() == {"models": []}


@pytest.mark.parametrize(
    "body",
    [{}, {"model": "tiny"}, {"model": "tiny", "replicas": -1}, {"model": 1, "replicas": 1}, b"["],
    ids=str,
)
def test_what_is_no_number_is_refused_with_an_example(server, operations, body):
    answer = post(server, "/admin/scale", body, ADMIN)
    assert answer.status == 400
    assert '"replicas": 3' in answer.error["message"]
    assert operations.pinned == {}


def test_only_the_admin_key_may_set_it(server, operations):
    assert post(server, "/admin/scale", {"model": "tiny", "replicas": 1}).status == 401
    assert operations.pinned == {}
