"""The clocks of a live process. Everything else takes time as an argument."""

import time

# Nanoseconds of a clock that never goes back, the same in all processes of this machine.
monotonic_ns = time.monotonic_ns


def sleep_until(at_ns: int) -> None:
    """Return when ``monotonic_ns`` has reached this time, at once where it has."""
    left_ns = at_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


def wall_ns() -> int:
    """Nanoseconds since 1970 (Unix time)."""
    return time.time_ns()


def wall_s() -> float:
    """Seconds since 1970 (Unix time)."""
    return time.time()
