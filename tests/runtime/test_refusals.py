"""Refusals become errors that say what was asked, what the limit is and what to change."""

import pytest

from sluice.core.admission import REASONS
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


STATUS_503 = {"not_ready", "not_held", "held_full", "load_failed", "draining"}
OVERLOAD = sorted(set(REASONS) - {"context_length_exceeded", "too_many_choices"})


@pytest.mark.parametrize("reason", OVERLOAD)
def test_every_overload_has_words_and_keeps_its_numbers_and_its_wait(reason: str) -> None:
    status = 503 if reason in STATUS_503 else 429
    error = refusal_error(Reject("r", status, reason, 4, 3, 2.5), request(1, 1), "m")
    assert isinstance(error, Overloaded)
    assert (error.status, error.reason, error.retry_after_s) == (status, reason, 2.5)
    assert (error.measured, error.threshold, error.should_retry) == (4, 3, True)
    assert f"refused the request: {reason}" not in error.message
    if status == 429:
        assert "4" in error.message
        assert "Retry after the given time." in error.message
        if reason not in ("deadline_past", "gives_way"):  # compared with nothing
            assert "3" in error.message


def test_a_refusal_that_a_retry_cannot_mend_says_so() -> None:
    never = refusal_error(Reject("r", 429, "tokens_per_minute", 900, 500, None), request(1, 1), "m")
    assert "again unchanged cannot help" in str(never)
    far = Reject("r", 429, "queue_full", 4, 3, 120.0, should_retry=False)
    error = refusal_error(far, request(1, 1), "m")
    assert isinstance(error, Overloaded)
    assert not error.should_retry
    assert "longer than a client should wait" in error.message


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("deadline_past", "unchanged cannot help"),
        ("deadline_infeasible", "late with nothing else to serve"),
        ("predicted_late", "late with nothing else to serve"),
        ("queue_full", "When to come back cannot be told."),
    ],
)
def test_that_nothing_helps_is_said_only_where_it_is_so(reason: str, words: str) -> None:
    told = str(refusal_error(Reject("r", 429, reason, 4, 3, None), request(1, 1), "m"))
    assert words in told
    assert ("cannot help" in told) == ("cannot help" in words)


def _late(measured_s: float, threshold_s: float) -> str:
    reject = Reject("r", 429, "predicted_late", measured_s, threshold_s, 3.0)
    return str(refusal_error(reject, request(1, 1), "m"))


def test_times_are_told_in_a_unit_that_fits() -> None:
    far = [_late(measured, 1.0) for measured in (1.04, 1.0004, 1.000000004)]
    assert ["predicted 1.04 s after" in far[0], "class is 1.00 s" in far[0]] == [True, True]
    assert "predicted 1.0004 s after" in far[1]
    assert "predicted 1.000000004 s after" in far[2]
    assert "predicted 999.64 ms after" in _late(0.99964, 0.99961)
    late = Reject("r", 429, "predicted_late", 1.26, 0.5, 3.0)
    message = str(refusal_error(late, request(1, 1), "m"))
    assert "predicted 1.3 s after" in message
    assert "class is 500 ms" in message


def test_who_is_not_held_is_told_how_long_a_start_takes_and_what_is_held() -> None:
    late = refusal_error(Reject("r", 503, "not_held", 90, 60, 95), request(1, 1), "m")
    assert "ready in 90.0 s" in late.message
    assert "held for 60.0 s at most (autoscale.hold_max)" in late.message
    full = refusal_error(Reject("r", 503, "held_full", 65, 64, 20), request(1, 1), "m")
    assert "65 places would wait for it" in full.message
    assert "64 may (autoscale.hold_requests_max)" in full.message
