"""Refusals of the planner, how a name that is not in a table is answered, and how times read."""

from collections.abc import Iterable
from difflib import get_close_matches


class CannotPlan(ValueError):
    """What was asked cannot be planned: the message says why and what the nearest possible is."""


class NoFleet(CannotPlan):
    """Each part of the question is understood, and no fleet answers all of them together."""


class Indivisible(NoFleet):
    """The model cannot be spread over so many devices."""


def chosen(kind: str, name: str, known: Iterable[str]) -> str:
    """``name`` as ``known`` spells it, without regard to case.

    Raises ``CannotPlan`` with the nearest known names otherwise.
    """
    names = {each.lower(): each for each in known}
    found = names.get(name.strip().lower())
    if found is not None:
        return found
    near = get_close_matches(name.strip().lower(), names, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(names[each] for each in near)}?" if near else ""
    listed = "" if near else f"; known are {', '.join(sorted(names.values()))}"
    raise CannotPlan(f"unknown {kind} {name!r}{hint}{listed}")


def shown_s(seconds: float) -> str:
    """A time with three digits, in milliseconds below one second."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100.0 else f"{seconds:,.0f} s"
