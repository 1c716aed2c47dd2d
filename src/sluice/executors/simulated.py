"""A ``StepExecutor`` that computes nothing: its steps take as long as a cost model says.

It never sleeps. The virtual driver advances its clock by the durations; a live driver may wait them
out. Tokens are a function of the sequence and of the position alone, so output does not depend on
batching, chunks, blocks or preemption. ``output_tokens`` says after how many tokens a sequence
gives ``end_token``; without it sequences run to their limit.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from sluice.core.batch import Stretch
from sluice.core.costmodel import Coefficients, Load
from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row, Sampled
from sluice.executors.base import Outcome, StepError, TokenMask, check_plan

OutputTokens = Callable[[SequenceId], int | None]


@dataclass(frozen=True, slots=True)
class _Script:
    """What one sequence generates: consecutive ids from ``start``, ``length`` tokens of them."""

    start: int
    prompt_tokens: int
    length: int | None


class SimulatedExecutor:
    """Deterministic tokens at the speed of ``coefficients``."""

    def __init__(
        self,
        limits: ReplicaLimits,
        coefficients: Coefficients,
        *,
        output_tokens: OutputTokens | None = None,
        end_token: int = 0,
        vocab_size: int = 32_000,
    ) -> None:
        self._limits = limits
        self._coefficients = coefficients
        self._output_tokens = output_tokens
        self._end_token = end_token
        self._vocab_size = vocab_size
        self._scripts: dict[SequenceId, _Script] = {}
        self._opened = 0

    def load(self) -> ReplicaLimits:
        """See ``StepExecutor``; nothing is loaded."""
        return self._limits

    def open_sequence(
        self,
        sequence: SequenceId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        mask: TokenMask | None = None,  # noqa: ARG002 - there are no logits to mask
    ) -> None:
        """See ``StepExecutor``. Greedy output depends on the prompt, other on the seed too."""
        self._opened += 1
        start = crc32(array("q", prompt).tobytes())
        if sampling.temperature > 0:
            seed = self._opened if sampling.seed is None else sampling.seed
            start = crc32(array("q", (seed, start)).tobytes())
        length = None if self._output_tokens is None else self._output_tokens(sequence)
        self._scripts[sequence] = _Script(start, len(prompt), length)

    def end_sequence(self, sequence: SequenceId) -> None:
        """See ``StepExecutor``."""
        self._scripts.pop(sequence, None)

    def run(self, plan: Plan) -> Outcome:
        """See ``StepExecutor``."""
        check_plan(plan, self._limits)
        sampled = []
        for row in plan.rows:
            script = self._script(row)
            if row.sample:
                position = row.past_tokens + len(row.tokens)
                sampled.append(Sampled(row.sequence, self._token(script, position)))
        return Outcome(tuple(sampled), int(self._coefficients.predict_ns(load_of(plan))))

    def foresee(self, plan: Plan, steps: int) -> Stretch:
        """What up to ``steps`` steps of a decode-only plan give; fewer if a sequence stops."""
        scripts = [self._script(row) for row in plan.rows]
        for row, script in zip(plan.rows, scripts, strict=True):
            if script.length is not None:
                made = row.past_tokens + 1 - script.prompt_tokens
                steps = min(steps, script.length - made - 1)
        tokens, load = [], load_of(plan)
        for row, script in zip(plan.rows, scripts, strict=True):
            first = script.start + row.past_tokens + 1
            ids = range(first, first + steps)
            tokens.append(tuple(1 + number % (self._vocab_size - 1) for number in ids))
        durations_ns = []
        for _ in range(steps):
            durations_ns.append(int(self._coefficients.predict_ns(load)))
            load = load.one_step_later()
        return Stretch(tuple(tokens), tuple(durations_ns))

    def close(self) -> None:
        """See ``StepExecutor``."""
        self._scripts = {}

    def _script(self, row: Row) -> _Script:
        script = self._scripts.get(row.sequence)
        if script is None:
            raise StepError(f"sequence {row.sequence} is not open", (row.sequence,))
        return script

    def _token(self, script: _Script, position: int) -> int:
        if script.length is not None and position + 1 - script.prompt_tokens >= script.length:
            return self._end_token
        return 1 + (script.start + position) % (self._vocab_size - 1)


def load_of(plan: Plan) -> Load:
    """What is in a plan, in the terms of the cost model."""
    chunks = [row for row in plan.rows if len(row.tokens) > 1 or not row.sample]
    rows = len(plan.rows) - len(chunks)
    contexts = sum(row.past_tokens + 1 for row in plan.rows if len(row.tokens) == 1 and row.sample)
    load = Load(rows, rows, contexts)
    for row in chunks:
        load = load.with_chunk(row.past_tokens, len(row.tokens))
    return load
