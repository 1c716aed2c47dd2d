"""One timer for all that is to be looked at every so often."""

import asyncio

from sluice.server.rounds import Rounds
from tests.cluster.rig import in_virtual_time


def test_each_is_looked_at_once_so_long_after_it_joined():
    seen: list[tuple[str, float]] = []

    async def work() -> None:
        rounds, loop = Rounds(), asyncio.get_running_loop()
        began_s = loop.time()

        def note(name: str) -> None:
            seen.append((name, round(loop.time() - began_s, 6)))

        rounds.join(lambda: note("first"), 2.0)
        await asyncio.sleep(0.5)
        rounds.join(lambda: note("second"), 2.0)
        await asyncio.sleep(10)
        rounds.join(lambda: note("third"), 2.0)
        await asyncio.sleep(10)

    in_virtual_time(work)
    assert seen == [("first", 2.0), ("second", 2.5), ("third", 12.5)]


def test_one_that_left_is_not_looked_at():
    seen: list[str] = []

    async def work() -> None:
        rounds = Rounds()

        def gone() -> None:
            seen.append("gone")

        rounds.join(gone, 1.0)
        rounds.join(lambda: seen.append("here"), 1.0)
        rounds.leave(gone)
        rounds.leave(gone)
        await asyncio.sleep(5)

    in_virtual_time(work)
    assert seen == ["here"]


def test_one_may_join_again_when_it_is_looked_at():
    seen: list[float] = []

    async def work() -> None:
        rounds, loop = Rounds(), asyncio.get_running_loop()
        began_s = loop.time()

        def again() -> None:
            seen.append(round(loop.time() - began_s, 6))
            if len(seen) < 3:
                rounds.join(again, 1.5)

        rounds.join(again, 1.5)
        await asyncio.sleep(20)

    in_virtual_time(work)
    assert seen == [1.5, 3.0, 4.5]


def test_one_that_joins_again_delays_nobody_who_waits():
    seen: list[tuple[str, float]] = []

    async def work() -> None:
        rounds, loop = Rounds(), asyncio.get_running_loop()
        began_s = loop.time()

        def again() -> None:
            seen.append(("again", round(loop.time() - began_s, 6)))
            if len(seen) < 4:
                rounds.join(again, 2.0)

        rounds.join(again, 2.0)
        await asyncio.sleep(1.0)
        rounds.join(lambda: seen.append(("other", round(loop.time() - began_s, 6))), 2.0)
        await asyncio.sleep(20)

    in_virtual_time(work)
    assert seen[:3] == [("again", 2.0), ("other", 3.0), ("again", 4.0)]


def test_one_that_fails_is_told_and_the_others_are_looked_at():
    seen: list[object] = []

    async def work() -> None:
        rounds, loop = Rounds(), asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: seen.append(type(told["exception"])))

        def fails() -> None:
            raise LookupError

        rounds.join(fails, 1.0)
        rounds.join(lambda: seen.append("other"), 1.0)
        await asyncio.sleep(5)

    in_virtual_time(work)
    assert seen == [LookupError, "other"]
