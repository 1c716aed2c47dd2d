"""Any order of events keeps the promises of a fleet whose replicas are engines elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.events import (
    Arrived,
    AttemptFailed,
    Cancelled,
    Dispatch,
    Ended,
    Fail,
    FleetEffect,
    Outcome,
    Progress,
    QuotaTold,
    Reject,
    ReplicaLost,
    ReplicaReady,
    StartReplica,
    Tick,
    WakeAt,
)
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits, RemoteLimits, RetryLimits
from sluice.core.quota import Left, QuotaLeft
from sluice.core.request import EndReason, PhaseTimes, Usage
from tests.core.fleet_rig import Driver, request
from tests.core.test_remote_fleet import WIDE

NAMES = ("a", "b", "c")


class Books:
    """The gateway's view: who lives, where each of them is, and who is to be woken when."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.now_ns = 0
        self.wake_ns: int | None = None
        self.living: set[str] = set()
        self.on_board: dict[str, str] = {}
        self.starting: set[str] = set(NAMES)
        self.serving: set[str] = set()
        self._count = 0

    def handle(self, *events) -> None:
        for event in events:
            if isinstance(event, ReplicaReady):
                self.starting.discard(event.replica_id)
                self.serving.add(event.replica_id)
            for effect in self.fleet.handle(event, self.now_ns):
                self._note(effect)

    def _note(self, effect: FleetEffect) -> None:
        match effect:
            case Dispatch(name, replica_id):
                assert name in self.living
                assert name not in self.on_board
                self.on_board[name] = replica_id
            case Reject(name) | Fail(name):
                self.living.remove(name)
                assert name not in self.on_board
            case WakeAt(at_ns):
                self.wake_ns = at_ns
            case StartReplica(replica_id):
                self.starting.add(replica_id)

    def arrive(self) -> None:
        self._count += 1
        name = f"r{self._count:03d}"
        self.living.add(name)
        made = replace(request(name), arrived_ns=self.now_ns)
        self.handle(Arrived("m", made))

    def end(self, name: str, event) -> None:
        self.living.discard(name)
        self.on_board.pop(name, None)
        self.handle(event)

    def ready(self, replica_id: str) -> None:
        if replica_id in self.starting:
            self.handle(ReplicaReady(replica_id, WIDE))

    def pass_time(self, gap_ns: int) -> None:
        until_ns, turns = self.now_ns + gap_ns, 0
        while self.wake_ns is not None and self.wake_ns <= until_ns:
            turns += 1
            assert turns < 1000, "it asks to be woken for ever"
            self.now_ns, self.wake_ns = max(self.now_ns, self.wake_ns), None
            self.handle(Tick())
        self.now_ns = until_ns

    def step(self, kind: str, number: int, gap_ns: int) -> None:
        """One thing happens, to one of those that it can happen to."""
        if kind == "arrive":
            self.arrive()
        elif kind == "leave":
            self._of(sorted(self.living), number, lambda one: self.end(one, Cancelled(one)))
        elif kind in {"part", "back", "quota"}:
            self._to_replica(kind, NAMES[number % 3], number, gap_ns)
        else:
            happens = partial(self._to_request, kind, number, gap_ns)
            self._of(sorted(self.on_board), number, happens)

    def _of(self, among: list[str], number: int, happens: Callable[[str], None]) -> None:
        if among:
            happens(among[number % len(among)])

    def _to_replica(self, kind: str, replica_id: str, number: int, gap_ns: int) -> None:
        if kind == "part" and replica_id in self.serving:
            self.serving.remove(replica_id)
            self.handle(ReplicaLost(replica_id, "", keeps_board=True))
        elif kind == "back":
            self.ready(replica_id)
        elif kind == "quota":
            told = QuotaLeft(requests=Left(60, number, gap_ns))
            sent = [name for name, at in sorted(self.on_board.items()) if at == replica_id]
            self._of(sent, number, lambda name: self.handle(QuotaTold(replica_id, name, told)))

    def _to_request(self, kind: str, number: int, gap_ns: int, name: str) -> None:
        if kind == "token":
            self.handle(Progress(name, 1))
        elif kind == "end":
            self.finish(name)
        elif kind == "expire":
            late = Ended(name, EndReason.EXPIRED, Usage(1, 0, 0), PhaseTimes(), silent=True)
            self.end(name, late)
        else:
            outcome = Outcome.FAULT if kind == "fault" else Outcome.FULL
            del self.on_board[name]
            self.handle(AttemptFailed(name, outcome, "", gap_ns if number % 2 else None))

    def finish(self, name: str) -> None:
        self.end(name, Ended(name, EndReason.STOP, Usage(1, 0, 1), PhaseTimes()))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "arrive",
                "arrive",
                "token",
                "end",
                "fault",
                "full",
                "leave",
                "part",
                "back",
                "quota",
                "expire",
            ]
        ),
        st.integers(0, 11),
        st.integers(0, 4 * NS_PER_S),
    ),
    max_size=120,
)


@given(STEPS)
def test_every_request_ends_once_and_nothing_is_held_whatever_comes(steps):
    limits = RemoteLimits(retries=RetryLimits(per_request=3))
    driver = Driver(PoolLimits("m", NAMES, remote=limits, queue_wait_ns_max=20 * NS_PER_S))
    fleet = driver.fleet
    books = Books(fleet)
    books.handle(*(ReplicaReady(name, WIDE) for name in NAMES))
    for kind, number, gap_ns in steps:
        books.pass_time(gap_ns)
        books.step(kind, number, gap_ns)
    for name in NAMES:
        books.ready(name)
    for _ in range(400):
        for name in sorted(books.on_board):
            books.finish(name)
        books.pass_time(NS_PER_S)
        if not books.living:
            break
    assert not books.living
    assert fleet.requests == 0
    (pool,) = fleet.pools(books.now_ns)
    assert (pool.waiting, pool.places) == (0, 0)
    assert [(replica.requests, replica.places) for replica in pool.replicas] == [(0, 0)] * 3
