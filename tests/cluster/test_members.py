"""An id is started, warmed and stopped in any order, and never stands for two replicas at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sluice.cluster.members import Members


class Ending:
    """A replica that takes its time to end; ``log`` says what was asked of it and its like."""

    def __init__(self, log: list[str], made: int) -> None:
        self.log, self.name = log, f"r{made}"
        self.may_end = asyncio.Event()

    def start(self) -> None:
        self.log.append(f"{self.name} start")

    def warm(self) -> None:
        self.log.append(f"{self.name} warm")

    async def stop(self) -> None:
        self.log.append(f"{self.name} stop")
        await self.may_end.wait()
        self.log.append(f"{self.name} gone")


def members(work: Callable[[Members, list[str], list[Ending]], Awaitable[None]]) -> None:
    async def main() -> None:
        log: list[str] = []
        made: list[Ending] = []

        def launch(replica_id: str, listener: object) -> Any:
            made.append(Ending(log, len(made)))
            return made[-1]

        known = Members(None)  # type: ignore[arg-type]
        known.know(["r"], launch)
        await work(known, log, made)
        for one in made:
            one.may_end.set()
        await known.close()

    asyncio.run(main())


def test_one_that_is_started_again_while_it_ends_begins_when_it_has_ended():
    async def work(known: Members, log: list[str], made: list[Ending]) -> None:
        known.start("r")
        known.stop("r")
        known.start("r")
        await asyncio.sleep(0)
        assert log == ["r0 start", "r0 stop"]
        assert "r" not in known, "what is said by one that ends is not heard"
        made[0].may_end.set()
        while "r" not in known:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        assert log == ["r0 start", "r0 stop", "r0 gone", "r1 start"]

    members(work)


def test_the_last_wish_of_one_that_still_ends_counts():
    async def work(known: Members, log: list[str], made: list[Ending]) -> None:
        known.stop("r")
        known.start("r")
        known.warm("r")
        known.stop("r")
        made[0].may_end.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert log == ["r0 stop", "r0 gone"]
        known.warm("r")
        assert log[-1] == "r1 warm"

    members(work)


def test_stopping_what_is_not_there_does_nothing():
    async def work(known: Members, log: list[str], made: list[Ending]) -> None:
        known.stop("r")
        known.stop("r")
        known.stop("nobody")
        await asyncio.sleep(0)
        assert log == ["r0 stop"]

    members(work)
