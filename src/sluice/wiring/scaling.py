"""Settings to how many replicas a model may have and when: for the gateway and for simulations."""

from datetime import UTC, datetime, timedelta

from sluice.config.autoscale import DAYS, AutoscaleSection, ScheduleSection, clock_s
from sluice.config.sections import ModelSection
from sluice.core.admission import NS_PER_S
from sluice.core.limits import Peak, ScaleLimits

DAY_S = 86_400
WEEK_NS = 7 * DAY_S * NS_PER_S


def scales(section: ModelSection) -> bool:
    """Whether the number of its replicas follows its load."""
    replicas = section.replicas
    return replicas.max is not None and (replicas.max > replicas.min or replicas.warm > 0)


def replica_names(name: str, section: ModelSection) -> list[str]:
    """The replicas that a model that runs here can have."""
    replicas = section.replicas
    return [f"{name}-{number}" for number in range(max(replicas.min, replicas.max or 0))]


def scale_limits(
    name: str, section: ModelSection, autoscale: AutoscaleSection, midnight_ns: int
) -> ScaleLimits | None:
    """What the fleet holds to; ``None`` where all replicas run all the time.

    ``midnight_ns`` is the fleet's time at the beginning of a Monday in UTC.
    """
    replicas = section.replicas
    if replicas.max is None or not scales(section):
        return None
    return ScaleLimits(
        replicas_min=replicas.min,
        replicas_max=replicas.max,
        warm=replicas.warm,
        utilisation=autoscale.utilisation,
        quantile=autoscale.quantile,
        drain_ns=_ns(autoscale.drain_s),
        wait_ns=_ns(autoscale.queue_wait_s),
        start_ns=_ns(autoscale.cold_start_s),
        idle_ns=_ns(autoscale.idle_s),
        hold_places=autoscale.hold_requests_max,
        hold_ns=_ns(autoscale.hold_s_max),
        leave_ns=_ns(autoscale.leave_s_max),
        peaks=tuple(
            peak
            for schedule in autoscale.schedules
            if schedule.model in (None, name)
            for peak in _peaks(schedule, replicas.max, midnight_ns)
        ),
    )


def monday_ns(now_ns: int, wall_s: float) -> int:
    """The fleet's time at the beginning of this week in UTC, where it is ``now_ns`` now."""
    now = datetime.fromtimestamp(wall_s, UTC)
    monday = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(now.weekday())
    return now_ns - round((now - monday).total_seconds() * NS_PER_S)


def _peaks(schedule: ScheduleSection, replicas_max: int, midnight_ns: int) -> list[Peak]:
    begins_s, ends_s = clock_s(schedule.begins) or 0, clock_s(schedule.ends) or 0
    lasts_s = (ends_s - begins_s) % DAY_S or DAY_S
    replicas = min(replicas_max, schedule.replicas)
    peaks = []
    for day in schedule.days:
        begin_ns = midnight_ns + (DAYS.index(day) * DAY_S + begins_s) * NS_PER_S
        peaks.append(Peak(begin_ns, begin_ns + lasts_s * NS_PER_S, WEEK_NS, replicas))
    return peaks


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
