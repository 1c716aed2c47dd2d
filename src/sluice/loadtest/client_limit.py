"""How much load the client itself can send, against a server that does nothing.

A search stays well below this, so that no figure is the client's own. Called by ``sluice bench``.
"""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice import __version__
from sluice.loadtest.trial import Runner, Span, Stimulus

FIRST_RPS, MOST_RPS = 64.0, 16_384.0
TRIAL = Span(counted_s=1.0, warm_s=0.3, tail_s=0.0, patience_s=5.0)
FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class ClientLimit:
    """A limit that was measured: the rate in requests/s, ``None`` for none, and on what."""

    rps: float | None
    machine: Mapping[str, str | int | None]


def client_machine(processes: int) -> Mapping[str, str | int | None]:
    """What the limit of a client of so many processes depends on, beside the load itself."""
    return {
        "host": platform.node(),
        "kind": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "sluice": __version__,
        "processes": processes,
    }


def client_limit(
    runner: Runner, stimulus: Stimulus, seed: int, told: Callable[[float], None] = lambda _: None
) -> float | None:
    """The highest of the doubled rates at which the client kept its schedule, ``None`` where it
    kept none. Each is tried twice before it is given up: something else may have run meanwhile."""
    kept: float | None = None
    rate = FIRST_RPS
    while rate <= MOST_RPS:
        told(rate)
        if not any(
            runner.run(stimulus.open_loop(rate, TRIAL, seed + attempt)).valid
            for attempt in range(2)
        ):
            break
        kept, rate = rate, FACTOR * rate
    return kept
