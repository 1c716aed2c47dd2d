"""One timer of the event loop for all exchanges, each of which is looked at every so often.

Used by ``exchange``. A timer of its own for each request, which nearly always ends before it is
due, costs as much as all else that is done to attend it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

Look = Callable[[], None]


class Rounds:
    """Calls each function once, so long after it joined; it may join again then.

    All are expected to wait for as long as the others: one that waits for a shorter time comes
    after those that joined before it.
    """

    def __init__(self) -> None:
        self._due_s: OrderedDict[Look, float] = OrderedDict()  # the next first
        self._timer: asyncio.TimerHandle | None = None

    def join(self, look: Look, wait_s: float) -> None:
        """Call ``look`` after so long, unless it leaves before."""
        loop = asyncio.get_running_loop()
        self._due_s[look] = loop.time() + wait_s
        if self._timer is None:
            self._timer = loop.call_later(wait_s, self._go)

    def leave(self, look: Look) -> None:
        """Do not call it."""
        self._due_s.pop(look, None)

    def _go(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        try:
            while self._due_s:
                look, due_s = next(iter(self._due_s.items()))
                if due_s > now_s:
                    break
                del self._due_s[look]
                look()
        finally:  # one that fails is told by the loop, and the others are looked at all the same
            self._timer = None
            if self._due_s:
                wait_s = next(iter(self._due_s.values())) - now_s
                self._timer = loop.call_later(max(0.0, wait_s), self._go)
