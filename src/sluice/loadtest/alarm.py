"""A timer of the kernel that an event loop can wait for, exact to some microseconds.

The timers of event loops have steps of a millisecond, which is as much as a load generator may be
late altogether. Linux only.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """Calls ``ring`` on the loop once at the time that was last set, in monotonic nanoseconds.

    A loop that has many answers to read in one turn comes to the timer after them. Whoever reads
    answers calls ``look`` with the time that it has taken anyway, so that the alarm does not wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._loop, self._ring = loop, ring
        self._at_ns: int | None = None
        loop.add_reader(self._fd, self._rings)

    def set(self, at_ns: int) -> None:
        """Ring at this time, or at once where it is over."""
        self._at_ns = at_ns
        seconds, nanoseconds = divmod(max(at_ns, 1), _NS)
        when = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(when), None)

    def look(self, now_ns: int) -> None:
        """Ring now where it is time."""
        if self._at_ns is not None and now_ns >= self._at_ns:
            self._due()

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _rings(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set anew meanwhile
        if self._at_ns is not None:  # else it has rung in ``look``
            self._due()

    def _due(self) -> None:
        self._at_ns = None
        self._ring()
