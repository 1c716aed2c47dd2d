"""Running a compiled step, giving it up half way, and choosing tokens from what it gave.

Called by ``openvino`` for every step. What a step computes and what follows from it is decided
elsewhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sluice.core.request import SequenceId
from sluice.core.sampling import SampledLogprobs
from sluice.core.step import Row, Sampled
from sluice.executors.base import StepError
from sluice.executors.openvino_graph import BLOCK_SIZE
from sluice.executors.openvino_inputs import StepInputs
from sluice.executors.sampling import NoTokenLeft, SequenceSampling, choose_tokens

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


def sample(
    request: Any, rows: Sequence[Row], states: Sequence[SequenceSampling]
) -> tuple[tuple[Sampled, ...], dict[SequenceId, SampledLogprobs]]:
    """Choose a token for each sampling row. Raises ``StepError`` that blames one without any."""
    if not rows:
        return (), {}
    logits = request.get_output_tensor(0).data.reshape(len(rows), -1)
    try:
        tokens, logprobs = choose_tokens(logits, states)
    except NoTokenLeft as error:
        raise StepError(str(error), (rows[error.row].sequence,)) from error
    sampled = tuple(
        Sampled(row.sequence, token) for row, token in zip(rows, tokens.tolist(), strict=True)
    )
    return sampled, {rows[place].sequence: entry for place, entry in logprobs.items()}


def warm_up(request: Any, inputs: StepInputs) -> None:
    """Compute a chunk and a decode row in the first block, so that kernels exist before use."""
    nobody, tokens = SequenceId("", 0), BLOCK_SIZE - 1
    for row in (
        Row(nobody, (0,) * tokens, 0, (0,), sample=True),
        Row(nobody, (0,), tokens, (0,), sample=True),
    ):
        inputs.fill([row])
        request.infer()
