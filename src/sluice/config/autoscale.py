"""How the number of replicas follows the load: ``[autoscale]``, for all models that have a range.

Read by ``wiring/scaling.py``; what the settings mean for a decision is in ``core/scaling.py``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from sluice.config.sections import Count, Range, Seconds

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class ScheduleSection:
    """A known peak: for that time a model has at least so many replicas that serve."""

    begins: str
    """Time of day in UTC, ``HH:MM``. Replicas are started so much earlier that they serve by
    then."""

    ends: str
    """Time of day in UTC, ``HH:MM``; one that is not after ``begins`` is on the next day."""

    replicas: Count
    """Replicas that serve at least. Never more than the model's ``replicas.max``."""

    days: tuple[str, ...] = DAYS
    """Days on which it begins: ``mon``, ``tue``, ``wed``, ``thu``, ``fri``, ``sat``, ``sun``."""

    model: str | None = None
    """The model that it is for. Unset: all that have a range of replicas."""


@dataclass(frozen=True, slots=True)
class AutoscaleSection:
    """How the number of replicas follows the load, for models whose ``replicas`` are a range."""

    utilisation: Annotated[float, Range(low=0.1, high=1)] = 0.85
    """Share of a replica's speed that is planned with. A lower one has room for bursts and costs
    replicas."""

    quantile: Annotated[float, Range(low=0, high=0.99)] = 0.9
    """Share of the forecasts that are to hold. By how much more came than was forecast, over the
    last two hours, tells what is to be added. A higher one costs replicas where the load is erratic
    and little where it is even. 0 adds nothing."""

    drain_s: Seconds = 30.0
    """Time in which requests that wait are to be worked off: more replicas are started for that."""

    queue_wait_s: Seconds = 1.0
    """Where more than 5 % of the requests wait longer than this for a place to run, or are refused,
    for 20 seconds, further replicas are started, whatever the forecast says."""

    cold_start_s: Seconds = 60.0
    """Time from the start of a replica to its being ready, until starts were measured. The time
    that nine of ten starts took is how far ahead is planned."""

    idle_s: Seconds = 300.0
    """Time without a request after which the last replica of a model with ``replicas.min = 0``
    stops."""

    hold_requests_max: Count = 64
    """Requests that are held while no replica of their model serves and one is being started;
    further ones are refused with 503 and the time until then."""

    hold_s_max: Seconds = 60.0
    """Longest time that a request is held. Where a start takes longer, requests are refused at once
    with 503 and the time until it is over."""

    leave_s_max: Seconds = 600.0
    """Time that a replica which is to go may take to finish the answers it has begun. Then they end
    with an error."""

    schedules: tuple[ScheduleSection, ...] = ()
    """Known peaks, for example ``[{ begins = "08:30", ends = "18:00", days = ["mon", "tue"],
    replicas = 4, model = "small" }]``."""


def clock_s(time_of_day: str) -> int | None:
    """Seconds after midnight of ``HH:MM``, ``None`` where it is no such time."""
    found = _TIME.fullmatch(time_of_day)
    return None if found is None else 3600 * int(found[1]) + 60 * int(found[2])


def schedule_problems(section: AutoscaleSection, models: frozenset[str]) -> Iterator[str]:
    """What is wrong with the schedules, in words."""
    for number, one in enumerate(section.schedules, 1):
        for key, text in (("begins", one.begins), ("ends", one.ends)):
            if clock_s(text) is None:
                yield f'schedule {number}: {key} = "{text}" is no time of day; write HH:MM'
        for day in one.days:
            if day not in DAYS:
                yield f'schedule {number}: there is no day "{day}"; days are {", ".join(DAYS)}'
        if one.model is not None and one.model not in models:
            known = ", ".join(sorted(models)) or "none"
            yield f'schedule {number}: there is no model "{one.model}"; configured: {known}'
