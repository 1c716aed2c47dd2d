"""Long calculations that do not need each other, at the same time: each in a process of its own.

For a person who waits for all of them. How far they are is added up.
"""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from sluice.planner.names import NoFleet

T = TypeVar("T")
# Told how much is done, and how much it will be, as far as that is known.
Told = Callable[[int, int], None]


def at_once(works: Sequence[Callable[[Told], T]], told: Told) -> list[T | NoFleet]:
    """What each gives, or why it gives nothing, in their order.

    Works and what they give must be picklable. On one core they are done one after another, in
    this process. Raises ``RuntimeError`` where a process ends without an answer.
    """
    far = [(0, 0)] * len(works)

    def tell(place: int, done: int, total: int) -> None:
        far[place] = done, total
        mean = sum(of for _, of in far) // max(1, sum(of > 0 for _, of in far))
        told(sum(done for done, _ in far), sum(of or mean for _, of in far))

    if len(works) < 2 or (os.cpu_count() or 1) < 2:
        return [_answer(work, partial(tell, place)) for place, work in enumerate(works)]
    return _in_processes(works, tell)


def _answer(work: Callable[[Told], T], told: Told) -> T | NoFleet:
    try:
        return work(told)
    except NoFleet as error:
        return error


def _in_processes(
    works: Sequence[Callable[[Told], T]], tell: Callable[[int, int, int], None]
) -> list[T | NoFleet]:
    context, answers = get_context(), dict[int, T | NoFleet]()
    places: dict[Any, int] = {}
    processes: list[Any] = []
    try:
        for place, work in enumerate(works):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, sending), daemon=True)
            process.start()
            sending.close()
            processes.append(process)
            places[receiving] = place
        while places:
            ready: Any
            for ready in wait(list(places)):
                place = places[ready]
                try:
                    what, found = ready.recv()
                except EOFError:
                    raise RuntimeError("a process ended without an answer") from None
                if what == "far":
                    tell(place, *found)
                    continue
                answers[place] = found
                del places[ready]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return [answers[place] for place in range(len(works))]


def _work(work: Callable[[Told], Any], sending: Connection) -> None:
    """The life of a process: one work, and what comes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    sending.send(("answer", _answer(work, lambda *far: sending.send(("far", far)))))
