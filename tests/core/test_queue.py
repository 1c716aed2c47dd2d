"""Who waits goes by tier, share, promise, due time and arrival, and no tier waits for ever."""

from random import Random

import pytest

from sluice.core.accepted import Accepted, Order, Work
from sluice.core.fairness import FairShares
from sluice.core.queue import Queue
from sluice.core.request import Request

S = 1_000_000_000


def waiting(
    name: str,
    number: int,
    *,
    tier: int = 1,
    tenant: str = "",
    newcomer: bool = True,
    due_s: float = 1,
    accepted_s: float = 0,
) -> Accepted:
    request = Request(name, 0, (1,) * 10, 5, tier=tier, tenant=tenant, body_bytes=100)
    return Accepted(
        request=request,
        model="m",
        number=number,
        order=Order(tier, newcomer, round(due_s * S), number),
        work=Work(1, 10, 5, 1),
        chain=(),
        cached={},
        accepted_ns=round(accepted_s * S),
        ttft_due_ns=None,
        due_ns=60 * S,
    )


def queue_of(*accepted: Accepted) -> Queue:
    queue = Queue()
    for one in accepted:
        queue.add(one)
    return queue


def names(queue: Queue, shares: FairShares | None = None) -> list[str]:
    return [accepted.request.id for accepted in queue.in_order(shares or FairShares())]


def served(queue: Queue, turns: int, *, aging_ns: int | None, gap_ns: int = S) -> list[str]:
    """Those that go next, one every gap from 0 on."""
    order = []
    for turn in range(turns):
        head = queue.head(
            FairShares(), turn * gap_ns, lambda: gap_ns, aging_ns=aging_ns, strictest=9
        )
        queue.took_turn(head)
        queue.remove(head)
        order.append(head.request.id)
    return order


def test_the_order_is_tier_then_promise_then_due_time_then_arrival() -> None:
    queue = queue_of(
        waiting("late", 1, due_s=2),
        waiting("second", 3),
        waiting("first", 2),
        waiting("strict", 4, tier=0, due_s=9),
        waiting("back", 5, newcomer=False, due_s=8),
    )
    assert names(queue) == ["strict", "back", "first", "second", "late"]


def test_tenants_ahead_of_their_share_go_after_the_others_of_their_tier() -> None:
    shares = FairShares()
    shares.enter("heavy", 1.0)
    shares.enter("light", 1.0)
    shares.charge("heavy", 100_000)
    queue = queue_of(
        waiting("heavy", 1, tenant="heavy", due_s=0),
        waiting("back", 2, tenant="heavy", newcomer=False),
        waiting("light", 3, tenant="light"),
        waiting("low", 4, tenant="light", tier=2),
    )
    assert names(queue, shares) == ["light", "back", "heavy", "low"]


def test_a_waiting_tier_that_would_wait_too_long_gets_every_second_turn() -> None:
    high = [waiting(f"h{n}", n, tier=0) for n in range(9)]
    low = [waiting(f"l{n}", 10 + n, tier=5) for n in range(4)]
    order = served(queue_of(*high, *low), 8, aging_ns=4 * S)
    assert order == ["h0", "l0", "h1", "l1", "h2", "l2", "h3", "l3"]
    assert served(queue_of(*high, *low), 9, aging_ns=None) == [f"h{n}" for n in range(9)]


def test_aging_is_looked_at_before_it_is_too_late() -> None:
    """The last of four needs eight turns of every second one: the first may not wait until 9 s."""
    high = [waiting(f"h{n}", n, tier=0) for n in range(30)]
    low = [waiting(f"l{n}", 50 + n, tier=5) for n in range(4)]
    order = served(queue_of(*high, *low), 20, aging_ns=10 * S)
    assert order.index("l0") > 1
    assert order.index("l3") <= 11


def test_a_strict_request_that_comes_alone_is_not_passed_by_an_aged_one() -> None:
    low = [waiting(f"l{n}", n, tier=5) for n in range(10)]
    queue = queue_of(*low)
    served(queue, 3, aging_ns=S)
    queue.add(waiting("high", 99, tier=0))
    assert served(queue, 2, aging_ns=S) == ["high", "l3"]


@pytest.mark.parametrize("seed", range(5))
def test_counts_follow_whoever_comes_and_goes(seed: int) -> None:
    chance, queue, inside = Random(seed), Queue(), list[Accepted]()
    for number in range(400):
        if inside and chance.random() < 0.5:
            queue.remove(inside.pop(chance.randrange(len(inside))))
        else:
            inside.append(waiting(f"r{number}", number, tenant=str(number % 3)))
            queue.add(inside[-1])
        count = len(inside)
        assert (len(queue), queue.places, queue.tokens, queue.bytes) == (
            count,
            count,
            10 * count,
            100 * count,
        )
    assert sorted(names(queue)) == sorted(accepted.request.id for accepted in inside)


def test_the_longest_wait_is_known_for_each_tier() -> None:
    queue = queue_of(
        waiting("a", 1, accepted_s=5), waiting("b", 2, accepted_s=2), waiting("c", 3, tier=4)
    )
    assert queue.longest_wait_ns(10 * S) == ((1, 8 * S), (4, 10 * S))


def test_waits_that_ran_out_are_named_in_queue_order() -> None:
    soon, later = waiting("soon", 2), waiting("later", 1)
    soon.due_ns = later.due_ns = 3 * S
    queue = queue_of(soon, later, waiting("rest", 3))
    assert queue.next_due_ns() == 3 * S
    assert [accepted.request.id for accepted in queue.overdue(3 * S)] == ["later", "soon"]
    assert queue.overdue(3 * S - 1) == []
