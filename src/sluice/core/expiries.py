"""When the requests of one replica are to have ended, and when it must be woken to see to it.

Times alone; ``core/replica.py`` ends the requests. How long one may wait for a replica is timed by
the fleet, before it gets here.
"""

from sluice.core.events import WakeAt
from sluice.core.request import Request


class Expiries:
    """Deadlines of live requests, and the wish to be woken that is outstanding."""

    def __init__(self) -> None:
        self._deadlines_ns: dict[str, int] = {}
        self._wished_ns: int | None = None

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline_ns is not None:
            self._deadlines_ns[request.id] = request.deadline_ns

    def remove(self, request_id: str) -> None:
        """The request ended."""
        self._deadlines_ns.pop(request_id, None)

    def take_overdue(self, now_ns: int) -> list[str]:
        """Requests whose deadline has come, the earliest first; each is named once."""
        overdue = [key for key, at_ns in self._deadlines_ns.items() if at_ns <= now_ns]
        overdue.sort(key=self._deadlines_ns.__getitem__)
        for request_id in overdue:
            del self._deadlines_ns[request_id]
        return overdue

    def wish(self, now_ns: int, *others_ns: int | None) -> list[WakeAt]:
        """Ask for the next deadline or other time to come, unless that wish is outstanding.

        One whose time has come is fulfilled.
        """
        times_ns = [at_ns for at_ns in others_ns if at_ns is not None and at_ns > now_ns]
        if self._deadlines_ns:
            times_ns.append(min(self._deadlines_ns.values()))
        at_ns = min(times_ns, default=None)
        known, self._wished_ns = at_ns == self._wished_ns, at_ns
        return [] if at_ns is None or known else [WakeAt(at_ns)]
