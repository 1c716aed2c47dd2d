"""The clocks of a live process. Everything else takes time as an argument."""

import time


def monotonic_ns() -> int:
    """Nanoseconds of a clock that never goes back, the same in all processes of this machine."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since 1970 (Unix time)."""
    return time.time_ns()


def wall_s() -> float:
    """Seconds since 1970 (Unix time)."""
    return time.time()
