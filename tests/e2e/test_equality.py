"""Exact numerics through the policy: fifty answers, equal token for token however batched.

The engine alone is compared in ``tests/executors``. Here the replica plans: batches, chunks, prefix
cache and preemption are its own, and only the outcome is compared.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.core.events import ReplicaLimits
from sluice.core.request import EndReason, Request, SequenceId
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.core.sampling import Sampling
from sluice.core.step import Plan
from sluice.executors.base import Outcome, TokenMask
from sluice.executors.openvino import OpenVinoExecutor
from sluice.executors.openvino_settings import EngineSettings
from sluice.runtime.model_folder import read_model_folder
from sluice.runtime.tokenizing import Tokenizer
from sluice.testing.replicas import ReplicaRun

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROSE = Path(__file__).parent.parent / "executors" / "prose.txt"
COUNT, OUTPUT = 50, 24
BATCH = BatchingLimits(1024, 32, 400, sequences_max=16)


class Loaded:
    """A loaded executor that several replicas use in turn."""

    def __init__(self, executor: OpenVinoExecutor, limits: ReplicaLimits) -> None:
        self._executor = executor
        self._limits = limits

    def load(self) -> ReplicaLimits:
        return self._limits

    def open_sequence(
        self,
        sequence: SequenceId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        mask: TokenMask | None = None,
    ) -> None:
        self._executor.open_sequence(sequence, sampling, prompt, mask)

    def end_sequence(self, sequence: SequenceId) -> None:
        self._executor.end_sequence(sequence)

    def run(self, plan: Plan) -> Outcome:
        return self._executor.run(plan)

    def close(self) -> None:
        """Left open for the next one."""


@pytest.fixture(scope="module")
def engine(smollm2_folder: Path) -> Iterator[Loaded]:
    executor = OpenVinoExecutor(
        EngineSettings(smollm2_folder, 1024, numerics="exact", kv_bytes=640 << 20, sequences_max=16)
    )
    limits = executor.load()
    assert limits.blocks_total >= BATCH.blocks_total
    yield Loaded(executor, limits)
    executor.close()


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> list[tuple[int, ...]]:
    """Pieces of prose of 4 to 140 tokens; every second one begins like its neighbours."""
    tokens = Tokenizer.load(read_model_folder(smollm2_folder)).encode_text(PROSE.read_text())
    made = []
    for number in range(COUNT):
        size = 4 + number * 37 % 76
        start = number * 61 % (len(tokens) - 80)
        shared = tokens[:64] if number % 2 else ()
        made.append(shared + tokens[start : start + size])
    return made


def answers(
    engine: Loaded, prompts: list[tuple[int, ...]], limits: BatchingLimits
) -> tuple[list[list[int]], ReplicaRun]:
    """All prompts at once on one replica; their greedy tokens."""
    run = ReplicaRun(limits, engine)
    for number, prompt in enumerate(prompts):
        run.submit(Request(f"r{number}", 0, prompt, OUTPUT))
    run.run()
    assert {end.reason for end in run.ends.values()} == {EndReason.LENGTH}
    return [run.tokens[SequenceId(f"r{n}", 0)] for n in range(len(prompts))], run


@pytest.fixture(scope="module")
def alone(engine: Loaded, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What each prompt gives with nothing beside it and nothing before it."""
    limits = replace(BATCH, sequences_max=1, prefix_cache=False, chunk_tokens_max=256)
    given, run = answers(engine, prompts, limits)
    assert max(len(plan.rows) for _, plan in run.steps) == 1
    return given


@pytest.mark.parametrize("cache", [False, True])
def test_a_batch_gives_what_each_prompt_gives_alone(engine, prompts, alone, cache):
    together, run = answers(engine, prompts, replace(BATCH, prefix_cache=cache))
    assert together == alone
    assert max(len(plan.rows) for _, plan in run.steps) == 16
    assert (run.reports[-1].prefix_hit_tokens > 64 * 15) == cache


@pytest.mark.parametrize("chunk", [16, 64])
def test_prompts_in_chunks_give_what_whole_ones_give(engine, prompts, alone, chunk):
    together, run = answers(engine, prompts, replace(BATCH, chunk_tokens_max=chunk))
    assert together == alone
    sizes = [len(row.tokens) for _, plan in run.steps for row in plan.rows if len(row.tokens) > 1]
    assert max(sizes) <= chunk


def test_preempted_answers_are_what_undisturbed_ones_are(engine, prompts, alone):
    """A pool of a quarter of what sixteen need, and a policy that admits by the prompt alone."""
    tiny = replace(BATCH, blocks_total=20, policy=BatchingPolicy.FCFS)
    together, run = answers(engine, prompts, tiny)
    assert run.reports[-1].preemptions > 0
    assert together == alone


_GENAI = """
import json, sys
import numpy as np, openvino as ov, openvino_genai as genai
asked = json.load(sys.stdin)
scheduler = genai.SchedulerConfig()
scheduler.num_kv_blocks = 400
scheduler.enable_prefix_caching = False
pipeline = genai.ContinuousBatchingPipeline(
    asked["folder"], scheduler, "CPU",
    {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
     "KV_CACHE_PRECISION": "f32"},
)
config = genai.GenerationConfig(max_new_tokens=asked["output"], ignore_eos=True, do_sample=False)
prompts = [ov.Tensor(np.array([p], np.int64)) for p in asked["prompts"]]
answers = pipeline.generate(prompts, [config] * len(prompts))
json.dump([list(a.m_generation_ids[0]) for a in answers], sys.stdout)
"""


def test_answers_are_those_of_openvino_genai_on_the_same_model(smollm2_folder, prompts, alone):
    asked = {"folder": str(smollm2_folder), "prompts": prompts, "output": OUTPUT}
    done = subprocess.run(
        [sys.executable, "-c", _GENAI],
        input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == alone
