"""Limits of tenants: exact buckets, reservations that come back, refusals that use up nothing."""

from copy import deepcopy
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.limits import TenantLimits
from sluice.core.request import Request, Usage
from sluice.core.tenants import (
    HELD_NS_UNKNOWN,
    MINUTE_NS,
    TenantLedger,
)

S = NS_PER_S


def request(name, *, tenant="t", prompt=10, output=90, choices=1):
    return Request(
        id=str(name),
        arrived_ns=0,
        prompt=(1,) * prompt,
        output_tokens_max=output,
        choices=choices,
        tenant=tenant,
    )


def ledger(**limits):
    return TenantLedger([TenantLimits("t", **limits)])


def take(ledger, wanted, now_ns):
    """As the fleet does it: judge, then reserve."""
    refusal = ledger.refusal(wanted, now_ns)
    if refusal is None:
        ledger.reserve(wanted, now_ns)
    return refusal


def active(ledger):
    return len(ledger._accounts["t"].started_ns)


def state(ledger, now_ns=0):
    return ledger.allowance("t", now_ns), active(ledger)


def test_a_tenant_named_nowhere_has_no_limits():
    books = ledger(requests_per_minute=1)
    for number in range(100):
        assert take(books, request(number, tenant="unknown"), 0) is None
    assert books.allowance("unknown", 0) is None
    assert not books._reserved, "nothing is kept about it"
    books.settle("7", Usage(10, 0, 90), 0)
    books.release("8", 0)


def test_requests_per_minute_are_refused_with_the_time_at_which_one_fits():
    books = ledger(requests_per_minute=3)
    assert [take(books, request(n), 0) for n in range(3)] == [None] * 3
    refusal = take(books, request(3), 0)
    assert (refusal.status, refusal.reason) == (429, "requests_per_minute")
    assert (refusal.measured, refusal.threshold) == (4, 3)
    assert refusal.wait_ns == 20 * S
    assert books.refusal(request(3), 20 * S - 1) is not None
    assert books.refusal(request(3), 20 * S) is None


def test_tokens_are_reserved_whole_and_settled_by_use():
    books = ledger(tokens_per_minute=250)
    assert take(books, request("a"), 0) is None
    assert take(books, request("b"), 0) is None
    refusal = take(books, request("c"), 0)
    assert (refusal.status, refusal.reason) == (429, "tokens_per_minute")
    assert (refusal.measured, refusal.threshold) == (300, 250)
    assert refusal.wait_ns == 50 * MINUTE_NS // 250
    books.settle("a", Usage(prompt_tokens=10, cached_tokens=10, completion_tokens=40), 0)
    assert books.allowance("t", 0).tokens.remaining == 100
    assert take(books, request("c"), 0) is None


def test_choices_are_reserved_each_and_the_prompt_once():
    books = ledger(tokens_per_minute=1_000)
    take(books, request("a", choices=3), 0)
    assert books.allowance("t", 0).tokens.remaining == 1_000 - 10 - 3 * 90


def test_more_tokens_than_a_minute_holds_are_never_worth_asking_for_again():
    refusal = ledger(tokens_per_minute=99).refusal(request("a"), 0)
    assert (refusal.measured, refusal.threshold, refusal.wait_ns) == (100, 99, None)


def test_d08_concurrency_is_refused_only_while_so_many_are_active():
    books = ledger(concurrency=2)
    assert take(books, request("a"), 0) is None
    assert take(books, request("b"), 0) is None
    refusal = take(books, request("c"), 0)
    assert (refusal.status, refusal.reason) == (429, "concurrency")
    assert (refusal.measured, refusal.threshold) == (3, 2)
    assert refusal.wait_ns == HELD_NS_UNKNOWN
    books.settle("a", Usage(10, 0, 0), S)
    assert take(books, request("c"), S) is None


def test_wait_for_concurrency_follows_how_long_requests_are_held():
    books = ledger(concurrency=1)
    now_ns = 0
    for number in range(60):
        take(books, request(number), now_ns)
        now_ns += 8 * S
        books.settle(str(number), Usage(10, 0, 90), now_ns)
    take(books, request("a"), now_ns)
    assert books.refusal(request("b"), now_ns).wait_ns == pytest.approx(8 * S, rel=0.01)
    assert books.refusal(request("b"), now_ns + 6 * S).wait_ns == pytest.approx(2 * S, rel=0.05)
    assert 0 < books.refusal(request("b"), now_ns + 60 * S).wait_ns < S


