"""Speeds come from reports, else from completed requests; lengths from completed requests."""

import pytest

from sluice.core.events import Ended
from sluice.core.lengths import HISTORY_MIN
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.core.service import OUTPUT_TOKENS_UNKNOWN, ServiceTimes
from tests.core.fleet_rig import report, seconds

ASKED = Request("r", 0, (1,) * 100, 400)


def completed(service: ServiceTimes, tokens: int, *, tpot_s: float = 0.1, choices: int = 1) -> None:
    usage = Usage(100, 20, tokens * choices)
    phases = PhaseTimes(prefill_ns=seconds(0.8), decode_ns=seconds(tpot_s * tokens))
    request = Request("r", 0, (1,) * 100, 400, choices)
    service.completed(Ended("r", EndReason.STOP, usage, phases), request)


def test_reports_say_how_fast_a_replica_is_now() -> None:
    service = ServiceTimes()
    completed(service, 10)
    told = report(step_ns=seconds(0.05), prefill_tokens_per_s=200.0)
    assert service.token_ns(told) == seconds(0.05)
    assert service.prefill_ns(100, told) == seconds(0.5)


def test_completed_requests_say_it_where_reports_do_not() -> None:
    service = ServiceTimes()
    completed(service, 10)
    silent = report(step_ns=0, prefill_tokens_per_s=0.0)
    for told in (None, silent):
        assert service.token_ns(told) == seconds(0.1)
        assert service.prefill_ns(100, told) == seconds(1)
        assert service.mean_ns(told) == seconds(0.8 + 1.0)


def test_cached_tokens_and_further_choices_are_not_counted_as_work_of_their_own() -> None:
    service = ServiceTimes()
    completed(service, 10, choices=3)
    assert service.mean_prefill_tokens == 80
    assert service.mean_output_tokens == 10


def test_what_is_asked_for_stands_in_until_something_completed() -> None:
    service = ServiceTimes()
    assert service.mean_output_tokens == OUTPUT_TOKENS_UNKNOWN
    service.asked(Request("r", 0, (1,), 30))
    assert service.mean_output_tokens == 30
    completed(service, 10)
    assert service.mean_output_tokens == 10


def test_lengths_are_conditional_on_what_was_produced() -> None:
    service = ServiceTimes()
    completed(service, 20)
    assert service.output_tokens(ASKED, 5, 0.5) == 15
    assert service.output_tokens(ASKED, 25, 0.5) == 25
    for number in range(2 * HISTORY_MIN):
        completed(service, 50 + number)
    assert service.output_tokens(ASKED, 0, 0.5) == pytest.approx(100, abs=3)
    assert service.output_tokens(ASKED, 100, 0.5) == pytest.approx(25, abs=3)
    assert service.output_tokens(ASKED, 0, 0.95) > service.output_tokens(ASKED, 0, 0.5)
    assert service.output_tokens(Request("r", 0, (1,), 60), 0, 0.95) == 60


def test_an_answer_longer_than_any_before_is_not_taken_to_be_about_to_end() -> None:
    service = ServiceTimes()
    for _ in range(2 * HISTORY_MIN):
        completed(service, 20)
    assert service.output_tokens(ASKED, 10, 0.5) == 10
    assert service.output_tokens(ASKED, 60, 0.01) == 60
    assert service.output_tokens(ASKED, 390, 0.5) == 10
    assert service.output_tokens(ASKED, 400, 0.5) == 1


def test_the_fastest_prefill_seen_says_what_could_never_be_on_time() -> None:
    service = ServiceTimes()
    assert service.least_prefill_ns(100) is None
    service.reported(report(prefill_tokens_per_s=1000.0))
    service.reported(report(prefill_tokens_per_s=100.0))
    assert service.least_prefill_ns(100) == pytest.approx(seconds(0.1), rel=1e-3)


def test_a_replica_that_got_slower_for_good_is_believed_in_the_end() -> None:
    service = ServiceTimes()
    service.reported(report(prefill_tokens_per_s=1000.0, step_ns=10))
    for _ in range(30_000):
        service.reported(report(prefill_tokens_per_s=100.0, step_ns=40))
    assert service.least_prefill_ns(100) == pytest.approx(seconds(1.0), rel=1e-3)
    assert service.least_token_ns() == 40
