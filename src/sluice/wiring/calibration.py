"""Measures an executor before it serves, so that its first plans are made for this machine.

Called once by a replica process between loading and serving. Without it the first prompts would be
cut by the speed of another machine, and a step could take many times what was aimed at. Sizes that
were computed once are also quicker the second time, so the first of each is not counted.
"""

from sluice.core.costmodel import CostModel, Load
from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row
from sluice.executors.base import StepExecutor

_NOBODY = SequenceId("", 0)
# Prompt chunks and decode rows in turn; a cost model that refits after 2, 4 and 8 steps is settled.
_ROUNDS = ((64, False), (128, False), (1, False), (64, True), (1, True)) + (
    ((128, True), (1, True), (32, True)) * 2
)
# A large model on a slow machine is measured by fewer steps.
_SPENT_NS_MAX = 2_000_000_000


def calibrate(executor: StepExecutor, limits: ReplicaLimits, cost: CostModel) -> None:
    """Let ``cost`` learn from some steps of a prompt that nobody sent. Raises ``StepError``."""
    room = min(limits.context_tokens_max, limits.block_size * limits.blocks_total)
    blocks = tuple(range(-(-room // limits.block_size)))
    executor.open_sequence(_NOBODY, Sampling(temperature=0.0), (0,))
    past_tokens = spent_ns = 0
    for step, (tokens, counts) in enumerate(_ROUNDS):
        if past_tokens + tokens > room or spent_ns > _SPENT_NS_MAX:
            break
        row = Row(_NOBODY, (0,) * tokens, past_tokens, blocks, sample=True)
        duration_ns = executor.run(Plan(step, (row,), 0)).duration_ns
        if counts:
            cost.observe(_load(past_tokens, tokens), duration_ns)
        past_tokens += tokens
        spent_ns += duration_ns
    executor.end_sequence(_NOBODY)


def _load(past_tokens: int, tokens: int) -> Load:
    if tokens > 1:
        return Load().with_chunk(past_tokens, tokens)
    return Load(tokens=1, decode_rows=1, decode_context_tokens=past_tokens + 1)
