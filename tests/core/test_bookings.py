"""Told times that come true: spaced, claimed by those who were told, learned from the others."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.bookings import (
    AHEAD_NS_MAX,
    BOOKINGS_MAX,
    EARLY_NS,
    JITTER_SHARE,
    LATE_NS,
    OVERDUE_NS,
    SAME_MAX,
    SHARE_MIN,
    Bookings,
)

S = NS_PER_S


def told(bookings: Bookings, *asked) -> int:
    """The time of a booking that is close enough to be made."""
    at_ns = bookings.book(*asked)
    assert at_ns is not None
    return at_ns


@pytest.fixture
def chance():
    return Random(7)


def test_the_first_is_told_the_time_at_which_there_is_room(chance):
    at_ns = told(Bookings(), "a", 5 * S, S, 0, chance)
    assert 5 * S <= at_ns < 5 * S + JITTER_SHARE * S


def test_clients_refused_at_the_same_instant_are_told_times_apart(chance):
    bookings = Bookings()
    times_ns = [told(bookings, key, 5 * S, S, 0, chance) for key in range(50)]
    gaps = [late - early for early, late in pairwise(times_ns)]
    assert min(gaps) >= S * (1 - JITTER_SHARE)
    assert times_ns[-1] <= 5 * S + 50 * S, "and no further apart than the pool departs"


def test_equal_requests_get_a_booking_each(chance):
    bookings = Bookings()
    times_ns = [told(bookings, "same", S, S // 2, 0, chance) for _ in range(3)]
    assert len(set(times_ns)) == 3
    assert [bookings.claim("same", times_ns[-1]) for _ in range(4)] == [True, True, True, False]


def test_a_place_left_free_between_two_bookings_is_given_away(chance):
    bookings = Bookings()
    told(bookings, "far", 60 * S, S, 0, chance)
    assert told(bookings, "near", 2 * S, S, 0, chance) < 3 * S
    assert told(bookings, "next", 2 * S, S, 0, chance) < 4 * S


def test_who_comes_back_as_told_is_recognised_once(chance):
    bookings = Bookings()
    at_ns = told(bookings, "a", S, S, 0, chance)
    assert not bookings.claim("b", at_ns)
    assert bookings.claim("a", at_ns + S)
    assert not bookings.claim("a", at_ns + S)


def test_who_comes_back_too_early_is_a_newcomer(chance):
    bookings = Bookings()
    at_ns = told(bookings, "a", 10 * S, S, 0, chance)
    assert not bookings.claim("a", at_ns - EARLY_NS - 1)
    assert bookings.claim("a", at_ns - EARLY_NS)


def test_who_comes_back_too_late_is_a_newcomer(chance):
    bookings = Bookings()
    at_ns = told(bookings, "a", S, S, 0, chance)
    assert not bookings.claim("a", at_ns + LATE_NS + 1)
    assert len(bookings) == 0


def test_all_are_expected_back_before_anything_was_learned(chance):
    bookings = Bookings()
    for key in range(4):
        told(bookings, key, 10 * S, S, 0, chance)
    assert bookings.share == 1.0
    assert bookings.expected(0, 9 * S) == 0.0
    assert bookings.expected(0, 11 * S) == 2.0
    assert bookings.expected(0, 60 * S) == 4.0


def test_share_is_halved_by_about_as_many_lapses_as_the_prior_weighs(chance):
    bookings = Bookings()
    for key in range(9):
        told(bookings, key, S, S // 100, 0, chance)
    bookings.expire(S * 60)
    told(bookings, "came", 60 * S, S // 100, 60 * S, chance)
    assert bookings.claim("came", 61 * S)
    assert 0.4 < bookings.share < 0.55


def test_a_crowd_that_leaves_all_at_once_is_not_expected_for_long(chance):
    bookings = Bookings()
    for key in range(100):
        assert bookings.claim(key, told(bookings, key, S, S // 100, S, chance) + S // 4)
    assert bookings.share == 1.0
    for key in range(6):
        told(bookings, key, 3 * S, S // 100, 2 * S, chance)
    bookings.expire(60 * S)
    assert bookings.share <= 0.25


def test_who_is_overdue_is_not_expected_any_more_though_it_may_still_come(chance):
    bookings = Bookings()
    at_ns = told(bookings, "a", S, S, 0, chance)
    assert bookings.expected(at_ns + OVERDUE_NS, 60 * S) == 1.0
    assert bookings.expected(at_ns + OVERDUE_NS + 1, 60 * S) == 0.0
    assert bookings.claim("a", at_ns + LATE_NS)


def test_told_times_move_closer_when_few_come_back(chance):
    bookings = Bookings()
    for key in range(200):
        told(bookings, key, S, S // 100, 0, chance)
    bookings.expire(60 * S)
    assert SHARE_MIN <= bookings.share < 0.01
    assert bookings.expected(60 * S, 200 * S) == 0.0
    times_ns = [told(bookings, key, 70 * S, S, 60 * S, chance) for key in range(20)]
    assert times_ns[-1] - times_ns[0] < 20 * S * 0.011
    assert bookings.expected(60 * S, 200 * S) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_share_follows_what_clients_do(seed):
    chance = Random(seed)
    bookings = Bookings()
    now_ns = 0
    for key in range(400):
        told_ns = told(bookings, key, now_ns + S, S, now_ns, chance)
        if chance.random() < 0.4:
            assert bookings.claim(key, told_ns)
        now_ns = told_ns + S
        bookings.expire(now_ns + LATE_NS)
    assert 0.15 < bookings.share < 0.65


def test_nobody_is_told_a_time_too_far_away(chance):
    bookings = Bookings()
    assert bookings.book("a", AHEAD_NS_MAX + S, S, 0, chance) is None
    told = [bookings.book(key, 0, 10 * S, 0, chance) for key in range(20)]
    assert [at_ns is None for at_ns in told].count(False) in (11, 12, 13)
    assert all(at_ns is None or at_ns <= AHEAD_NS_MAX for at_ns in told)


def test_memory_is_bounded_in_a_flood(chance):
    bookings = Bookings()
    for key in range(2 * BOOKINGS_MAX):
        bookings.book(key, S, 1, 0, chance)
    assert len(bookings) == len(bookings._by_key) == BOOKINGS_MAX
    bookings.expire(60 * S)
    assert len(bookings) == len(bookings._by_key) == 0


def test_a_stall_that_made_told_times_sparse_is_not_told_to_those_who_come_after_it(chance):
    bookings = Bookings()
    for key in range(10):
        told(bookings, key, S, 10 * S, 0, chance)
    assert told(bookings, "after", 2 * S, S // 5, S, chance) < 3 * S


calls = st.tuples(
    st.sampled_from(("book", "claim", "wait")),
    st.integers(0, 5),
    st.integers(0, 20 * S),
    st.integers(0, 5 * S),
)


@given(st.lists(calls, max_size=80), st.integers(0, 2**32))
def test_whatever_happens_promises_hold(schedule, seed):
    chance, bookings, now_ns = Random(seed), Bookings(), 0
    pending: list[tuple[object, int]] = []
    for verb, key, ahead_ns, spacing_ns in schedule:
        if verb == "wait":
            now_ns += ahead_ns
            continue
        pending = [(k, at_ns) for k, at_ns in pending if at_ns + LATE_NS >= now_ns]
        if verb == "book":
            at_ns = bookings.book(key, now_ns + ahead_ns, spacing_ns, now_ns, chance)
            if at_ns is not None:
                assert now_ns + ahead_ns <= at_ns <= now_ns + AHEAD_NS_MAX
                pending.append((key, at_ns))
        else:
            due = [entry for entry in pending if entry[0] == key and entry[1] <= now_ns + EARLY_NS]
            claimed = bookings.claim(key, now_ns)
            assert claimed or not due, "one that comes as told is always recognised"
            if due:
                pending.remove(min(due, key=lambda entry: entry[1]))
        assert SHARE_MIN <= bookings.share <= 1.0
        assert len(bookings) >= len(pending) - schedule.count("claim")
        assert bookings.expected(now_ns, now_ns + 200 * S) <= len(bookings)
        assert len(bookings) == sum(len(same) for same in bookings._by_key.values())


def test_a_client_that_asks_again_and_again_does_not_take_everybodys_places(chance):
    bookings = Bookings()
    times = [told(bookings, "same", S, S, n, chance) for n in range(50)]
    assert len(bookings) == SAME_MAX
    assert set(times[SAME_MAX:]) == {times[SAME_MAX - 1]}
    assert told(bookings, "other", S, S, 60, chance) <= times[SAME_MAX - 1] + 2 * S


def test_looking_whether_a_client_is_due_uses_up_nothing(chance):
    bookings = Bookings()
    at_ns = told(bookings, "a", S, S, 0, chance)
    assert not bookings.is_due("a", at_ns - 2 * EARLY_NS)
    assert bookings.is_due("a", at_ns)
    assert bookings.claim("a", at_ns)
    assert not bookings.is_due("a", at_ns)
