"""What to tell of diagnoses that follow one another: a spike began, has another cause, or is over.

A doctor that watches finds the same spike at each look; it is told once. The words of an event are
made here, where it goes is the command's business.
"""

from dataclasses import dataclass
from enum import StrEnum

from sluice.doctor.diagnosis import Diagnosis, Judged, Verdict
from sluice.doctor.scene import OWN_EVENTS
from sluice.doctor.windows import time_of

# Looks without a spike after which one is over: at the edge of a window it may come and go.
_CALM_LOOKS = 2


class What(StrEnum):
    """Names of events, as they stand in the journal."""

    BEGAN = OWN_EVENTS + "spike"
    CHANGED = OWN_EVENTS + "cause"
    OVER = OWN_EVENTS + "over"


@dataclass(frozen=True, slots=True)
class Notice:
    """One event, with texts by name."""

    what: What
    details: dict[str, str]


class Alarm:
    """Remembers what was told."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._raised = False
        self._calm = 0

    def heard(self, found: Diagnosis) -> Notice | None:
        """Take the next diagnosis; ``None`` where it says nothing new."""
        if not found.spike.confirmed:
            self._calm += 1
            if not self._raised or self._calm < _CALM_LOOKS:
                return None
            self._raised, self._cause = False, None
            return Notice(What.OVER, _numbers(found))
        self._calm = 0
        first = first_of(found)
        cause = None if first is None else first.name
        if self._raised and cause in {self._cause, None}:
            return None
        what = What.CHANGED if self._raised else What.BEGAN
        self._raised, self._cause = True, cause
        return Notice(what, _numbers(found) | _blamed(first) | _around(found))


def first_of(found: Diagnosis) -> Judged | None:
    """The cause that is blamed, where there is one."""
    told = (Verdict.CONFIRMED, Verdict.LIKELY)
    return next((each for each in found.causes if each.verdict in told), None)


def _numbers(found: Diagnosis) -> dict[str, str]:
    spike = found.spike
    seconds = [
        "unknown" if each is None else f"{each:.3f} s" for each in (spike.before_s, spike.after_s)
    ]
    name = f"{spike.metric}_p{spike.percentile:g}"
    return {"metric": name, "before": seconds[0], "after": seconds[1]}


def _blamed(first: Judged | None) -> dict[str, str]:
    if first is None:
        return {"cause": "none found"}
    told = {"cause": first.name, "verdict": first.verdict.value}
    if first.share is not None:
        told["share"] = f"{first.share.share:.0%}"
    if first.evidence:
        told["evidence"] = first.evidence[0]
    return told


def _around(found: Diagnosis) -> dict[str, str]:
    told = {"since": time_of(found.windows.incident.start_ns)}
    if found.examples:
        told["requests"] = ", ".join(found.examples)
    return told
