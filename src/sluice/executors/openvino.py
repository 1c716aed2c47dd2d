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
from typing import Any

import openvino as ov

from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row
from sluice.executors.base import Outcome, StepError, TokenMask, check_plan
from sluice.executors.kv_pages import PagesAhead, spans_of
from sluice.executors.large_pages import use_large_pages
from sluice.executors.openvino_graph import (
    BLOCK_SIZE,
    StepGraph,
    compile_step_graph,
)
from sluice.executors.openvino_inference import infer, sample, warm_up
from sluice.executors.openvino_inputs import StepInputs, check_tokens
from sluice.executors.openvino_memory import (
    KvDemand,
    check_load_memory,
    free_memory_bytes,
    size_kv_pool,
)
from sluice.executors.openvino_settings import EngineSettings
from sluice.executors.sampling import SequenceSampling, open_sampling


class OpenVinoExecutor:
    """A ``StepExecutor`` over one compiled graph and one KV pool."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._graph: StepGraph | None = None
        self._kv: dict[str, Any] = {}
        self._request: Any = None
        self._inputs: StepInputs | None = None
        self._pages: PagesAhead | None = None
        self._limits: ReplicaLimits | None = None
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
        self._inputs = StepInputs(self._request)
        self._graph = graph
        warm_up(self._request, self._inputs)
        use_large_pages()  # after the first steps, which allocate what all later ones use
        self._pages = PagesAhead(spans_of(self._kv.values()), size.blocks_total)
        self._pages.reach(0)
        self._limits = ReplicaLimits(
            context_tokens_max=settings.context_tokens_max,
            block_size=BLOCK_SIZE,
            blocks_total=size.blocks_total,
            sequences_max=settings.sequences_max,
            block_bytes=graph.block_bytes,
        )
        return self._limits

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
        assert self._graph is not None, "run before load"
        assert self._limits is not None, "run before load"
        assert self._inputs is not None, "run before load"
        assert self._pages is not None, "run before load"
        sampling_rows = [row for row in plan.rows if row.sample]
        states = [self._state(row) for row in sampling_rows]
        check_plan(plan, self._limits)
        check_tokens(plan.rows, self._graph.vocab_size)
        self._pages.reach(max(block for row in plan.rows for block in row.blocks))
        self._inputs.fill(plan.rows)
        filled_ns = time.monotonic_ns()
        infer(self._request)
        inferred_ns = time.monotonic_ns()
        self.inferred_ns += inferred_ns - filled_ns
        sampled, logprobs = sample(self._request, sampling_rows, states)
        end_ns = time.monotonic_ns()
        return Outcome(sampled, end_ns - start_ns, end_ns - inferred_ns, logprobs)

    def close(self) -> None:
        """Release the model and the pool."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
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
