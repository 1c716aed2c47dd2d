"""One timer for many deadlines that nearly all pass unneeded.

Used by ``remote.py`` for the answers of one engine and by ``cluster/remote.py`` for the calls that
it was given. To make a timer of the event loop and to cancel it costs more than anything else that
a deadline needs, so there is one, for the earliest of them. Whose deadline it was, and whether that
still stands, is looked up when the time has come.
"""

import asyncio
from collections.abc import Callable


class Lookout:
    """Calls ``look`` with the loop's time, in seconds, at the earliest time that was asked for.

    ``look`` does what is due and gives the next time, ``None`` for none.
    """

    def __init__(self, look: Callable[[float], float | None]) -> None:
        self._look = look
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def by(self, at_s: float) -> None:
        """Look at this time, if not before."""
        if self._timer is None or at_s < self._at_s:
            self.stop()
            self._at_s = at_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._due)

    def stop(self) -> None:
        """Look no more, until asked again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        next_s = self._look(asyncio.get_running_loop().time())
        if next_s is not None:
            self.by(next_s)
