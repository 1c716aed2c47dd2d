"""Durations, sizes and addresses as people write them: ``"500ms"``, ``"4GiB"``, ``"[::1]:80"``.

Pure text to number and back, called by the loader, the printer of settings and the server.
A duration always needs its unit, because its setting's name carries none (``ttft = "500ms"``); a
size may be a plain number, because its setting's name says ``bytes``.
"""

import re

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*")

_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}

# Ten years. No wait, deadline or age is longer, and in nanoseconds any sum of them stays within the
# 64 bits that messages between processes have.
DURATION_S_MAX = 3650 * 86400.0

# Nothing that is counted in bytes here is larger, and it stays within 64 bits.
SIZE_BYTES_MAX = 1 << 60

_BYTES = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}


def parse_duration_s(text: str) -> float:
    """Seconds in ``text``, for example ``"250ms"`` or ``"1.5h"``.

    Raises ``ValueError`` with the accepted units where there is no number or no unit, and with the
    limit where it is over ``DURATION_S_MAX``.
    """
    amount, unit = _split(text, 'a duration such as "500ms", "30s" or "24h"')
    if unit not in _SECONDS:
        missing = f"{text.strip()!r} has no unit" if not unit else f"unknown unit {unit!r}"
        raise ValueError(f"{missing}; write a duration with one of ns, us, ms, s, m, h, d")
    duration_s = amount * _SECONDS[unit]
    if duration_s > DURATION_S_MAX:
        longest = f"{DURATION_S_MAX / _SECONDS['d']:.0f}d"
        raise ValueError(f"{text.strip()!r} is too long; the longest duration is {longest}")
    return duration_s


def parse_size_bytes(text: str) -> int:
    """Bytes in ``text``: a plain number, decimal units (``MB``) or binary ones (``MiB``).

    Raises ``ValueError`` with the accepted units otherwise, where the result is not whole, or with
    the limit where it is over ``SIZE_BYTES_MAX``.
    """
    amount, unit = _split(text, 'a size such as "512MiB" or "4GiB"')
    if unit and unit not in _BYTES:
        raise ValueError(f"unknown unit {unit!r}; use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = amount * _BYTES.get(unit, 1)
    if size > SIZE_BYTES_MAX:
        most = format_size(SIZE_BYTES_MAX)
        raise ValueError(f"{text.strip()[:40]!r} is too large; the largest size is {most}")
    if size != int(size):
        raise ValueError(f"{text.strip()!r} is not a whole number of bytes")
    return int(size)


def format_duration(seconds: float) -> str:
    """In the largest unit in which it is whole, to the nanosecond: ``"500ms"``, ``"24h"``."""
    duration_ns = round(seconds * 1e9)
    for unit, unit_ns in (("h", 3600e9), ("m", 60e9), ("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if duration_ns and duration_ns % int(unit_ns) == 0:
            return f"{duration_ns // int(unit_ns)}{unit}"
    return f"{duration_ns}ns" if duration_ns else "0s"


def format_size(size_bytes: int) -> str:
    """The largest binary unit in which the size is whole: ``"10MiB"``; else plain bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _BYTES[unit] == 0:
            return f"{size_bytes // _BYTES[unit]}{unit}"
    return f"{size_bytes}B"


def _split(text: str, wanted: str) -> tuple[float, str]:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {wanted}")
    return float(match.group(1)), match.group(2)


def listen_address(listen: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, without the brackets of an IPv6 address.

    Raises ``ValueError`` saying what is wrong.
    """
    host, colon, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{listen!r}: write an IPv6 address in brackets, as in [::1]:8000")
    if not colon or not host:
        raise ValueError(f"{listen!r} is not HOST:PORT, for example 127.0.0.1:8000")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{listen!r}: the port must be a number from 0 to 65535")
    return host, int(port)
