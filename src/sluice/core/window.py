"""How many requests a remote replica is given at a time, so that they wait here and not in it.

One per remote replica, asked and told by ``core/fleet_replica.py``. Additive increase,
multiplicative decrease (Chiu and Jain 1989; slow start as in Jacobson 1988): the window grows while
it is in full use and the engine keeps up, and shrinks when its own gauge says that more than
``WAITING_MAX`` wait in it, when it refuses, or when first tokens come much later than predicted.

Predictions may be wrong for good, and gauges may stop. So lateness counts against what is usual for
this replica, and an old gauge halves the window at most: it never closes, and goes on to move by
first tokens.
"""

from sluice.core.admission import NS_PER_S

# So few waiting keep an engine busy between two of our answers; more of them only wait.
WAITING_MAX = 2
# Requests that a replica gets before anything is known of it.
FIRST = 8
CUT = 0.7
# No second cut before the effect of the first can be seen.
CUT_NS = NS_PER_S
# By this part of itself the window grows when its gauge says that none waits in a full engine: its
# word counts more than a guess from first tokens, and comes but once in a while.
GROWTH = 0.25
# Gauges older than this are old.
GAUGE_NS_MAX = 5 * NS_PER_S
# First tokens are late where they take so many times what is usual here.
LATE = 2.0
# Weight of one first token in what is so at this moment and in what is usual.
QUICK, SLOW = 1 / 8, 1 / 64
# Shorter predictions count as so long: of what is over at once the ratio says nothing.
PREDICTED_NS_MIN = NS_PER_S // 20


class Window:
    """The window of one replica, from 1 to ``places_max``."""

    def __init__(self, places_max: int) -> None:
        self._most = float(places_max)
        self._size = min(self._most, float(FIRST))
        self._grows_fast = True
        self._cut_ns: int | None = None
        self._gauged_ns: int | None = None
        self._waiting = 0.0
        self._late_now = self._late_usual = 1.0

    def places(self, now_ns: int) -> int:
        """The requests that may be there at a time."""
        return max(1, int(self._size / 2 if self._is_blind(now_ns) else self._size))

    def gauged(self, waiting: float, places: int, now_ns: int) -> None:
        """Its gauge says that so many wait in it, with ``places`` of ours on board."""
        self._gauged_ns, self._waiting = now_ns, waiting
        excess = waiting - WAITING_MAX
        if excess > 0:
            self._cut(places - excess, now_ns)
        elif waiting < 1 and self._in_use(places, now_ns):
            self._grow(max(1.0, self._size * GROWTH))

    def first_token(self, predicted_ns: int, taken_ns: int, places: int, now_ns: int) -> None:
        """A request got its first token, ``taken_ns`` after it was sent."""
        late = max(1.0, taken_ns / max(PREDICTED_NS_MIN, predicted_ns))
        self._late_now += QUICK * (late - self._late_now)
        if self._late_now > LATE * self._late_usual and not self._has_room(now_ns):
            if self._cut_ns is None or now_ns - taken_ns >= self._cut_ns:
                self._cut(0.0, now_ns)
        elif self._keeps_up(now_ns) and self._in_use(places, now_ns):
            self._advance()
        self._late_usual += SLOW * (late - self._late_usual)

    def usual_ns(self, predicted_ns: int) -> float:
        """Time to a first token as it has been, where that is predicted; 0 for not known."""
        late = max(self._late_now, self._late_usual)
        return late * max(PREDICTED_NS_MIN, predicted_ns or NS_PER_S)

    def whole(self, places: int, now_ns: int) -> None:
        """A request got all of its answer at once: when its first token came nobody knows."""
        if self._keeps_up(now_ns) and self._in_use(places, now_ns):
            self._advance()

    def refused(self, places: int, now_ns: int) -> None:
        """It takes no more than the ``places`` that it has."""
        self._cut(min(float(places), self._size * CUT), now_ns)

    def _is_blind(self, now_ns: int) -> bool:
        """Whether it had a gauge, and has none that is young."""
        return self._gauged_ns is not None and now_ns - self._gauged_ns > GAUGE_NS_MAX

    def _has_room(self, now_ns: int) -> bool:
        """Whether its gauge says that none waits in it: what is late then is late elsewhere."""
        told = self._gauged_ns is not None and not self._is_blind(now_ns)
        return told and self._waiting < 1

    def _keeps_up(self, now_ns: int) -> bool:
        return self._waiting <= WAITING_MAX or self._is_blind(now_ns)

    def _in_use(self, places: int, now_ns: int) -> bool:
        return places >= self.places(now_ns)

    def _advance(self) -> None:
        self._grow(1.0 if self._grows_fast else 1.0 / self._size)

    def _grow(self, step: float) -> None:
        self._size = min(self._most, self._size + step)

    def _cut(self, known: float, now_ns: int) -> None:
        """Make it smaller, by no more than it takes to come down to ``known``."""
        if self._cut_ns is not None and now_ns - self._cut_ns < CUT_NS:
            return
        self._cut_ns = now_ns
        self._grows_fast = False
        self._size = max(1.0, self._size * CUT, min(self._size, known))
