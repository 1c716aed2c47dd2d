"""Refusals become errors that say what was asked, what the limit is and what to change."""

from sluice.core.errors import ContextExceeded, InvalidRequest, Overloaded
from sluice.core.events import Reject
from sluice.core.request import Request
from sluice.runtime.refusals import refusal_error


def request(prompt: int, output: int, choices: int = 1) -> Request:
    return Request("r", 0, tuple(range(prompt)), output, choices)


def test_d03_an_overlong_request_is_told_all_three_numbers() -> None:
    asked = request(2000, 200)
    error = refusal_error(Reject("r", 400, "context_length_exceeded", 2200, 2048, None), asked, "m")
    assert isinstance(error, ContextExceeded)
    assert error.param == "max_tokens"
    assert all(number in error.message for number in ("2000", "200", "2048"))


def test_d03_an_overlong_prompt_is_blamed_on_the_prompt() -> None:
    asked = request(3000, 1)
    error = refusal_error(Reject("r", 400, "context_length_exceeded", 3000, 2048, None), asked, "m")
    assert isinstance(error, ContextExceeded)
    assert error.param == "messages"
    assert "3000" in error.message
    assert "2048" in error.message


def test_too_many_choices_are_blamed_on_n() -> None:
    error = refusal_error(Reject("r", 400, "too_many_choices", 5, 4, None), request(1, 1, 5), "m")
    assert isinstance(error, InvalidRequest)
    assert (error.param, error.code) == ("n", "too_many_choices")
    assert "5" in error.message
    assert "4" in error.message


def test_overload_keeps_status_reason_numbers_and_wait() -> None:
    for reason, status in (
        ("queue_full", 429),
        ("queue_deadline", 429),
        ("not_ready", 503),
        ("load_failed", 503),
        ("draining", 503),
    ):
        error = refusal_error(Reject("r", status, reason, 4, 3, 2.5), request(1, 1), "m")
        assert isinstance(error, Overloaded)
        assert (error.status, error.reason, error.retry_after_s) == (status, reason, 2.5)
        assert (error.measured, error.threshold) == (4, 3)
