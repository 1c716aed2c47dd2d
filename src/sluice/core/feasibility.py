"""When each of those who wait will start, have its first token and be done, as things stand.

A sweep over the future of a pool: places and KV blocks that are free, those that come free as
running requests end, and the prefill that stands before a first token, given to the waiting in
their service order. Pure arithmetic over what ``core/pools.py`` hands in; nothing here knows about
targets, refuses anyone or changes the fleet.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from sluice.core.accepted import Rank, Work


class Release(NamedTuple):
    """Places and blocks that come free when a running request ends."""

    at_ns: int
    places: int
    blocks: int


class Pace(NamedTuple):
    """Time per prompt token of one prompt, and per output token of every sequence."""

    prefill_ns: float
    token_ns: int


class Outlook(NamedTuple):
    """Predicted times of one request, without any margin."""

    start_ns: int
    first_ns: int
    end_ns: int


class Track:
    """The future of one replica, changed as work is placed on it.

    ``backlog`` holds the prefill that stands before a first token there, as (rank, ns) pairs: a
    request waits for that of its own and of smaller ranks.
    """

    __slots__ = ("_backlog", "_blocks", "_next", "_now_ns", "_places", "_prefill_ns", "_releases",
                 "_token_ns", "_until_ns", "clock_ns")  # fmt: skip

    def __init__(
        self,
        now_ns: int,
        *,
        places: int,
        blocks: int,
        releases: Sequence[Release],
        backlog: Iterable[tuple[Rank, int]],
        pace: Pace,
    ) -> None:
        self.clock_ns = now_ns
        self._now_ns = now_ns
        self._places = places
        self._blocks = blocks
        self._releases = list(releases)
        self._next = 0
        self._backlog = tuple(backlog)
        self._prefill_ns, self._token_ns = pace
        self._until_ns = now_ns

    @property
    def next_ns(self) -> int:
        """When it can take another request of one place, if its blocks suffice."""
        if self._places > 0 or self._next == len(self._releases):
            return self.clock_ns
        return max(self.clock_ns, self._releases[self._next].at_ns)

    def place(self, work: Work, rank: Rank) -> Outlook:
        """Give the work to this replica, as soon as it has the places and blocks for it."""
        releases, last = self._releases, len(self._releases)
        while (self._places < work.places or self._blocks < work.blocks) and self._next < last:
            at_ns, places, blocks = releases[self._next]
            self._next += 1
            self.clock_ns = max(self.clock_ns, at_ns)
            self._places += places
            self._blocks += blocks
        start_ns = self.clock_ns
        ahead_ns = sum(ns for other, ns in self._backlog if other <= rank)
        free_ns = max(start_ns, self._until_ns, self._now_ns + ahead_ns)
        self._until_ns = free_ns + round(work.prefill_tokens * self._prefill_ns)
        first_ns = self._until_ns + self._token_ns
        end_ns = first_ns + (work.output_tokens - 1) * self._token_ns
        self._places -= work.places
        self._blocks -= work.blocks
        insort(releases, Release(end_ns, work.places, work.blocks), lo=self._next)
        return Outlook(start_ns, first_ns, end_ns)

    def keep(self) -> None:
        """Take one place away for good."""
        if self._places <= 0 and self._next < len(self._releases):
            at_ns, places, blocks = self._releases[self._next]
            self._next += 1
            self.clock_ns = max(self.clock_ns, at_ns)
            self._places += places
            self._blocks += blocks
        self._places -= 1


class Sweep:
    """The future of a pool, used up request by request in service order.

    Raises ``IndexError`` where there is no replica.
    """

    def __init__(self, tracks: Sequence[Track]) -> None:
        self._heap = [(track.next_ns, number, track) for number, track in enumerate(tracks)]
        heapify(self._heap)

    def place(self, work: Work, rank: Rank) -> Outlook:
        """What becomes of the next request: it goes where a place is free first."""
        _, number, track = self._heap[0]
        outlook = track.place(work, rank)
        heapreplace(self._heap, (track.next_ns, number, track))
        return outlook

    def keep(self, places: int) -> None:
        """Keep places free of the requests that follow."""
        for _ in range(places):
            _, number, track = self._heap[0]
            track.keep()
            heapreplace(self._heap, (track.next_ns, number, track))
