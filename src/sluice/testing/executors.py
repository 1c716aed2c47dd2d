"""Step executors for tests: one whose tokens, times and failures are scripted.

``FakeExecutor`` keeps a real KV pool of token ids: a row writes its tokens to the cells of its
blocks, and the next token is a function of what the cells of the whole context hold. Whoever gives
a block to two sequences at once, or shares a block whose content differs, gets other tokens.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row, Sampled
from sluice.executors.base import Outcome, StepError, TokenMask, check_plan

VOCAB_SIZE = 1000
STEP_NS = 10_000_000  # duration of a step where none is scripted


def hashed(context: Sequence[int], seed: int) -> int:
    """The default next token: it depends on every token of the context and on the seed."""
    return 1 + crc32(array("q", [seed, *context]).tobytes()) % (VOCAB_SIZE - 1)


class FakeExecutor:
    """Computes plans over a pool of token ids.

    ``scripts`` gives the tokens of a request's sequences instead of ``next_token``; a script that
    is used up is continued by ``next_token``. ``failures`` are raised in place of the n-th run,
    counted from 1; nothing is written then. ``plans`` keeps every plan that was run.
    """

    def __init__(
        self,
        limits: ReplicaLimits,
        *,
        next_token: Callable[[Sequence[int], int], int] = hashed,
        scripts: Mapping[str, Sequence[int]] | None = None,
        duration_ns: Callable[[Plan], int] | None = None,
        failures: Mapping[int, StepError] | None = None,
    ) -> None:
        self.limits = limits
        self.plans: list[Plan] = []
        self.open: dict[SequenceId, int] = {}
        self._next_token = next_token
        self._scripts = scripts or {}
        self._duration_ns = duration_ns
        self._failures = failures or {}
        self._prompt_tokens: dict[SequenceId, int] = {}
        self._cells: list[list[int | None]] = []

    def load(self) -> ReplicaLimits:
        """See ``StepExecutor``."""
        self._cells = [[None] * self.limits.block_size for _ in range(self.limits.blocks_total)]
        return self.limits

    def open_sequence(
        self,
        sequence: SequenceId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        mask: TokenMask | None = None,  # noqa: ARG002 - there are no logits to mask
    ) -> None:
        """See ``StepExecutor``. Greedy sequences have seed 0; without a seed the choice is one."""
        seed = 0
        if sampling.temperature > 0:
            seed = 1 + (sequence.choice if sampling.seed is None else sampling.seed)
        self.open[sequence] = seed
        self._prompt_tokens[sequence] = len(prompt)

    def end_sequence(self, sequence: SequenceId) -> None:
        """See ``StepExecutor``."""
        self.open.pop(sequence, None)
        self._prompt_tokens.pop(sequence, None)

    def run(self, plan: Plan) -> Outcome:
        """See ``StepExecutor``; raises ``StepError`` for rows that no executor could compute."""
        self.plans.append(plan)
        failure = self._failures.get(len(self.plans))
        if failure is not None:
            raise failure
        check_plan(plan, self.limits)
        for row in plan.rows:
            if row.sequence not in self.open:
                raise StepError(f"sequence {row.sequence} is not open", (row.sequence,))
        for row in plan.rows:
            self._write(row)
        sampled = tuple(Sampled(row.sequence, self._token(row)) for row in plan.rows if row.sample)
        return Outcome(sampled, self._duration_ns(plan) if self._duration_ns else STEP_NS)

    def close(self) -> None:
        """See ``StepExecutor``."""
        self.open = {}

    def _write(self, row: Row) -> None:
        size = self.limits.block_size
        for position, token in enumerate(row.tokens, row.past_tokens):
            self._cells[row.blocks[position // size]][position % size] = token

    def _token(self, row: Row) -> int:
        position = row.past_tokens + len(row.tokens)
        script = self._scripts.get(row.sequence.request_id, ())
        produced = position - self._prompt_tokens[row.sequence]
        if produced < len(script):
            return script[produced]
        size = self.limits.block_size
        context: list[int] = []
        for place in range(position):
            cell = self._cells[row.blocks[place // size]][place % size]
            if cell is None:
                raise StepError(f"position {place} was never computed", (row.sequence,))
            context.append(cell)
        return self._next_token(context, self.open[row.sequence])
