"""What goes wrong in a simulated fleet, and when; written as ``replica-slow@60s:x=3,for=30s``.

``simulation.py`` lets it happen. What the fleet does about it is the fleet's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from sluice.config.units import parse_duration_s
from sluice.core.admission import NS_PER_S
from sluice.planner.names import CannotPlan, chosen


@dataclass(frozen=True, slots=True)
class Lost:
    """The process of a replica ends; it is started again, unless that is ``permanent``."""

    at_ns: int
    replica_id: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Slow:
    """Steps of a replica take ``factor`` times as long, for ``for_ns``."""

    at_ns: int
    replica_id: str
    factor: float
    for_ns: int


@dataclass(frozen=True, slots=True)
class Stall:
    """One step of a replica takes ``for_ns`` longer."""

    at_ns: int
    replica_id: str
    for_ns: int


Fault = Lost | Slow | Stall

KINDS: Mapping[str, tuple[str, ...]] = {
    "replica-lost": ("replica",),
    "replica-gone": ("replica",),
    "replica-slow": ("replica", "x", "for"),
    "replica-stall": ("replica", "for"),
}


def fault_named(text: str, replica_ids: tuple[str, ...]) -> Fault:
    """The fault that a text describes; without ``replica=`` it strikes the first replica.

    Raises ``CannotPlan`` with what is wrong.
    """
    kind, at, rest = text.partition("@")
    kind = chosen("fault", kind, KINDS)
    if not at:
        raise CannotPlan(f"fault {text!r} has no time: write {kind}@60s")
    when, _, written = rest.partition(":")
    options = _options(kind, written)
    at_ns = _ns(f"the time of {kind}", when)
    replica_id = options.get("replica", replica_ids[0])
    if replica_id not in replica_ids:
        raise CannotPlan(f"{kind} names {replica_id!r}; replicas are {_listed(replica_ids)}")
    if kind in ("replica-lost", "replica-gone"):
        return Lost(at_ns, replica_id, permanent=kind == "replica-gone")
    if "for" not in options:
        raise CannotPlan(f"{kind} needs a time, as in {kind}@60s:for=30s")
    for_ns = _ns(f"for of {kind}", options["for"])
    if kind == "replica-stall":
        return Stall(at_ns, replica_id, for_ns)
    return Slow(at_ns, replica_id, _factor(options.get("x", "2")), for_ns)


def _options(kind: str, written: str) -> dict[str, str]:
    options = {}
    for option in filter(None, written.split(",")):
        key, equals, value = option.partition("=")
        if not equals or key not in KINDS[kind]:
            raise CannotPlan(f"{kind} takes {', '.join(KINDS[kind])}, not {option!r}")
        options[key] = value
    return options


def _ns(what: str, text: str) -> int:
    try:
        return round(parse_duration_s(text) * NS_PER_S)
    except ValueError as error:
        raise CannotPlan(f"{what}: {error}") from None


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not isfinite(factor) or not 0.01 <= factor <= 1e6:
        raise CannotPlan(f"x of replica-slow must be a number from 0.01 to 1e6, not {text!r}")
    return factor


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
