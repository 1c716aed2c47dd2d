"""Running a compiled step, and giving it up half way.

Called by ``openvino`` for every step. What a step computes and what follows from giving it up is
decided elsewhere.
"""

from collections.abc import Callable
from typing import Any

from sluice.executors.base import StepError

# How often it is asked whether the step is still wanted: a fraction of the shortest step.
WANTED_MS = 3


def infer(request: Any, wanted: Callable[[], bool]) -> bool:
    """Compute what the inputs of an ``openvino.InferRequest`` hold; false where it was given up.

    OpenVINO stops between two operations of the graph. Raises ``StepError``.
    """
    given_up = False
    try:
        request.start_async()
        while not request.wait_for(WANTED_MS):
            if not given_up and not wanted():
                given_up = True
                request.cancel()
        request.wait()
    except RuntimeError as error:
        if given_up:
            return False
        raise StepError(f"OpenVINO failed to compute the step: {error}") from error
    return True


def always() -> bool:
    """Whether a step is wanted that nothing goes before."""
    return True
