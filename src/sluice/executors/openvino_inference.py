"""Running a compiled step, and choosing tokens from what it gave.

Called by ``openvino`` for every step. What a step computes and what follows from it is decided
elsewhere.
"""

from collections.abc import Sequence
from typing import Any

from sluice.core.request import SequenceId
from sluice.core.sampling import SampledLogprobs
from sluice.core.step import Row, Sampled
from sluice.executors.base import StepError
from sluice.executors.openvino_graph import BLOCK_SIZE
from sluice.executors.openvino_inputs import StepInputs
from sluice.executors.sampling import NoTokenLeft, SequenceSampling, choose_tokens


def infer(request: Any) -> None:
    """Compute what the inputs of an ``openvino.InferRequest`` hold. Raises ``StepError``.

    It is not given up half way: after ``cancel`` the shapes that the processor plugin keeps for its
    operations no longer agree, and a step that follows may fail.
    """
    try:
        request.infer()
    except RuntimeError as error:
        raise StepError(f"OpenVINO failed to compute the step: {error}") from error


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
