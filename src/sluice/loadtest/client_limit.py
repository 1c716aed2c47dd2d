"""How much load the client itself can send, against a server that does nothing.

A search stays well below this, so that no figure is the client's own. Called by ``sluice bench``.
"""

from collections.abc import Callable

from sluice.loadtest.trial import Runner, Span, Stimulus

FIRST_RPS, MOST_RPS = 64.0, 16_384.0
TRIAL = Span(counted_s=1.0, warm_s=0.3, tail_s=0.0, patience_s=5.0)
FACTOR = 2.0


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
