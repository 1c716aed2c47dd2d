"""Measures an executor before it serves, so that its first plans are made for this machine.

Called once by a replica process between loading and serving. Without it the first prompts would be
cut by the speed of another machine, and a step could take many times what was aimed at. The model
that learns is ``core.costmodel``'s; nothing is decided here but what is measured.
"""

from sluice.core.costmodel import CostModel
from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row
from sluice.executors.base import StepExecutor
from sluice.executors.simulated import load_of

_NOBODY = SequenceId("", 0)
# Prompt chunks and decode rows in turn, the most telling ones first. Sizes that were computed once
# are quicker the second time, so the first of each is not counted. A cost model that refits after
# 2, 4 and 8 steps is settled by the eight that are.
_ROUNDS = (
    (16, False), (16, True), (1, False), (1, True), (64, False), (64, True), (1, True),
    (128, False), (128, True), (1, True), (32, False), (32, True), (1, True),
)  # fmt: skip
# Start to first token is promised within seconds, so a slow machine is measured by fewer steps. A
# step is left out where it would take more than what is left.
SPENT_NS_MAX = 300_000_000


def calibrate(executor: StepExecutor, limits: ReplicaLimits, cost: CostModel) -> None:
    """Let ``cost`` learn from some steps of a prompt that nobody sent. Raises ``StepError``."""
    room = min(limits.context_tokens_max, limits.block_size * limits.blocks_total)
    blocks = tuple(range(-(-room // limits.block_size)))
    executor.open_sequence(_NOBODY, Sampling(temperature=0.0), (0,))
    past_tokens = spent_ns = token_ns = 0
    for step, (tokens, counts) in enumerate(_ROUNDS):
        if past_tokens + tokens > room:
            break
        if spent_ns + tokens * token_ns > SPENT_NS_MAX:
            continue
        plan = Plan(step, (Row(_NOBODY, (0,) * tokens, past_tokens, blocks, sample=True),), 0)
        duration_ns = executor.run(plan).duration_ns
        if counts:
            cost.observe(load_of(plan), duration_ns)
        past_tokens += tokens
        spent_ns += duration_ns
        if tokens > 1:
            token_ns = duration_ns // tokens
    executor.end_sequence(_NOBODY)
