"""The embedded engine: steps over a paged KV pool with OpenVINO, on the processor.

Decided here: how a plan becomes the inputs of a graph, and how much memory the KV pool takes. The
replica's loop calls it from one thread. Which rows a step has, which blocks they own and when a
sequence ends must not be decided here; how the graph is made is in ``openvino_graph``, how tokens
are chosen in ``sampling``.

``numerics="fast"`` lets a row's result depend on what else is in the step, as kernels are chosen by
size and activations are quantised. ``"exact"`` computes in float32 with float32 KV: greedy output
is the same alone, in any batch and with the prompt in any chunks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import SampledLogprobs, Sampling
from sluice.core.step import Plan, Row, Sampled
from sluice.executors.base import Outcome, StepError, TokenMask
from sluice.executors.openvino_graph import (
    BLOCK_SIZE,
    SAMPLED_ROWS,
    Numerics,
    StepGraph,
    compile_step_graph,
)
from sluice.executors.openvino_memory import (
    KvDemand,
    check_load_memory,
    free_memory_bytes,
    size_kv_pool,
)
from sluice.executors.sampling import (
    NoTokenLeft,
    SequenceSampling,
    choose_tokens,
    open_sampling,
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one embedded replica is made of.

    ``folder`` holds OpenVINO IR. ``context_tokens_max`` bounds prompt plus output of one sequence.
    ``kv_bytes`` is the size of the KV pool; ``None`` sizes it for ``sequences_max`` full contexts,
    or half of the free memory if that is less. ``threads`` is ``None`` for all physical cores.
    """

    folder: Path
    context_tokens_max: int
    numerics: Numerics = "fast"
    kv_bytes: int | None = None
    sequences_max: int = 32
    threads: int | None = None


