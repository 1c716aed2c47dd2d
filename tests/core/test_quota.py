"""A vendor's quota: what its answers say is left is not overrun."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.quota import Left, QuotaLeft, VendorQuota


def quota(*, requests: Left | None = None, tokens: Left | None = None, sent_ns: int = 0):
    known = VendorQuota()
    known.began("told", 0, sent_ns)
    known.told(QuotaLeft(requests, tokens), "told", sent_ns)
    return known


def test_what_nobody_told_holds_nothing_back():
    known = VendorQuota()
    for _ in range(5000):
        known.began("r", 10**9, 0)
    assert known.wait_ns(10**9, 0) == 0


def test_what_is_left_is_sent_and_then_only_what_fills_in():
    known = quota(requests=Left(60, 2, 58 * NS_PER_S))
    for _ in range(2):
        assert known.wait_ns(1, 0) == 0
        known.began("r", 1, 0)
    assert known.wait_ns(1, 0) == pytest.approx(NS_PER_S, rel=1e-6)
    assert known.wait_ns(1, NS_PER_S + 1) == 0


def test_tokens_bound_too():
    known = quota(tokens=Left(1000, 100, 90 * NS_PER_S))
    assert known.wait_ns(100, 0) == 0
    assert known.wait_ns(300, 0) == pytest.approx(20 * NS_PER_S, rel=1e-6)


def test_a_request_over_the_whole_limit_goes_when_the_bucket_is_full():
    known = quota(tokens=Left(1000, 500, 30 * NS_PER_S))
    assert known.wait_ns(5000, 0) == pytest.approx(30 * NS_PER_S, rel=1e-6)
    assert known.wait_ns(5000, 30 * NS_PER_S + 1) == 0


def test_what_was_sent_after_the_request_that_is_answered_is_taken_off():
    known = VendorQuota()
    for second in range(3):
        known.began(str(second), 10, second * NS_PER_S)
    known.told(QuotaLeft(requests=Left(60, 2, 58 * NS_PER_S)), "0", 0)
    # Two were sent after the one at 0 s, and two filled in since.
    assert known.wait_ns(1, 2 * NS_PER_S) == 0
    known.began("r", 10, 2 * NS_PER_S)
    known.began("r", 10, 2 * NS_PER_S)
    assert known.wait_ns(1, 2 * NS_PER_S) > 0


def test_answers_to_earlier_requests_are_old_news():
    known = VendorQuota()
    known.began("earlier", 1, 0)
    known.began("later", 1, NS_PER_S)
    known.told(QuotaLeft(requests=Left(60, 0, 60 * NS_PER_S)), "later", NS_PER_S)
    known.told(QuotaLeft(requests=Left(60, 60, 0)), "earlier", NS_PER_S)
    assert known.wait_ns(1, NS_PER_S) > 0


def test_an_answer_that_says_nothing_changes_nothing():
    known = quota(requests=Left(60, 0, 60 * NS_PER_S))
    known.began("r", 0, 0)
    known.told(QuotaLeft(), "r", NS_PER_S)
    assert known.wait_ns(1, 0) == pytest.approx(2 * NS_PER_S, rel=1e-6)


def test_a_rest_that_was_asked_for_is_kept_and_the_longest_counts():
    known = VendorQuota()
    known.rest(20 * NS_PER_S, 0)
    known.rest(3 * NS_PER_S, NS_PER_S)
    assert known.wait_ns(1, 5 * NS_PER_S) == 15 * NS_PER_S
    assert known.wait_ns(1, 20 * NS_PER_S) == 0


def test_of_requests_that_are_sent_at_once_each_is_counted():
    known = VendorQuota()
    for name in ("first", "second", "third"):
        known.began(name, 1, 0)
    known.told(QuotaLeft(requests=Left(60, 2, 58 * NS_PER_S)), "first", 0)
    assert known.wait_ns(1, 0) > 0


def test_a_request_that_took_its_time_to_arrive_is_not_taken_for_time_to_fill():
    known = VendorQuota()
    known.began("r", 1, 0)
    known.told(QuotaLeft(requests=Left(60, 0, 60 * NS_PER_S)), "r", NS_PER_S // 5)
    assert known.wait_ns(1, NS_PER_S // 5) == pytest.approx(NS_PER_S, rel=1e-6)


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.integers(0, NS_PER_S), st.integers(0, 3)), max_size=200),
)
def test_a_vendor_that_counts_as_it_says_is_never_overrun(limit, steps):
    """The vendor's bucket refuses where it is empty; answers come up to three requests late."""
    known, level, now_ns, told = VendorQuota(), float(limit), 0, False
    unanswered, names = list[tuple[str, Left]](), list[str]()
    per_ns = limit / (60 * NS_PER_S)
    for gap_ns, late in steps:
        now_ns += gap_ns
        level = min(limit, level + per_ns * gap_ns)
        if known.wait_ns(1, now_ns) == 0:
            name = str(len(names))
            names.append(name)
            known.began(name, 1, now_ns)
            assert level >= 1 - 1e-6 or not told
            level -= level >= 1 - 1e-6
            full_ns = int((limit - int(level)) / per_ns)
            unanswered.append((name, Left(limit, int(level), full_ns)))
        while len(unanswered) > late:
            name, left = unanswered.pop(0)
            known.told(QuotaLeft(requests=left), name, now_ns)
            told = True
    wait_ns = known.wait_ns(1, now_ns)
    assert wait_ns <= 4 * 60 * NS_PER_S
    assert known.wait_ns(1, now_ns + wait_ns) == 0
