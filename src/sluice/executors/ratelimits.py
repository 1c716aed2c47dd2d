"""What a vendor's answer says of its limits: the one reader of rate-limit headers.

Called by the driver of remote replicas with the headers of each answer, refusals included. Two
families of names are understood: OpenAI's, with times such as ``6m0s`` or ``120ms``, and
Anthropic's, with instants in RFC 3339 that are taken against the answer's own date, so that the
clocks need not agree. What cannot be read counts as not said.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime

from sluice.core.quota import Left, QuotaLeft
from sluice.executors.stream import Headers

_UNITS_NS = {"d": 86_400 * 10**9, "h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])")
_TIME = re.compile(rf"(?:{_PART.pattern})+")
# The names of limit, remaining and reset in each family; {} is the resource.
_FAMILIES = (
    ("x-ratelimit-limit-{}", "x-ratelimit-remaining-{}", "x-ratelimit-reset-{}"),
    (
        "anthropic-ratelimit-{}-limit",
        "anthropic-ratelimit-{}-remaining",
        "anthropic-ratelimit-{}-reset",
    ),
)
_MARK = "ratelimit-"
# A limit is full again after so long at most: what is told beyond it is taken for a mistake.
_FULL_NS_MAX = 86_400 * 10**9
# Counts with more digits are none.
_DIGITS_MAX = 18


def quota_left(headers: Headers) -> QuotaLeft | None:
    """What is left of requests and tokens; ``None`` where the answer does not say."""
    for name, _ in headers:
        if _MARK in name:
            break
    else:
        return None
    named = dict(headers)
    requests, tokens = _left(named, "requests"), _left(named, "tokens")
    return QuotaLeft(requests, tokens) if requests or tokens else None


def _left(headers: Mapping[str, str], resource: str) -> Left | None:
    for names in _FAMILIES:
        limit, remaining, reset = (headers.get(name.format(resource), "") for name in names)
        if limit.startswith("-") or not (_is_count(limit) and _is_count(remaining)):
            continue
        full_ns = _time_ns(reset, headers.get("date", ""))
        if full_ns is not None:
            return Left(int(limit), max(0, int(remaining)), min(full_ns, _FULL_NS_MAX))
    return None


def _is_count(text: str) -> bool:
    """Whether it is a whole number; some vendors let what remains fall below zero."""
    digits = text.removeprefix("-")
    return len(digits) <= _DIGITS_MAX and digits.isdecimal() and digits.isascii()


def _time_ns(text: str, date: str) -> int | None:
    """A time in either family's form, ``None`` if it is neither."""
    try:
        if _TIME.fullmatch(text):
            parts = _PART.findall(text)
            return sum(int(float(number) * _UNITS_NS[unit]) for number, unit in parts)
        if text.replace(".", "", 1).isdecimal():
            return int(float(text) * 10**9)  # bare seconds, as vendors alike to OpenAI send them
        between = datetime.fromisoformat(text) - parsedate_to_datetime(date)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0, int(between.total_seconds() * 10**9))
