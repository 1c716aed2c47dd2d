"""A simulated executor on the wall clock: each step returns when it would be over.

For a replica process whose model exists as a cost model only. Steps follow each other as on a
device: what the process itself needs between two of them (planning, text, sending) is made up for,
as engines hide it behind the running step, as far as ``LAG_NS_MAX`` goes. How long answers get is
decided here too, since nothing is sampled.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from zlib import crc32

from sluice.core.costmodel import StepTimes
from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan
from sluice.executors.base import Outcome, TokenMask
from sluice.executors.simulated import SimulatedExecutor

# A machine that is busy makes up for so much; what it is later than that is lost time.
LAG_NS_MAX = 50_000_000
# Lengths of answers that nothing limits, equally likely: quantiles of a log-normal distribution
# with a median of 150 tokens, as chats have.
ANSWER_TOKENS = (28, 48, 64, 79, 95, 112, 130, 150, 173, 201, 236, 284, 353, 468, 810)


class PacedExecutor:
    """A ``StepExecutor`` that takes the time of ``times`` for each step.

    ``clock`` gives monotonic nanoseconds, ``sleep_until`` returns when they are reached. Tokens are
    below ``vocab_size``; 0 ends an answer.
    """

    def __init__(
        self,
        limits: ReplicaLimits,
        times: StepTimes,
        vocab_size: int,
        clock: Callable[[], int],
        sleep_until: Callable[[int], None],
    ) -> None:
        self.unpaced = SimulatedExecutor(
            limits, times, output_tokens=self._answer_tokens, vocab_size=vocab_size
        )
        self._answers: dict[SequenceId, int] = {}
        self._clock = clock
        self._sleep_until = sleep_until
        self._ended_ns = 0
        self._rows: frozenset[SequenceId] = frozenset()

    def load(self) -> ReplicaLimits:
        """See ``StepExecutor``."""
        return self.unpaced.load()

    def open_sequence(
        self,
        sequence: SequenceId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        mask: TokenMask | None = None,
    ) -> None:
        """See ``StepExecutor``. The length of the answer follows from prompt, seed and choice."""
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + sequence.choice)
        key = (*prompt, sequence.choice, sampling.seed or 0)
        number = crc32(array("q", key).tobytes())
        self._answers[sequence] = ANSWER_TOKENS[number % len(ANSWER_TOKENS)]
        self.unpaced.open_sequence(sequence, sampling, prompt, mask)

    def _answer_tokens(self, sequence: SequenceId) -> int | None:
        return self._answers.get(sequence)

    def end_sequence(self, sequence: SequenceId) -> None:
        """See ``StepExecutor``."""
        self._answers.pop(sequence, None)
        self.unpaced.end_sequence(sequence)

    def run(self, plan: Plan) -> Outcome:
        """See ``StepExecutor``. A step that goes on with sequences of the one before begins at its
        end, since nobody was idle; ``duration_ns`` has the time in it that was lost."""
        outcome = self.unpaced.run(plan)
        rows = frozenset(row.sequence for row in plan.rows)
        began_ns, lost_ns = self._clock(), 0
        if not rows.isdisjoint(self._rows):
            began_ns = max(self._ended_ns, began_ns - LAG_NS_MAX)
            lost_ns = began_ns - self._ended_ns
        self._rows, self._ended_ns = rows, began_ns + outcome.duration_ns
        self._sleep_until(self._ended_ns)
        return replace(outcome, duration_ns=outcome.duration_ns + lost_ns)

    def close(self) -> None:
        """See ``StepExecutor``."""
        self.unpaced.close()