class OpenVinoExecutor:
    """A ``StepExecutor`` over one compiled graph and one KV pool."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._graph: StepGraph | None = None
        self._kv: dict[str, Any] = {}
        self._request: Any = None
        self._inputs: _StepInputs | None = None
        self._blocks_total = 0
        self._sequences: dict[SequenceId, SequenceSampling] = {}
        self.inferred_ns = 0
        """Time spent inside OpenVINO since the start; the rest of ``run`` is ours."""

    def load(self) -> ReplicaLimits:
        """Compile the model, allocate the pool and warm the kernels up; see ``StepExecutor``."""
        settings = self._settings
        check_load_memory(settings.folder / "openvino_model.bin", free_memory_bytes())
        graph = compile_step_graph(settings.folder, settings.numerics, settings.threads)
        demand = KvDemand(
            block_bytes=graph.block_bytes,
            block_size=BLOCK_SIZE,
            context_tokens_max=settings.context_tokens_max,
            sequences_max=settings.sequences_max,
            kv_bytes=settings.kv_bytes,
        )
        size = size_kv_pool(demand, free_memory_bytes())
        self._kv = {
            name: ov.Tensor(graph.cache_types[name], ov.Shape([size.blocks_total, *shape]))
            for name, shape in graph.cache_shapes.items()
        }
        self._request = graph.compiled.create_infer_request()
        for name, tensor in self._kv.items():
            self._request.set_tensor(name, tensor)
        self._inputs = _StepInputs(self._request)
        self._graph = graph
        self._blocks_total = size.blocks_total
        self._warm_up()
        return ReplicaLimits(
            context_tokens_max=settings.context_tokens_max,
            block_size=BLOCK_SIZE,
            blocks_total=size.blocks_total,
            sequences_max=settings.sequences_max,
            block_bytes=graph.block_bytes,
        )

    def open_sequence(
        self,
        sequence: SequenceId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        mask: TokenMask | None = None,
    ) -> None:
        """Register how a sequence is sampled. Raises ``ValueError`` for parameters out of range."""
        assert self._graph is not None, "open_sequence before load"
        self._sequences[sequence] = open_sampling(
            sampling, prompt, sequence.choice, self._graph.vocab_size, mask
        )

    def end_sequence(self, sequence: SequenceId) -> None:
        """Forget a sequence."""
        self._sequences.pop(sequence, None)

    def run(self, plan: Plan) -> Outcome:
        """Compute a plan. When it raises ``StepError``, only KV cells of the plan have changed."""
        start_ns = time.monotonic_ns()
        assert self._inputs is not None, "run before load"
        sampling_rows = [row for row in plan.rows if row.sample]
        states = [self._state(row) for row in sampling_rows]
        self._check(plan)
        self._inputs.fill(plan.rows)
        filled_ns = time.monotonic_ns()
        try:
            self._request.infer()
        except RuntimeError as error:
            raise StepError(f"OpenVINO failed to compute the step: {error}") from error
        inferred_ns = time.monotonic_ns()
        self.inferred_ns += inferred_ns - filled_ns
        sampled, logprobs = self._sample(sampling_rows, states)
        end_ns = time.monotonic_ns()
        return Outcome(sampled, end_ns - start_ns, end_ns - inferred_ns, logprobs)

    def close(self) -> None:
        """Release the model and the pool."""
        self._inputs = None
        self._request = None
        self._kv = {}
        self._graph = None
        self._sequences = {}

    def _state(self, row: Row) -> SequenceSampling:
        state = self._sequences.get(row.sequence)
        if state is None:
            raise StepError(f"sequence {row.sequence} is not open", (row.sequence,))
        return state

    def _check(self, plan: Plan) -> None:
        """Refuse what the kernels would turn into writes to foreign memory."""
        assert self._graph is not None
        vocab_size = self._graph.vocab_size
        for row in plan.rows:
            cells = row.past_tokens + len(row.tokens)
            if not row.tokens:
                raise StepError("a row has no token", (row.sequence,))
            if len(row.blocks) * BLOCK_SIZE < cells:
                raise StepError(
                    f"{len(row.blocks)} blocks cannot hold {cells} tokens", (row.sequence,)
                )
            if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
                raise StepError(
                    f"a token id is outside the vocabulary of {vocab_size}", (row.sequence,)
                )
            if min(row.blocks) < 0 or max(row.blocks) >= self._blocks_total:
                raise StepError(
                    f"a block is outside the pool of {self._blocks_total}", (row.sequence,)
                )

    def _sample(
        self, rows: Sequence[Row], states: Sequence[SequenceSampling]
    ) -> tuple[tuple[Sampled, ...], dict[SequenceId, SampledLogprobs]]:
        if not rows:
            return (), {}
        output = self._request.get_output_tensor(0).data
        logits = output.reshape(len(rows), -1)
        try:
            tokens, logprobs = choose_tokens(logits, states)
        except NoTokenLeft as error:
            raise StepError(str(error), (rows[error.row].sequence,)) from error
        sampled = tuple(
            Sampled(row.sequence, token) for row, token in zip(rows, tokens.tolist(), strict=True)
        )
        return sampled, {rows[place].sequence: entry for place, entry in logprobs.items()}

    def _warm_up(self) -> None:
        """Compute a chunk and a decode row in the first block, so that kernels exist before use."""
        assert self._inputs is not None
        nobody = SequenceId("", 0)
        tokens = BLOCK_SIZE - 1
        for row in (
            Row(nobody, (0,) * tokens, 0, (0,), sample=True),
            Row(nobody, (0,), tokens, (0,), sample=True),
        ):
            self._inputs.fill([row])
            self._request.infer()


class _StepInputs:
    """The input tensors of one infer request, set once and reshaped in place for each step."""

    _TYPES = (
        ("input_ids", "i64"),
        ("position_ids", "i64"),
        ("past_lens", "i32"),
        ("subsequence_begins", "i32"),
        ("block_indices", "i32"),
        ("block_indices_begins", "i32"),
        (SAMPLED_ROWS, "i64"),
    )

    def __init__(self, request: Any, capacity: int = 4096) -> None:
        """Reserve ``capacity`` elements per input; a larger step makes OpenVINO enlarge them."""
        self._tensors: dict[str, Any] = {}
        for name, kind in self._TYPES:
            tensor = ov.Tensor(getattr(ov.Type, kind), ov.Shape([capacity]))
            self._tensors[name] = tensor
            request.set_tensor(name, tensor)
        self._context_len = ov.Tensor(ov.Type.i32, ov.Shape([]))
        request.set_tensor("max_context_len", self._context_len)

    def fill(self, rows: Sequence[Row]) -> None:
        """Write a step. Steps that sample nothing get one row's logits, which nobody reads."""
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        pasts = np.array([row.past_tokens for row in rows], np.int64)
        begins = np.zeros(len(rows) + 1, np.int64)
        counts.cumsum(out=begins[1:])
        total = int(begins[-1])
        lasts = begins[1:] - 1
        blocks_needed = (pasts + counts + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        block_begins = np.zeros(len(rows) + 1, np.int64)
        blocks_needed.cumsum(out=block_begins[1:])
        sampled = lasts[[row.sample for row in rows]]
        self._put("input_ids", np.fromiter(chain.from_iterable(r.tokens for r in rows), np.int64))
        self._put("position_ids", np.arange(total) + np.repeat(pasts - begins[:-1], counts))
        self._put("past_lens", pasts)
        self._put("subsequence_begins", begins)
        tables = (r.blocks[:n] for r, n in zip(rows, blocks_needed.tolist(), strict=True))
        self._put("block_indices", np.fromiter(chain.from_iterable(tables), np.int32))
        self._put("block_indices_begins", block_begins)
        self._put(SAMPLED_ROWS, sampled if sampled.size else lasts[-1:])
        self._context_len.data[...] = int((pasts + counts).max())

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        tensor = self._tensors[name]
        tensor.shape = [values.size]
        tensor.data[:] = values
