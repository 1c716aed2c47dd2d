"""What every ``StepExecutor`` must do, as checks that can be run against any of them.

Each check takes a ``Subject`` and raises ``AssertionError``. ``CHECKS`` are for all executors;
``EXACT_CHECKS`` only for those whose rows do not depend on what else is in the step (any executor
in its exact numerics). Each check uses its own sequences and blocks, so that one loaded executor
serves all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row
from sluice.executors.base import Outcome, StepError, StepExecutor

GREEDY = Sampling(temperature=0.0)
NEW_TOKENS = 6


@dataclass(slots=True)
class Subject:
    """A loaded executor under test, and ids for the next sequence and step.

    ``prompts`` are token ids that the model knows: at least three, of different lengths, the first
    longer than one block and none longer than three.
    """

    executor: StepExecutor
    limits: ReplicaLimits
    prompts: Sequence[tuple[int, ...]]
    numbers: list[int] = field(default_factory=lambda: [0])

    def open(self, prompt: tuple[int, ...], sampling: Sampling = GREEDY) -> SequenceId:
        """Open a sequence under an id that was not used before."""
        self.numbers[0] += 1
        sequence = SequenceId(f"conformance-{self.numbers[0]}", 0)
        self.executor.open_sequence(sequence, sampling, prompt)
        return sequence

    def run(self, rows: Sequence[Row]) -> Outcome:
        """Compute one step."""
        self.numbers[0] += 1
        return self.executor.run(Plan(self.numbers[0], tuple(rows), 0))


@dataclass(slots=True)
class Script:
    """One sequence that is driven by hand: tokens known, tokens computed, blocks."""

    sequence: SequenceId
    tokens: list[int]
    blocks: tuple[int, ...]
    computed: int = 0

    def row(self, count: int | None = None) -> Row:
        """The next ``count`` tokens, all pending ones by default; samples after the last."""
        end = len(self.tokens) if count is None else min(len(self.tokens), self.computed + count)
        tokens = tuple(self.tokens[self.computed : end])
        return Row(
            self.sequence, tokens, self.computed, self.blocks, sample=end == len(self.tokens)
        )


def blocks_at(subject: Subject, first: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Consecutive blocks from ``first`` for a prompt and ``NEW_TOKENS`` more."""
    count = -(-(len(prompt) + NEW_TOKENS) // subject.limits.block_size)
    assert first + count <= subject.limits.blocks_total, "the pool is too small for the checks"
    return tuple(range(first, first + count))


def advance(subject: Subject, scripts: Sequence[Script], chunks: Sequence[int | None]) -> None:
    """One step with a row of each script; decode rows must come first."""
    rows = [script.row(count) for script, count in zip(scripts, chunks, strict=True)]
    sampled = {each.sequence: each.token for each in subject.run(rows).sampled}
    for script, row in zip(scripts, rows, strict=True):
        script.computed += len(row.tokens)
        if row.sample:
            script.tokens.append(sampled[script.sequence])


def generate(
    subject: Subject,
    prompt: tuple[int, ...],
    blocks: tuple[int, ...],
    *,
    sampling: Sampling = GREEDY,
    chunk: int | None = None,
) -> list[int]:
    """The first ``NEW_TOKENS`` tokens of a prompt that is alone in each step."""
    script = Script(subject.open(prompt, sampling), list(prompt), blocks)
    while len(script.tokens) < len(prompt) + NEW_TOKENS:
        advance(subject, [script], [chunk])
    subject.executor.end_sequence(script.sequence)
    return script.tokens[len(prompt) :]


def answers_sampling_rows_in_order(subject: Subject) -> None:
    """One token for each row that samples, in row order, none for the others."""
    scripts = []
    first = 0
    for prompt in subject.prompts[:3]:
        blocks = blocks_at(subject, first, prompt)
        scripts.append(Script(subject.open(prompt), list(prompt), blocks))
        first += len(blocks)
    rows = [scripts[1].row(), scripts[0].row(3), scripts[2].row()]
    outcome = subject.run(rows)
    assert [each.sequence for each in outcome.sampled] == [rows[0].sequence, rows[2].sequence]
    assert all(each.stop is None for each in outcome.sampled)
    assert outcome.duration_ns >= outcome.sampling_ns >= 0


def repeats_greedy_output(subject: Subject) -> None:
    """The same prompt alone gives the same greedy tokens each time."""
    prompt = subject.prompts[0]
    blocks = blocks_at(subject, 0, prompt)
    assert generate(subject, prompt, blocks) == generate(subject, prompt, blocks)


def repeats_sampled_output_by_seed(subject: Subject) -> None:
    """A seed fixes what is sampled; another one gives something else sooner or later."""
    prompt = subject.prompts[0]
    blocks = blocks_at(subject, 0, prompt)

    def sample(seed: int) -> list[int]:
        return generate(subject, prompt, blocks, sampling=Sampling(seed=seed))

    assert sample(7) == sample(7)
    assert any(sample(seed) != sample(7) for seed in (8, 9, 10))


def ignores_which_blocks_are_used(subject: Subject) -> None:
    """Another order of blocks in the pool changes nothing."""
    prompt = subject.prompts[0]
    blocks = blocks_at(subject, 2, prompt)
    assert generate(subject, prompt, blocks) == generate(subject, prompt, blocks[::-1])


def ignores_blocks_beyond_the_tokens(subject: Subject) -> None:
    """A block table may be longer than the tokens need."""
    prompt = subject.prompts[0]
    blocks = blocks_at(subject, 0, prompt)
    longer = (*blocks, blocks[-1] + 1, blocks[-1] + 2)
    assert generate(subject, prompt, blocks) == generate(subject, prompt, longer)


def forgets_what_ended(subject: Subject) -> None:
    """An ended id can be opened again; ending an unknown one is ignored; closing twice is safe."""
    prompt = subject.prompts[1]
    sequence = subject.open(prompt)
    subject.executor.end_sequence(sequence)
    subject.executor.end_sequence(sequence)
    subject.executor.open_sequence(sequence, GREEDY, prompt)
    script = Script(sequence, list(prompt), blocks_at(subject, 0, prompt))
    advance(subject, [script], [None])
    assert len(script.tokens) == len(prompt) + 1


def blames_the_sequence_at_fault(subject: Subject) -> None:
    """A row without its sequence or its cells raises ``StepError`` and harms nobody."""
    prompt = subject.prompts[0]
    blocks = blocks_at(subject, 0, prompt)
    before = generate(subject, prompt, blocks)
    good = Script(subject.open(prompt), list(prompt), blocks)
    stranger = SequenceId("conformance-stranger", 0)
    far = max(blocks) + 1
    unopened = Row(stranger, prompt, 0, tuple(range(far, far + len(blocks))), sample=True)
    without_cells = Row(subject.open(prompt), prompt, 0, (), sample=True)
    for row in (unopened, without_cells):
        try:
            subject.run([good.row(), row])
        except StepError as error:
            assert error.blamed == (row.sequence,)  # noqa: PT017 - no pytest in what we ship
        else:
            raise AssertionError("a row that cannot be computed was computed")
    assert generate(subject, prompt, blocks) == before


def computes_in_chunks_as_in_one(subject: Subject) -> None:
    """A prompt in chunks of three gives what it gives whole."""
    prompt = subject.prompts[0]
    blocks = blocks_at(subject, 0, prompt)
    assert generate(subject, prompt, blocks, chunk=3) == generate(subject, prompt, blocks)


def computes_in_a_batch_as_alone(subject: Subject) -> None:
    """Decode rows beside each other and beside another's prefill give what they give alone."""
    alone, scripts, first = [], [], 0
    for prompt in subject.prompts[:3]:
        blocks = blocks_at(subject, first, prompt)
        first += len(blocks)
        alone.append(generate(subject, prompt, blocks))
        scripts.append(Script(subject.open(prompt), list(prompt), blocks))
    advance(subject, scripts[:1], [None])
    third = -(-len(subject.prompts[1]) // 3)
    for _ in range(3):  # decode beside a chunk
        advance(subject, scripts[:2], [None, third])
    advance(subject, scripts, [None, None, None])
    while any(len(s.tokens) < len(p) + NEW_TOKENS for s, p in _pairs(subject, scripts)):
        left = [s for s, p in _pairs(subject, scripts) if len(s.tokens) < len(p) + NEW_TOKENS]
        advance(subject, left, [None] * len(left))
    for script, prompt, tokens in zip(scripts, subject.prompts, alone, strict=False):
        assert script.tokens[len(prompt) : len(prompt) + NEW_TOKENS] == tokens


def shares_blocks_of_an_equal_prefix(subject: Subject) -> None:
    """A sequence that starts behind another's first block continues as if it had computed it."""
    prompt, size = subject.prompts[0], subject.limits.block_size
    blocks = blocks_at(subject, 0, prompt)
    first = generate(subject, prompt, blocks)
    far = max(blocks) + 1
    own = tuple(range(far, far + len(blocks) - 1))
    script = Script(subject.open(prompt), list(prompt), (blocks[0], *own), computed=size)
    while len(script.tokens) < len(prompt) + NEW_TOKENS:
        advance(subject, [script], [None])
    assert script.tokens[len(prompt) :] == first


def samples_by_seed_in_a_batch_as_alone(subject: Subject) -> None:
    """A seeded sequence samples the same whatever shares its steps.

    Among few candidates: over a whole vocabulary the last bits of the logits, which may depend on
    the shape of a step, decide between neighbours now and then.
    """
    prompt, other = subject.prompts[0], subject.prompts[1]
    blocks = blocks_at(subject, 0, prompt)
    seeded = Sampling(seed=11, top_k=8)
    alone = generate(subject, prompt, blocks, sampling=seeded)
    beside = blocks_at(subject, max(blocks) + 1, other)
    scripts = [
        Script(subject.open(prompt, seeded), list(prompt), blocks),
        Script(subject.open(other, Sampling(seed=99)), list(other), beside),
    ]
    for _ in range(NEW_TOKENS):
        advance(subject, scripts, [None, None])
    assert scripts[0].tokens[len(prompt) :] == alone


def _pairs(subject: Subject, scripts: Sequence[Script]) -> list[tuple[Script, tuple[int, ...]]]:
    return list(zip(scripts, subject.prompts, strict=False))


Check = Callable[[Subject], None]

CHECKS: tuple[Check, ...] = (
    answers_sampling_rows_in_order,
    repeats_greedy_output,
    repeats_sampled_output_by_seed,
    ignores_which_blocks_are_used,
    ignores_blocks_beyond_the_tokens,
    forgets_what_ended,
    blames_the_sequence_at_fault,
)

EXACT_CHECKS: tuple[Check, ...] = (
    computes_in_chunks_as_in_one,
    computes_in_a_batch_as_alone,
    shares_blocks_of_an_equal_prefix,
    samples_by_seed_in_a_batch_as_alone,
)
