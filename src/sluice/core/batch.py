"""One step: the sequences in it, the plan that an executor gets, and what its result changes.

Made by ``core/batching.py``, held by ``core/replica.py`` while it runs. A ``Stretch`` is entered as
its steps would be one by one. Nothing is admitted, preempted or ended here.
"""

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

from sluice.core.costmodel import Load
from sluice.core.kv import BlockLedger
from sluice.core.lifecycle import SequenceState
from sluice.core.request import EndReason
from sluice.core.sequence import Generation, Sequence
from sluice.core.step import Plan, Row, Sampled


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps of one and the same decode-only plan, computed in one go.

    ``tokens`` holds, per row of the plan, the token sampled in each of the steps; ``durations_ns``
    how long each step took.
    """

    tokens: tuple[Seq[int], ...]
    durations_ns: tuple[int, ...]


Complete = tuple[Sequence, EndReason]


@dataclass(slots=True)
class Batch:
    """The sequences of a step: one token of each in ``decodes``, so many of each in ``chunks``."""

    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]
    load: Load

    def holds(self, generation: Generation) -> bool:
        """Whether a sequence of this request is in the step."""
        sequences = chain(self.decodes, (sequence for sequence, _ in self.chunks))
        return any(sequence.generation is generation for sequence in sequences)

    def leave_out(self, rows: Seq[Sequence]) -> bool:
        """Take these decode rows out of the step; whether there were any."""
        if rows:
            self.decodes = [sequence for sequence in self.decodes if sequence not in rows]
            self.load = self.load.without_rows(len(rows), sum(s.computed + 1 for s in rows))
        return bool(rows)

    def plan(self, step: int, predicted_ns: int) -> Plan:
        """The step as an executor gets it."""
        # As ``Row(…)``, which takes twice as long: one is made per sequence and step.
        new = tuple.__new__
        rows = [
            new(Row, (s.id, (s.tokens[-1],), s.computed, s.table.ids, True)) for s in self.decodes
        ]
        for s, count in self.chunks:
            end = s.computed + count
            tokens = tuple(s.tokens[s.computed : end])
            rows.append(Row(s.id, tokens, s.computed, s.table.ids, sample=end == len(s.tokens)))
        return Plan(step, tuple(rows), predicted_ns)

    def credit(
        self, sampled: Seq[Sampled], ledger: BlockLedger, now_ns: int
    ) -> tuple[list[Sampled], list[Complete]]:
        """Enter the step's result: KV computed, and one token per sampling row.

        Returns the tokens to pass on, of requests that are not leaving, and the sequences that are
        complete with them.
        """
        emitted: list[Sampled] = []
        complete: list[Complete] = []
        size, fresh = ledger.block_size, list(zip(self.decodes, sampled, strict=False))
        for sequence in self.decodes:
            computed = sequence.computed = sequence.computed + 1
            if computed % size == 0:
                ledger.publish(sequence.table, sequence.tokens, computed)
        tokens = iter(sampled[len(fresh) :])
        for sequence, count in self.chunks:
            if count == sequence.pending:
                fresh.append((sequence, next(tokens)))
            sequence.computed += count
            if sequence.computed % size < count:
                ledger.publish(sequence.table, sequence.tokens, sequence.computed)
        for sequence, token in fresh:
            if sequence.generation.leaving:
                continue
            if sequence.state is SequenceState.PREFILL:
                sequence.begin_decode(now_ns)
            sequence.tokens.append(token[1])
            produced = sequence.produced = sequence.produced + 1
            emitted.append(token)
            if token[2] is not None:
                complete.append((sequence, EndReason.STOP))
            elif produced >= sequence.output_limit:
                complete.append((sequence, EndReason.LENGTH))
        return emitted, complete

    # --------------------------------------------------------------------------------- stretches

    def steps_ahead(self, steps_max: int, ledger: BlockLedger) -> int:
        """Further steps of these decode rows, at most so many, in which none reaches its limit and
        blocks suffice."""

        size, available = ledger.block_size, ledger.available

        def exceeds(steps: int) -> bool:
            missing = 0
            for s in self.decodes:
                lacking = -(-(s.computed + 1 + steps) // size) - len(s.table.blocks)
                if lacking > 0:
                    missing += lacking
            return missing > available

        remaining = min([steps_max + 1, *[s.output_limit - s.produced for s in self.decodes]])
        # Each row has its next cell, so that it cannot lack more than this.
        ample = len(self.decodes) * -(-remaining // size) <= available
        if remaining > 1 and (ample or not exceeds(remaining - 1)):
            return remaining - 1
        return bisect_left(range(1, remaining), x=True, key=exceeds)

    def skip(self, stretch: Stretch, ledger: BlockLedger) -> None:
        """Bring tokens and blocks to where the steps of the stretch would have, one by one.

        Blocks are taken and published in the order in which single steps would do it: per step,
        first all publications of its result, then all extensions of the plan that follows.
        """
        steps, size = len(stretch.durations_ns), ledger.block_size
        full: list[tuple[int, int, int]] = []
        for place, (sequence, tokens) in enumerate(zip(self.decodes, stretch.tokens, strict=True)):
            sequence.tokens.extend(tokens)
            first = -sequence.computed % size or size
            if first <= steps:
                for step in range(first, steps + 1, size):
                    full += [(step, 0, place), (step, 1, place)]
            sequence.computed += steps
            sequence.produced += steps
        for step, extends, place in sorted(full):
            sequence = self.decodes[place]
            cells = sequence.computed - steps + step
            if extends:
                ledger.grow(sequence.table, cells + 1)
            else:
                ledger.publish(sequence.table, sequence.tokens, cells)
