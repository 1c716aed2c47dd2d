"""The operator tells the server of events that it cannot see."""

import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.server.ports import OperatorEvent
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from tests.server.wire_client import post

ADMIN = {"authorization": "Bearer boss"}
SECTION = ServerSection(listen="127.0.0.1:0", admin_key_digests=(digest("boss"),))


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
def server(serve_app, operations):
    return serve_app(FakeGateway(), SECTION, None, operations)


def test_an_event_is_noted(server, operations):
    body = {"what": "rollout", "details": {"engine": "vllm 0.33", "by": "ops"}}
    assert post(server, "/admin/events", body, ADMIN).json() == {"noted": "rollout"}
    assert post(server, "/admin/events", {"what": "failover.done"}, ADMIN).status == 200
    assert operations.noted == [
        OperatorEvent("rollout", {"engine": "vllm 0.33", "by": "ops"}),
        OperatorEvent("failover.done", {}),
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"what": ""},
        {"what": "Two Words"},
        {"what": "x" * 65},
        {"what": "rollout", "detail": {}},
        {"what": "rollout", "details": {"k": 1}},
        {"what": "rollout", "details": {"k": "v" * 257}},
        {"what": "rollout", "details": {f"k{n}": "" for n in range(33)}},
        b"[",
    ],
    ids=lambda body: str(body)[:40],
)
def test_what_is_no_event_is_refused_with_an_example(server, operations, body):
    answer = post(server, "/admin/events", body, ADMIN)
    assert answer.status == 400
    assert '"what": "rollout"' in answer.error["message"]
    assert operations.noted == []


def test_only_the_admin_key_may_note_events(server, operations):
    assert post(server, "/admin/events", {"what": "rollout"}).status == 401
    assert operations.noted == []
