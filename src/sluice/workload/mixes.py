"""Who asks for what: shares of SLO classes, tenants and models, drawn for each request."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from sluice.workload.asks import BadWorkload

WEIGHT_MAX = 1e12


@dataclass(frozen=True, slots=True)
class Shares:
    """Names with their weights. One request in ``sum / weight`` has the name."""

    names: tuple[str, ...] = ("",)
    bounds: tuple[float, ...] = (1.0,)

    def draw(self, draw: Random) -> str:
        """One name."""
        at = draw.random() * self.bounds[-1]
        found = (name for name, bound in zip(self.names, self.bounds, strict=True) if at < bound)
        return next(found, self.names[-1])  # a product may be rounded up to the last bound


@dataclass(frozen=True, slots=True)
class Mix:
    """The three names that a request has."""

    models: Shares = Shares()
    classes: Shares = Shares()
    tenants: Shares = Shares()


def shares_of(what: str, texts: Iterable[str]) -> Shares:
    """Shares from texts such as ``chat=0.7``; a name alone weighs 1. Raises ``BadWorkload``."""
    names, weights = [], []
    for text in texts:
        name, equals, weight = text.rpartition("=")
        name, weight = (name, weight) if equals else (text, "1")
        try:
            value = float(weight)
        except ValueError:
            raise BadWorkload(f"{what} {text!r}: {weight!r} is not a weight") from None
        if not name or not 0.0 < value <= WEIGHT_MAX:
            raise BadWorkload(
                f"{what} {text!r} is not NAME=WEIGHT with a weight above 0, at most {WEIGHT_MAX:g}"
            )
        names.append(name.strip())
        weights.append(value)
    if len(set(names)) < len(names):
        raise BadWorkload(f"{what} is given twice: {', '.join(sorted(names))}")
    return Shares(tuple(names), tuple(accumulate(weights))) if names else Shares()