@pytest.mark.parametrize("reason", ["requests_per_minute", "tokens_per_minute", "concurrency"])
def test_d08_a_refused_request_uses_up_no_other_quota(reason):
    limits = {"requests_per_minute": 50, "tokens_per_minute": 5_000, "concurrency": 50}
    limits[reason] = 100 if reason == "tokens_per_minute" else 1
    books = ledger(**limits)
    assert take(books, request("a"), 0) is None
    before = state(books)
    for number in range(20):
        assert take(books, request(number), 0).reason == reason
    assert state(books) == before


def test_d08_every_way_to_end_returns_the_permit():
    books = ledger(concurrency=2, requests_per_minute=1_000_000)
    for number in range(200):
        assert take(books, request(number), number) is None
        if number % 2:
            books.release(str(number), number)
        else:
            books.settle(str(number), Usage(10, 0, number % 5), number)
        assert active(books) == 0
    assert not books._reserved


def test_a_request_refused_after_waiting_gets_everything_back():
    books = ledger(requests_per_minute=5, tokens_per_minute=500, concurrency=5)
    before = state(books)
    take(books, request("a"), 0)
    assert state(books) != before
    books.release("a", 0)
    assert state(books) == before


def test_an_ending_counts_once():
    books = ledger(requests_per_minute=5, tokens_per_minute=500)
    take(books, request("a"), 0)
    books.settle("a", Usage(10, 0, 90), 0)
    after = state(books)
    books.settle("a", Usage(10, 0, 0), 0)
    books.release("a", 0)
    assert state(books) == after


def test_allowance_tells_limit_remaining_and_time_until_full():
    books = ledger(requests_per_minute=60, tokens_per_minute=6_000)
    take(books, request("a"), 0)
    allowance = books.allowance("t", 0)
    assert (allowance.requests.limit, allowance.requests.remaining) == (60, 59)
    assert allowance.requests.reset_ns == 1 * S
    assert (allowance.tokens.limit, allowance.tokens.remaining) == (6_000, 5_900)
    assert allowance.tokens.reset_ns == 1 * S
    assert books.allowance("t", S).tokens.remaining == 6_000
    assert ledger(concurrency=1).allowance("t", 0) is None


def test_a_clock_that_goes_back_gives_nothing_away():
    books = ledger(requests_per_minute=1)
    take(books, request("a"), 100 * S)
    assert books.allowance("t", 10 * S).requests.reset_ns == MINUTE_NS
    for now_s in (10, 70, 100, 159):
        assert books.refusal(request("b"), now_s * S) is not None
    assert books.refusal(request("b"), 160 * S) is None


def test_nothing_saves_up_beyond_one_minute():
    books = ledger(requests_per_minute=2)
    later_ns = 1_000 * MINUTE_NS
    assert [take(books, request(n), later_ns) is None for n in range(4)] == [
        True,
        True,
        False,
        False,
    ]


events = st.lists(
    st.tuples(
        st.integers(0, 30 * S),
        st.integers(1, 40),
        st.integers(1, 60),
        st.sampled_from(("settle", "release", "keep")),
    ),
    max_size=60,
)


@given(events, st.integers(1, 300))
def test_tokens_used_never_exceed_the_rate_and_one_burst(schedule, limit):
    """Against exact fractions: the level, and the bound that a token bucket promises."""
    books = ledger(tokens_per_minute=limit)
    now_ns, level, used, held = 0, Fraction(limit), 0, 0
    for number, (wait_ns, prompt, output, fate) in enumerate(schedule):
        now_ns += wait_ns
        level = min(Fraction(limit), level + Fraction(limit * wait_ns, MINUTE_NS))
        wanted = request(number, prompt=prompt, output=output)
        refusal = take(books, wanted, now_ns)
        assert (refusal is None) == (prompt + output <= level)
        if refusal is None:
            spent = {"settle": prompt + output // 2, "release": 0, "keep": prompt + output}[fate]
            level -= spent
            if fate == "settle":
                books.settle(wanted.id, Usage(prompt, 0, output // 2), now_ns)
            elif fate == "release":
                books.release(wanted.id, now_ns)
            else:
                held += 1
            used += spent
        elif refusal.wait_ns is not None:
            future = deepcopy(books)
            assert future.refusal(wanted, now_ns + refusal.wait_ns - 1) is not None
            assert future.refusal(wanted, now_ns + refusal.wait_ns) is None
        assert books.allowance("t", now_ns).tokens.remaining == int(level)
        assert used <= limit + limit * now_ns / MINUTE_NS
        assert active(books) == held
