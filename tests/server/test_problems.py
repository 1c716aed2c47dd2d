"""The table of errors: every class has its answer, and answers say what clients can act on."""

import inspect
import json
from dataclasses import replace

import pytest

from sluice.core import errors
from sluice.core.errors import ExecutorError, InvalidRequest, Overloaded, SluiceError
from sluice.core.request import EndReason
from sluice.runtime.generation import Fault
from sluice.server.problems import TABLE, problem_of, unfinished
from sluice.testing.gateway import finished

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, SluiceError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_class_has_a_row(kind):
    assert kind in TABLE


@pytest.mark.parametrize("kind", CLASSES)
def test_the_drawn_tree_names_every_class(kind):
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.InvalidRequest, 400, "invalid_request"),
        (errors.ContextExceeded, 400, "context_length_exceeded"),
        (errors.BodyTooSlow, 408, "body_too_slow"),
        (errors.BodyTooLarge, 413, "body_too_large"),
        (errors.Unauthorized, 401, "invalid_api_key"),
        (errors.Forbidden, 403, "permission_denied"),
        (errors.ModelNotFound, 404, "model_not_found"),
        (errors.ExecutorError, 502, "engine_error"),
        (errors.ReplicaGone, 502, "replica_lost"),
        (errors.ModelLoadError, 503, "model_not_loaded"),
        (errors.MemoryShort, 503, "model_not_loaded"),
        (errors.InternalError, 500, "internal_error"),
        (SluiceError, 500, "internal_error"),
        (ValueError, 500, "internal_error"),
    ],
)
def test_status_and_code(kind, status, code):
    problem = problem_of(kind("words"))
    assert (problem.status, problem.code) == (status, code)
    assert set(json.loads(problem.body())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "error",
    [errors.InternalError("/secret"), errors.ModelLoadError("/secret"), KeyError("/secret")],
)
def test_words_for_operators_are_not_told_to_clients(error):
    assert "/secret" not in problem_of(error).body().decode()


def test_a_field_at_fault_and_a_code_of_its_own_are_told():
    problem = problem_of(InvalidRequest("no grammar", param="response_format", code="bad_schema"))
    assert (problem.error["param"], problem.code) == ("response_format", "bad_schema")


def overloaded(retry_after_s: float | None, **fields) -> Overloaded:
    given = {"status": 429, "reason": "queue_full", "measured": 3.0, "threshold": 2.0, **fields}
    return Overloaded("full", retry_after_s=retry_after_s, **given)


@pytest.mark.parametrize(
    ("retry_after_s", "told"),
    [
        (0.0, {b"retry-after": b"1", b"retry-after-ms": b"1", b"x-should-retry": b"true"}),
        (0.25, {b"retry-after": b"1", b"retry-after-ms": b"250", b"x-should-retry": b"true"}),
        (7.001, {b"retry-after": b"8", b"retry-after-ms": b"7001", b"x-should-retry": b"true"}),
        (None, {b"x-should-retry": b"false"}),
        (float("inf"), {b"x-should-retry": b"false"}),
    ],
)
def test_d07_retry_advice_follows_the_predicted_wait(retry_after_s, told):
    headers = dict(problem_of(overloaded(retry_after_s)).headers)
    assert headers.pop(b"x-sluice-reason") == b"queue_full; measured=3; threshold=2"
    assert headers == told


def test_503_and_429_have_types_of_their_own():
    assert problem_of(overloaded(1)).error["type"] == "rate_limit_exceeded"
    assert problem_of(overloaded(1, status=503)).error["type"] == "server_error"


def test_numbers_that_json_lacks_become_null():
    problem = problem_of(overloaded(1, measured=float("inf"), threshold=float("nan")))
    assert json.loads(problem.body())["error"]["measured"] is None
    assert json.loads(problem.body())["error"]["threshold"] is None


def test_what_was_not_measured_is_not_told():
    problem = problem_of(unfinished(finished(EndReason.EXPIRED)))
    assert not {"measured", "threshold"} & set(problem.error)
    assert dict(problem.headers)[b"x-sluice-reason"] == b"deadline_expired"


def test_no_reason_can_add_a_header():
    headers = dict(problem_of(overloaded(1, reason="a\r\nset-cookie: x\u00e9")).headers)
    assert headers[b"x-sluice-reason"].startswith(b"a??set-cookie: x?;")


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (EndReason.EXPIRED, 429, "deadline_expired"),
        (EndReason.SHUTDOWN, 503, "shutting_down"),
        (EndReason.CANCELLED, 503, "cancelled"),
        (EndReason.FAILED, 502, "replica_lost"),
    ],
)
def test_incomplete_endings_are_errors(reason, status, code):
    for words in ("", "told why"):
        problem = problem_of(unfinished(finished(reason, error=words)))
        assert (problem.status, problem.code) == (status, code)
        assert words in problem.error["message"]


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (Fault.REQUEST, 400, "invalid_request"),
        (Fault.ENGINE, 500, "engine_error"),
        (Fault.REPLICA, 502, "replica_lost"),
    ],
)
def test_a_failed_ending_is_put_down_to_what_failed(fault, status, code):
    problem = problem_of(unfinished(replace(finished(EndReason.FAILED, error="why"), fault=fault)))
    assert (problem.status, problem.code, problem.error["message"]) == (status, code, "why")


def test_an_executor_error_may_be_a_gateway_time_out():
    late = ExecutorError("late")
    late.status = 504
    assert problem_of(late).status == 504
