"""One timer for many deadlines: the earliest counts, and what is left is looked at again."""

import asyncio

from sluice.executors.lookout import Lookout
from tests.executors.stream_rig import run

SOON_S, LATER_S = 0.02, 600.0


async def passed(at_s: float) -> None:
    """Wait until a further lookout has looked at this time."""
    looked = asyncio.Event()

    def look(_now_s: float) -> None:
        looked.set()

    Lookout(look).by(at_s)
    async with asyncio.timeout(5):
        await looked.wait()


def test_it_looks_by_the_earliest_time_whenever_that_was_asked_for():
    async def test() -> None:
        looks: list[float] = []
        now_s = asyncio.get_running_loop().time()
        lookout = Lookout(looks.append)
        for at_s in (now_s + LATER_S, now_s, now_s + 2 * LATER_S):
            lookout.by(at_s)
        await passed(now_s + SOON_S)
        assert len(looks) == 1

    run(test)


def test_it_looks_again_when_it_is_told_to():
    async def test() -> None:
        looks: list[float] = []

        def look(now_s: float) -> float | None:
            looks.append(now_s)
            return now_s if len(looks) < 3 else None

        now_s = asyncio.get_running_loop().time()
        Lookout(look).by(now_s)
        await passed(now_s + SOON_S)
        assert len(looks) == 3

    run(test)


def test_it_does_not_look_once_it_was_stopped():
    async def test() -> None:
        looks: list[float] = []
        now_s = asyncio.get_running_loop().time()
        lookout = Lookout(looks.append)
        lookout.by(now_s)
        lookout.stop()
        await passed(now_s + SOON_S)
        assert not looks

    run(test)
