"""Which requests are compared: an incident window, and a baseline before it.

Times are nanoseconds of the wall clock. Where no window is named, it begins at the change point of
the latency: the split of the requests, in order of arrival, at which ranks before and after differ
most.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from sluice.config.units import parse_duration_s
from sluice.doctor.columns import Floats, Mask, Requests

# Requests at the beginning meet an empty fleet and are no baseline, nor is what no split reaches.
EDGE_SHARE = 0.1
REQUESTS_MIN = 20
_SPLITS_MAX = 400


class BadWindow(ValueError):
    """A window that cannot be: the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class Window:
    """From a time up to another one, which does not belong to it."""

    start_ns: float
    end_ns: float

    def of(self, requests: Requests) -> Mask:
        """The requests that arrived in it."""
        arrived_ns = requests["arrived_ns"]
        found: Mask = (arrived_ns >= self.start_ns) & (arrived_ns < self.end_ns)
        return found

    @property
    def duration_s(self) -> float:
        """How long it is."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Windows:
    """What is compared. ``found`` says that the incident was looked for, not named."""

    incident: Window
    baseline: Window
    found: bool


def whole(requests: Requests) -> Window:
    """All that the journal has."""
    arrived_ns = requests["arrived_ns"]
    return Window(float(arrived_ns[0]), float(arrived_ns[-1]) + 1.0)


def parse_window(text: str, all_of_it: Window) -> Window:
    """The window that a text describes.

    ``START..END``, either of which may be missing, each a duration since the first request of the
    journal (``90s``), one before its last (``-5m``) or a time (``2026-05-01T10:00:00Z``); or one
    duration, ``5m``, which means the last 5 minutes. Raises ``BadWindow``.
    """
    start, dots, end = text.partition("..")
    if not dots:
        start, end = f"-{text.lstrip('-')}", ""
    window = Window(
        _moment(start, all_of_it) if start.strip() else all_of_it.start_ns,
        _moment(end, all_of_it) if end.strip() else all_of_it.end_ns,
    )
    if window.start_ns >= window.end_ns:
        raise BadWindow(f"the window {text!r} ends before it begins")
    if window.end_ns <= all_of_it.start_ns or window.start_ns >= all_of_it.end_ns:
        raise BadWindow(
            f"the window {text!r} has no request in it: the journal reaches from "
            f"{time_of(all_of_it.start_ns)} to {time_of(all_of_it.end_ns)}, "
            f"{all_of_it.duration_s:,.0f} s"
        )
    return window


def windows_of(
    requests: Requests, latency_s: Floats, incident: Window | None, baseline: Window | None
) -> Windows:
    """The windows that were asked for; what was not is found or taken from before."""
    all_of_it = whole(requests)
    found = incident is None
    if incident is None:
        incident = _changed(requests, latency_s, all_of_it)
    if baseline is None:
        arrived_ns = requests["arrived_ns"]
        before = arrived_ns[arrived_ns < incident.start_ns]
        start_ns = before[int(EDGE_SHARE * len(before))] if len(before) else all_of_it.start_ns
        baseline = Window(float(start_ns), incident.start_ns)
    return Windows(incident, baseline, found)


def time_of(wall_ns: float) -> str:
    """A time as people write it."""
    return datetime.fromtimestamp(wall_ns / 1e9, tz=UTC).isoformat(timespec="milliseconds")


def _changed(requests: Requests, latency_s: Floats, all_of_it: Window) -> Window:
    """From the change point on, up to where latencies are back where they were."""
    arrived_ns = requests["arrived_ns"]
    answered = np.flatnonzero(~np.isnan(latency_s))
    if len(answered) < 2 * REQUESTS_MIN:
        middle_ns = (all_of_it.start_ns + all_of_it.end_ns) / 2
        return Window(middle_ns, all_of_it.end_ns)
    values = latency_s[answered]
    first = int(EDGE_SHARE * len(values))
    score = np.log(np.maximum(values[first:], 1e-6))
    # High quantiles move first: values weigh by how far they are above the median.
    score = np.maximum(0.0, score - np.median(score))
    start = first + _split(score)
    after = values[start:]
    usual = np.quantile(values[first:start], 0.95) if start > first else values[0]
    end = start + _calm_from(after > usual)
    last_ns = arrived_ns[answered[end]] if end < len(values) else all_of_it.end_ns
    return Window(float(arrived_ns[answered[start]]), float(last_ns))


def _split(score: Floats) -> int:
    """Where the mean of what follows exceeds the mean of what was before by most, in deviations."""
    count = len(score)
    edge = max(REQUESTS_MIN // 2, count // 20)
    splits = np.unique(np.linspace(edge, count - edge, _SPLITS_MAX).astype(int))
    sums = np.concatenate(([0.0], np.cumsum(score)))
    before = sums[splits] / splits
    after = (sums[-1] - sums[splits]) / (count - splits)
    weight = np.sqrt(splits * (count - splits) / count)
    return int(splits[np.argmax((after - before) * weight)])


def _calm_from(high: Mask) -> int:
    """The first place behind which few are high, for at least a fifth of the whole."""
    count = len(high)
    spell = max(REQUESTS_MIN, count // 5)
    if count < 2 * spell:
        return count
    sums = np.concatenate(([0], np.cumsum(high)))
    shares = (sums[spell:] - sums[:-spell]) / spell
    calm = np.flatnonzero(shares <= 0.08)
    calm = calm[calm >= REQUESTS_MIN]
    return int(calm[0]) if len(calm) and np.all(shares[calm[0] :] <= 0.15) else count


_NUMBERED = re.compile(r"^-?\d")


def _moment(text: str, all_of_it: Window) -> float:
    text = text.strip()
    try:
        if text.startswith("-"):
            return all_of_it.end_ns - 1e9 * parse_duration_s(text[1:])
        if _NUMBERED.match(text) and "T" not in text:
            return all_of_it.start_ns + 1e9 * parse_duration_s(text)
        moment = datetime.fromisoformat(text)
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):  # of no form, or of no year
        raise BadWindow(
            f"{text!r} is no time: write a duration since the first request (90s), one before the "
            f"last (-5m) or a time (2026-05-01T10:00:00Z)"
        ) from None
    return 1e9 * moment.timestamp()
