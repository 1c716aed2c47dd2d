"""What one forward pass computes, and what came of it.

These values are the contract between the batching policy, which plans, and a ``StepExecutor``,
which computes. Nothing here decides anything.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sluice.core.request import SequenceId


class Row(NamedTuple):
    """One sequence's share of a step.

    ``tokens`` are the ids to compute, for positions ``past_tokens`` onward; their KV goes to the
    cells of ``blocks``, the sequence's whole block table in order (at least ``ceil((past_tokens +
    len(tokens)) / block_size)`` entries). ``sample`` asks for one token from the logits of the last
    position.
    """

    sequence: SequenceId
    tokens: tuple[int, ...]
    past_tokens: int
    blocks: tuple[int, ...]
    sample: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: decode rows (one token, sampled) first and contiguous, then prefill chunks.

    ``predicted_ns`` is the cost model's estimate, kept so that the journal can compare it.
    """

    step: int
    rows: tuple[Row, ...]
    predicted_ns: int

    @property
    def tokens(self) -> int:
        """Number of token positions the step computes."""
        return sum(len(row.tokens) for row in self.rows)


class StopReason(StrEnum):
    """Why the runtime says that a sequence must not continue."""

    END_TOKEN = "end_token"
    STOP_STRING = "stop_string"
    GRAMMAR = "grammar"


class Sampled(NamedTuple):
    """One sampled token, in the order of the plan's sampling rows.

    ``stop`` is filled in by the runtime after it has looked at the token's text, and is ``None`` as
    it comes from an executor.
    """

    sequence: SequenceId
    token: int
    stop: StopReason | None = None
