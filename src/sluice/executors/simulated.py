"""A ``StepExecutor`` that computes nothing: its steps take as long as a cost model says.

It never sleeps. The virtual driver advances its clock by the durations; a live driver may wait them
out. Tokens are a function of the sequence and of the position alone, so output does not depend on
batching, chunks, blocks or preemption. ``output_tokens`` says after how many tokens a sequence
gives ``end_token``; without it sequences run to their limit.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple
from zlib import crc32

from sluice.core.batch import Stretch
from sluice.core.costmodel import Load, StepTimes
from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row, Sampled
from sluice.executors.base import Outcome, StepError, TokenMask, check_plan

OutputTokens = Callable[[SequenceId], int | None]


class _Script(NamedTuple):
    """What one sequence generates: consecutive ids from ``start``, ``length`` tokens of them."""

    start: int
    prompt_tokens: int
    length: int | None


class SimulatedExecutor:
    """Deterministic tokens, in steps as long as ``times`` says.

    Plans that cannot be computed are refused where they are ``checked``, which takes as long as
    all else.
    """

    def __init__(
        self,
        limits: ReplicaLimits,
        times: StepTimes,
        *,
        output_tokens: OutputTokens | None = None,
        end_token: int = 0,
        vocab_size: int = 32_000,
        checked: bool = True,
    ) -> None:
        self._limits = limits
        self._times = times
        self._output_tokens = output_tokens
        self._end_token = end_token
        self._vocab_size = vocab_size
        self._checked = checked
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
        if self._checked:
            check_plan(plan, self._limits)
        scripts, new, cycle = self._scripts, tuple.__new__, self._vocab_size - 1
        sampled, contexts, chunks = [], 0, []
        for row in plan.rows:
            sequence, tokens, past_tokens, _, sample = row
            start, prompt_tokens, length = scripts.get(sequence) or self._script(row)
            count = len(tokens)
            position = past_tokens + count
            if sample and count == 1:
                contexts += position
            else:
                chunks.append((past_tokens, count))
                if not sample:
                    continue
            made = position + 1 - prompt_tokens
            token = 1 + (start + position) % cycle
            # Where the first end was not wanted, the next one comes after as many tokens again.
            if length is not None and made >= length and made % length == 0:
                token = self._end_token
            # As ``Sampled(…)``, which takes twice as long.
            sampled.append(new(Sampled, (sequence, token, None)))
        load = _load(len(plan.rows) - len(chunks), contexts, chunks)
        return Outcome(tuple(sampled), int(self._times.predict_ns(load)))

    def foresee(self, plan: Plan, steps: int) -> Stretch:
        """What up to ``steps`` steps of a decode-only plan give; fewer if a sequence stops."""
        scripts, firsts, contexts, rows = self._scripts, [], 0, len(plan.rows)
        for row in plan.rows:
            sequence, _, past_tokens, _, _ = row
            start, prompt_tokens, length = scripts.get(sequence) or self._script(row)
            firsts.append(start + past_tokens + 1)
            contexts += past_tokens + 1
            if length is not None and prompt_tokens + length - past_tokens - 2 < steps:
                steps = prompt_tokens + length - past_tokens - 2
        tokens = tuple([self._tokens(first, steps) for first in firsts])
        new, predict_ns = tuple.__new__, self._times.predict_ns  # one load is made per step
        durations_ns = [
            int(predict_ns(new(Load, (rows, rows, context, 0))))
            for context in range(contexts, contexts + steps * rows, rows)
        ]
        return Stretch(tokens, tuple(durations_ns))

    def _tokens(self, first: int, count: int) -> Seq[int]:
        """So many tokens in a row from a place in the cycle of all ids that end nothing."""
        cycle = self._vocab_size - 1
        begin = 1 + first % cycle
        if begin + count <= self._vocab_size:
            return range(begin, begin + count)
        return tuple(1 + number % cycle for number in range(first, first + count))

    def close(self) -> None:
        """See ``StepExecutor``."""
        self._scripts = {}

    def _script(self, row: Row) -> _Script:
        script = self._scripts.get(row.sequence)
        if script is None:
            raise StepError(f"sequence {row.sequence} is not open", (row.sequence,))
        return script


def load_of(plan: Plan) -> Load:
    """What is in a plan, in the terms of the cost model."""
    decodes = contexts = 0
    chunks = []
    for _, tokens, past_tokens, _, sample in plan.rows:
        if sample and len(tokens) == 1:
            decodes += 1
            contexts += past_tokens + 1
        else:
            chunks.append((past_tokens, len(tokens)))
    return _load(decodes, contexts, chunks)


def _load(decodes: int, contexts: int, chunks: list[tuple[int, int]]) -> Load:
    load = Load(decodes, decodes, contexts)
    for past_tokens, count in chunks:
        load = load.with_chunk(past_tokens, count)
    return load
