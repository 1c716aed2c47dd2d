"""When refused clients are told to come back, and who of them did.

A ``Retry-After`` comes true only if there is room at that time for everyone who was told it. So a
refusal books a place in the future: told times are spaced by the time between two departures of the
pool, times the share of refused clients that really come back, and none is before the time at which
the queue is predicted to have room. The share is learned from the bookings that were claimed and
from those that lapsed; before there were any, all are taken to come.

Called by ``core/pools.py``, one object for each pool. It decides when, never whether: a newcomer
that can start at once is served, whatever is booked. Who goes ahead of whom, and how expected
clients count against newcomers, is decided there.

A client is recognised by a key of what it asks for. Equal requests have equal keys and one booking
each, up to a bound from which on they are told the last of their times. A client that returns
before its time finds no booking and, refused again, takes another one.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable
from random import Random
from typing import NamedTuple

from sluice.core.admission import NS_PER_S

# Beyond this nothing can be promised: the client is better told not to come back.
AHEAD_NS_MAX = 120 * NS_PER_S
# Bookings kept at a time; a pool with more departures than that within the horizon promises less.
BOOKINGS_MAX = 4_096
# Bookings of one key: a client that asks again and again does not take everybody's places.
SAME_MAX = 8
# A client that returns a little early, by its own clock, is still the one that was told.
EARLY_NS = NS_PER_S // 20
# Retry-After is in whole seconds, rounded up, and the request takes its time to get here.
LATE_NS = 2 * NS_PER_S
# Whose told time is over for longer than this is not expected any more, though it may still come:
# the part of a second by which it was rounded, and a round trip.
OVERDUE_NS = NS_PER_S
# Told times are moved by up to this share of their spacing, so that they make no rhythm.
JITTER_SHARE = 0.5
# All are taken to come back until this many bookings have had an outcome.
PRIOR_OUTCOMES = 8.0
# So many lapses in a row halve the share, whatever came before: a crowd may leave all at once.
LAPSES_HALVE = 2.0
# Weight of the past against one outcome: about 64 outcomes make the memory.
KEPT_SHARE = 1.0 - 1.0 / 64.0
# However few come back, told times stay apart; so small that what is expected of all is nothing.
SHARE_MIN = 0.001


class _Booking(NamedTuple):
    """``slot_ns`` keeps bookings apart, ``at_ns`` is the time that was told."""

    slot_ns: int
    number: int
    at_ns: int
    key: Hashable


class Bookings:
    """The future places of one pool that refused clients were told."""

    def __init__(self) -> None:
        self._booked: list[_Booking] = []  # by slot
        self._by_key: dict[Hashable, list[_Booking]] = {}  # of each key, by slot
        self._numbers = 0
        self._claimed = PRIOR_OUTCOMES
        self._outcomes = PRIOR_OUTCOMES
        self._lapses = 0

    def __len__(self) -> int:
        return len(self._booked)

    @property
    def share(self) -> float:
        """The share of refused clients that come back as told, between ``SHARE_MIN`` and 1."""
        recent = LAPSES_HALVE / (LAPSES_HALVE + self._lapses)
        return max(SHARE_MIN, min(recent, self._claimed / self._outcomes))

    def book(
        self, key: Hashable, earliest_ns: int, spacing_ns: int, now_ns: int, chance: Random
    ) -> int | None:
        """The time at which a refused client is to come back, ``None`` where it is too far away.

        Not before ``earliest_ns``. ``spacing_ns`` is the predicted time between two departures of
        the pool, times the places that the request takes.
        """
        self.expire(now_ns)
        mine = self._by_key.get(key, [])
        if len(mine) >= SAME_MAX:
            return mine[-1].at_ns
        if len(self._booked) >= BOOKINGS_MAX:
            return None
        gap_ns = max(1, round(spacing_ns * self.share))
        slot_ns = self._first_gap(max(earliest_ns, now_ns), gap_ns)
        at_ns = slot_ns + int(gap_ns * JITTER_SHARE * chance.random())
        if at_ns - now_ns > AHEAD_NS_MAX:
            return None
        self._numbers += 1
        booking = _Booking(slot_ns, self._numbers, at_ns, key)
        insort(self._booked, booking)
        insort(self._by_key.setdefault(key, []), booking)
        return at_ns

    def claim(self, key: Hashable, now_ns: int) -> bool:
        """Whether this is a refused client that comes back as told; its booking is used up then."""
        self.expire(now_ns)
        due = self._due(key, now_ns)
        if due is None:
            return False
        self._remove(due)
        self._learn(1.0)
        return True

    def is_due(self, key: Hashable, now_ns: int) -> bool:
        """Whether ``claim`` would find a booking."""
        self.expire(now_ns)
        return self._due(key, now_ns) is not None

    def _due(self, key: Hashable, now_ns: int) -> _Booking | None:
        mine = self._by_key.get(key, ())
        return next((booking for booking in mine if booking.at_ns - EARLY_NS <= now_ns), None)

    def expected(self, now_ns: int, until_ns: int) -> float:
        """How many refused clients are expected to come back until then: bookings times share."""
        self.expire(now_ns)
        since_ns = now_ns - OVERDUE_NS
        past = bisect_right(self._booked, since_ns, key=_slot)
        over = sum(booking.at_ns < since_ns for booking in self._booked[:past])
        return self.share * max(0, bisect_right(self._booked, until_ns, key=_slot) - over)

    def expire(self, now_ns: int) -> None:
        """Forget the clients that did not come back; each lowers the share."""
        while self._booked and self._booked[0].at_ns + LATE_NS < now_ns:
            self._remove(self._booked[0])
            self._learn(0.0)

    def _first_gap(self, earliest_ns: int, gap_ns: int) -> int:
        """The first time from ``earliest_ns`` on that is ``gap_ns`` away from every other."""
        slot_ns = earliest_ns
        first = bisect_right(self._booked, earliest_ns - gap_ns, key=_slot)
        for index in range(first, len(self._booked)):
            taken_ns = self._booked[index].slot_ns
            if taken_ns - slot_ns >= gap_ns:
                break
            slot_ns = taken_ns + gap_ns
        return slot_ns

    def _remove(self, booking: _Booking) -> None:
        del self._booked[bisect_left(self._booked, booking[:2], key=_order)]
        same = self._by_key[booking.key]
        same.remove(booking)
        if not same:
            del self._by_key[booking.key]

    def _learn(self, came: float) -> None:
        self._claimed = KEPT_SHARE * self._claimed + came
        self._outcomes = KEPT_SHARE * self._outcomes + 1.0
        self._lapses = 0 if came else self._lapses + 1


def _slot(booking: _Booking) -> int:
    return booking.slot_ns


def _order(booking: _Booking) -> tuple[int, int]:
    return booking[:2]
