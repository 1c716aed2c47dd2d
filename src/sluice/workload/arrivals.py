"""When requests arrive: open-loop processes of a mean rate, as endless iterators of seconds.

Each takes its unit random numbers in the same order at any rate, so that two rates under one seed
see the same pattern, faster or slower.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count
from math import sqrt
from random import Random

from sluice.workload.asks import BadWorkload

RATE_RPS_MIN, RATE_RPS_MAX = 1e-12, 1e7
# What a figure of arrivals may be: times and rates beyond have no use, and overflow.
OPTION_MIN, OPTION_MAX = 1e-6, 1e7


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every ``1 / rate`` seconds."""

    def seconds(self, rate_rps: float, draw: Random) -> Iterator[float]:  # noqa: ARG002
        """Arrival times."""
        return (number / rate_rps for number in count(1))


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent clients: exponential gaps."""

    def seconds(self, rate_rps: float, draw: Random) -> Iterator[float]:
        """Arrival times."""
        at = 0.0
        while True:
            at += draw.expovariate(1.0) / rate_rps
            yield at


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps with the coefficient of variation ``cv``: above 1 burstier than Poisson."""

    cv: float = 2.0

    def seconds(self, rate_rps: float, draw: Random) -> Iterator[float]:
        """Arrival times."""
        shape, at = 1.0 / self.cv**2, 0.0
        while True:
            at += draw.gammavariate(shape, 1.0 / shape) / rate_rps
            yield at


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson for ``on_s``, silence for ``off_s``, and so on; the mean over both is the rate."""

    on_s: float = 10.0
    off_s: float = 10.0

    def seconds(self, rate_rps: float, draw: Random) -> Iterator[float]:
        """Arrival times."""
        busy_rps = rate_rps * (self.on_s + self.off_s) / self.on_s
        for busy_s in Poisson().seconds(busy_rps, draw):
            yield busy_s + busy_s // self.on_s * self.off_s


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson whose rate goes straight from the rate to ``to_rps`` in ``over_s`` and stays there.

    Unit-rate arrivals are mapped through the inverse of the integrated rate.
    """

    to_rps: float = 10.0
    over_s: float = 60.0

    def seconds(self, rate_rps: float, draw: Random) -> Iterator[float]:
        """Arrival times."""
        slope = (self.to_rps - rate_rps) / self.over_s
        whole = (rate_rps + self.to_rps) / 2.0 * self.over_s
        for unit in Poisson().seconds(1.0, draw):
            if unit >= whole:
                yield self.over_s + (unit - whole) / self.to_rps
            else:
                # The smaller root of slope/2 t^2 + rate t = unit, in the form that also takes 0.
                yield 2.0 * unit / (rate_rps + sqrt(rate_rps**2 + 2.0 * slope * unit))


Arrivals = Constant | Poisson | Gamma | OnOff | Ramp

KINDS: Mapping[str, type[Arrivals]] = {
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "onoff": OnOff,
    "ramp": Ramp,
}


def arrivals_named(text: str) -> Arrivals:
    """The process that a text such as ``gamma:cv=3`` or ``onoff:on=10,off=50`` names.

    Numbers are seconds, rates or plain; what is not given has its default. Raises ``BadWorkload``.
    """
    name, _, options = text.partition(":")
    kind = KINDS.get(name.strip().lower())
    if kind is None:
        raise BadWorkload(f"unknown arrivals {name!r}; known are {', '.join(KINDS)}")
    known = {field.name.rsplit("_", maxsplit=1)[0]: field.name for field in fields(kind)}
    given: dict[str, float] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key.strip() not in known:
            takes = ", ".join(known) or "no options"
            raise BadWorkload(f"arrivals {name} take {takes}, not {key.strip()!r}")
        given[known[key.strip()]] = _positive(f"{key.strip()} of arrivals {name}", value)
    return kind(**given)


def checked_rate(rate_rps: float) -> float:
    """``rate_rps``, if a workload can have it; raises ``BadWorkload``."""
    if not RATE_RPS_MIN <= rate_rps <= RATE_RPS_MAX:
        raise BadWorkload(
            f"the rate must be above 0, {RATE_RPS_MIN:g} to {RATE_RPS_MAX:g} requests per second, "
            f"not {rate_rps:g}"
        )
    return rate_rps


def _positive(what: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadWorkload(f"{what} is {text!r}, not a number") from None
    if not OPTION_MIN <= value <= OPTION_MAX:
        raise BadWorkload(
            f"{what} must be above 0, {OPTION_MIN:g} to {OPTION_MAX:g}, not {text.strip()}"
        )
    return value
