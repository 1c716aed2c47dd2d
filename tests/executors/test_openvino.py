"""The engine on the real model: exactness, rows apart, refusals, quality of the fast mode."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from sluice.core.errors import MemoryShort, ModelLoadError
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row
from sluice.executors.base import StepError
from sluice.executors.openvino import OpenVinoExecutor
from sluice.executors.openvino_inputs import StepInputs
from sluice.executors.openvino_settings import EngineSettings

pytestmark = [pytest.mark.model, pytest.mark.slow]

GREEDY = Sampling(temperature=0.0)
BLOCKS_EACH = 4
OUTPUT_TOKENS = 16

# Ids, not text: the engine knows no text. Lengths cross the edges of blocks of 32.
PROMPTS = [
    tuple(np.random.default_rng(n).integers(300, 40_000, size).tolist())
    for n, size in enumerate([5, 31, 32, 33, 64, 17, 2, 70, 40, 12, 95, 28, 1, 50, 63, 20])
]


def settings(folder: Path, **changes) -> EngineSettings:
    given = {"context_tokens_max": 2048, "kv_bytes": 256 * 2**20, "numerics": "exact", **changes}
    return EngineSettings(folder=folder, **given)


@pytest.fixture(scope="module")
def exact(smollm2_folder: Path) -> Iterator[OpenVinoExecutor]:
    executor = OpenVinoExecutor(settings(smollm2_folder))
    executor.load()
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def fast(smollm2_folder: Path) -> Iterator[OpenVinoExecutor]:
    executor = OpenVinoExecutor(settings(smollm2_folder, numerics="fast"))
    executor.load()
    yield executor
    executor.close()


class Generation:
    """One sequence on its way: what it computes next, and what it has produced."""

    def __init__(self, number: int, prompt: Sequence[int], first_block: int | None = None) -> None:
        self.sequence = SequenceId(f"r{number}", 0)
        self.waiting = tuple(prompt)
        self.past = 0
        start = number * BLOCKS_EACH if first_block is None else first_block
        self.blocks = tuple(range(start, start + BLOCKS_EACH))
        self.output: list[int] = []
        self.logprobs: list[float] = []

    def row(self, chunk: int | None = None) -> Row:
        tokens = self.waiting[:chunk]
        return Row(self.sequence, tokens, self.past, self.blocks, len(tokens) == len(self.waiting))

    def advance(self, row: Row) -> None:
        self.past += len(row.tokens)
        self.waiting = self.waiting[len(row.tokens) :]


def generate(executor, generations, output_tokens=OUTPUT_TOKENS, chunk=None, sampling=GREEDY):
    """Run all sequences together, mixing prompts and decoding, until each has its output."""
    by_sequence = {g.sequence: g for g in generations}
    for g in generations:
        executor.open_sequence(g.sequence, sampling, g.waiting)
    step = 0
    while running := [g for g in generations if len(g.output) < output_tokens]:
        rows = tuple(g.row(chunk) for g in running)
        outcome = executor.run(Plan(step, rows, 0))
        for g, row in zip(running, rows, strict=True):
            g.advance(row)
        for sampled in outcome.sampled:
            g = by_sequence[sampled.sequence]
            g.output.append(sampled.token)
            g.waiting = (sampled.token,)
        for sequence, entry in outcome.logprobs.items():
            by_sequence[sequence].logprobs.append(entry.sampled.logprob)
        step += 1
    for g in generations:
        executor.end_sequence(g.sequence)
    return [g.output for g in generations]


@pytest.fixture(scope="module")
def alone(exact: OpenVinoExecutor) -> list[list[int]]:
    return [generate(exact, [Generation(n, p)])[0] for n, p in enumerate(PROMPTS)]


def test_exact_output_equals_genai_greedy_on_the_same_ir(smollm2_folder, alone):
    import openvino as ov  # noqa: PLC0415
    import openvino_genai as genai  # noqa: PLC0415

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 256
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(
        str(smollm2_folder),
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "KV_CACHE_PRECISION": "f32",
        },
    )
    config = genai.GenerationConfig(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True, do_sample=False)
    prompts = [ov.Tensor(np.array([p], np.int64)) for p in PROMPTS]
    answers = pipeline.generate(prompts, [config] * len(prompts))
    assert [list(a.m_generation_ids[0]) for a in answers] == alone


def test_exact_output_in_a_batch_equals_output_alone(exact, alone):
    assert generate(exact, [Generation(n, p) for n, p in enumerate(PROMPTS)]) == alone


@pytest.mark.parametrize("chunk", [3, 32])
def test_exact_output_of_chunked_prompts_equals_output_of_whole_ones(exact, alone, chunk):
    generations = [Generation(n, p) for n, p in enumerate(PROMPTS)]
    assert generate(exact, generations, chunk=chunk) == alone


def test_blocks_in_any_order_give_the_same_output(exact, alone):
    generation = Generation(10, PROMPTS[10])
    generation.blocks = (37, 4, 90, 11)
    assert generate(exact, [generation]) == [alone[10]]


def test_a_prefix_computed_by_another_sequence_can_be_shared(exact, alone):
    donor, heir = Generation(0, PROMPTS[7]), Generation(1, PROMPTS[7])
    assert generate(exact, [donor]) == [alone[7]]
    shared = 2  # full blocks of the prompt of 70 tokens
    heir.blocks = donor.blocks[:shared] + heir.blocks[shared:]
    heir.past = shared * 32
    heir.waiting = heir.waiting[heir.past :]
    assert generate(exact, [heir]) == [alone[7]]


def test_seeded_sampling_in_a_batch_equals_sampling_alone(exact):
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=11)
    single = [generate(exact, [Generation(n, PROMPTS[n])], sampling=sampling)[0] for n in range(4)]
    together = [Generation(n, PROMPTS[n]) for n in range(4)]
    assert generate(exact, together, sampling=sampling) == single


def test_a_step_larger_than_the_reserved_inputs_gives_the_same_output(exact, alone):
    # Beyond what is reserved, OpenVINO enlarges the tensors; the graph must see the enlarged ones.
    exact._inputs = StepInputs(exact._request, capacity=4)
    assert generate(exact, [Generation(n, p) for n, p in enumerate(PROMPTS[:8])]) == alone[:8]


def test_a_step_that_samples_nothing_has_an_empty_outcome(exact):
    row = Row(SequenceId("x", 0), PROMPTS[4][:10], 0, (0, 1), sample=False)
    outcome = exact.run(Plan(0, (row,), 0))
    assert outcome.sampled == ()
    assert outcome.duration_ns > 0


def row_with(**changes) -> Row:
    given = {"tokens": (5,), "past_tokens": 0, "blocks": (0,), "sample": True, **changes}
    return Row(SequenceId("bad", 0), **given)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (row_with(tokens=(49_152,)), "vocabulary of 49152"),
        (row_with(tokens=(-1,)), "vocabulary"),
        (row_with(tokens=()), "no token"),
        (row_with(blocks=(10**6,)), "outside the pool"),
        (row_with(blocks=(-1,)), "outside the pool"),
        (row_with(past_tokens=32), "1 blocks cannot hold 33 tokens"),
    ],
)
def test_a_row_that_would_touch_foreign_memory_is_blamed_and_not_computed(exact, row, named):
    exact.open_sequence(row.sequence, GREEDY, (5,))
    good = Row(SequenceId("good", 0), (5,), 0, (1,), sample=False)
    with pytest.raises(StepError, match=named) as caught:
        exact.run(Plan(0, (good, row), 0))
    assert caught.value.blamed == (row.sequence,)
    exact.end_sequence(row.sequence)


def test_a_row_of_a_sequence_that_is_not_open_is_blamed(exact):
    with pytest.raises(StepError, match="not open") as caught:
        exact.run(Plan(0, (row_with(),), 0))
    assert caught.value.blamed == (SequenceId("bad", 0),)


class NothingAllowed:
    def fill(self, words: memoryview) -> None:
        """Leave all bits clear."""


def test_a_mask_that_allows_nothing_blames_its_sequence_only(exact):
    good, stuck = Generation(0, PROMPTS[0]), Generation(1, PROMPTS[1])
    exact.open_sequence(good.sequence, GREEDY, good.waiting)
    exact.open_sequence(stuck.sequence, GREEDY, stuck.waiting, NothingAllowed())
    with pytest.raises(StepError) as caught:
        exact.run(Plan(0, (good.row(), stuck.row()), 0))
    assert caught.value.blamed == (stuck.sequence,)
    exact.end_sequence(good.sequence)
    exact.end_sequence(stuck.sequence)


def test_fast_mode_keeps_perplexity_within_one_percent_of_exact(exact, fast, smollm2_folder):
    losses = [teacher_forced_loss(e, text_tokens(smollm2_folder)) for e in (exact, fast)]
    ratio = math.exp(losses[1] - losses[0])
    assert 0.97 < ratio < 1.01


def teacher_forced_loss(executor: OpenVinoExecutor, tokens: Sequence[int]) -> float:
    """Mean negative log-probability per token of the text, its tokens forced by a bias."""
    generations = [
        (Generation(n, ()), tokens[start : start + 100])
        for n, start in enumerate(range(0, len(tokens) - 99, 100))
    ]
    losses: list[float] = []
    for place in range(99):
        rows = []
        for g, text in generations:
            forced = Sampling(temperature=0.0, logit_bias={text[place + 1]: 1e4}, logprobs_top=0)
            executor.open_sequence(g.sequence, forced, ())
            rows.append(Row(g.sequence, (text[place],), place, g.blocks, sample=True))
        outcome = executor.run(Plan(place, tuple(rows), 0))
        losses += [-entry.sampled.logprob for entry in outcome.logprobs.values()]
        assert [s.token for s in outcome.sampled] == [t[place + 1] for _, t in generations]
    return float(np.mean(losses))


def text_tokens(folder: Path) -> list[int]:
    from tokenizers import Tokenizer  # noqa: PLC0415

    text = (Path(__file__).parent / "prose.txt").read_text()
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(smollm2_folder):
    executor = OpenVinoExecutor(settings(smollm2_folder, kv_bytes=2**50))
    with pytest.raises(MemoryShort, match=str(2**50)):
        executor.load()
    executor.close()
    executor.close()


def test_a_folder_without_a_graph_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"openvino_model\.xml"):
        OpenVinoExecutor(settings(tmp_path)).load()


def test_a_damaged_graph_is_refused(tmp_path):
    (tmp_path / "openvino_model.xml").write_text("<net")
    (tmp_path / "openvino_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="cannot load"):
        OpenVinoExecutor(settings(tmp_path)).load()


def test_limits_are_those_of_the_settings_and_the_pool(smollm2_folder):
    executor = OpenVinoExecutor(settings(smollm2_folder, sequences_max=7))
    limits = executor.load()
    executor.close()
    block_bytes = 30 * 2 * 3 * 32 * 64 * 4  # layers, key and value, heads, cells, width, float32
    assert limits.blocks_total == 256 * 2**20 // block_bytes
    assert (limits.block_size, limits.sequences_max, limits.context_tokens_max) == (32, 7, 2048)
