"""A replica on accelerators for a simulated executor: what it holds, how long its steps take.

The same step model as in a plan, asked for one step at a time. ``simulation.py`` and whoever serves
``sim:`` models call this; nothing is decided here.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import exp
from statistics import fmean

from sluice.core.costmodel import Load as StepLoad
from sluice.core.events import ReplicaLimits
from sluice.planner.estimate import Load, places
from sluice.planner.memory import tokens_max
from sluice.planner.predict import StepModel
from sluice.planner.work import Batch, work_of

BLOCK_TOKENS = 64
CONTEXT_TOKENS_UNKNOWN = 1 << 20
# Decode steps are calculated for these numbers of rows, straight between them.
_KNOWN_MAX = 1 << 16
_ROWS_KNOWN = (0, *(1 << power for power in range(13)))


class ReplicaTimes:
    """Step durations of one deployment, for loads as the core counts them.

    ``T = rows + factor x (prefill + KV of the contexts + attention scores of the chunks)``, where
    ``rows`` is what decode rows take without their KV. KV of windowed layers follows its tangent at
    the mean context of ``load``, so that a token of context costs the same wherever it is, which
    lets decode steps be skipped in closed form. Whatever neighbours say, more rows never take less
    time.
    """

    def __init__(self, model: StepModel, load: Load) -> None:
        self._deployment, self._coefficients = model.deployment, model.level[1]
        self._groups = model.deployment.layout.groups
        self._context = load.lengths.resident_tokens
        factors = [exp(model.residual(load.lengths, max(1.0, rows)).mean) for rows in _ROWS_KNOWN]
        self._factor = fmean(factors[: len(_ROWS_KNOWN) - 4])
        device = model.deployment.accelerator
        next_token = model.deployment.kv_bytes(self._context + 1.0)
        slope = next_token - model.deployment.kv_bytes(self._context)
        kv_s = self._coefficients.kv_read * slope / device.bandwidth_bytes_s
        self._kv_ns = 1e9 * kv_s * self._factor / self._groups
        prompt = max(1.0, load.lengths.prompt)
        flops = model.deployment.shape.prefill_attention_flops(0.0, prompt)
        flops /= prompt * (prompt + 1.0) / 2.0 * model.deployment.layout.tensor
        score_s = self._coefficients.scores * flops / device.peak_flops_s("bf16")
        self._score_ns = 1e9 * score_s * self._factor / self._groups
        self._rows_ns = self._without_kv(factors)
        self._known: dict[tuple[int, int], float] = {}

    def predict_ns(self, load: StepLoad) -> float:
        """Duration of a step with this load."""
        tokens, rows, decode_context, chunk_context = load
        known = self._known.get((tokens, rows))
        if known is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            known = self._known[tokens, rows] = self._duration_ns(rows, tokens - rows)
        return known + decode_context * self._kv_ns + chunk_context * self._score_ns

    def _duration_ns(self, rows: int, prefill_tokens: int) -> float:
        """Without what contexts take: rows between those known, and the prefill beside them."""
        at = bisect_right(_ROWS_KNOWN, rows, hi=len(_ROWS_KNOWN) - 1)
        low, high = _ROWS_KNOWN[at - 1], _ROWS_KNOWN[at]
        slope = (self._rows_ns[at] - self._rows_ns[at - 1]) / (high - low)
        rows_ns = self._rows_ns[at - 1] + slope * (rows - low)
        if not prefill_tokens:
            return rows_ns
        beside = self._calculated_ns(rows, prefill_tokens) - self._calculated_ns(rows, 0)
        return rows_ns + beside * self._factor

    def _calculated_ns(self, rows: int, prefill_tokens: int) -> float:
        """By the formula, with all rows at the mean context and no scores of the prefill."""
        batch = Batch(rows / self._groups, self._context, prefill_tokens / self._groups)
        return 1e9 * self._coefficients.step_duration_s(work_of(self._deployment, batch))

    def _without_kv(self, factors: list[float]) -> list[float]:
        """Decode steps with the rows known, less the KV of those rows; never falling."""
        found: list[float] = []
        least_ns = 0.0
        for rows, factor in zip(_ROWS_KNOWN, factors, strict=True):
            kv_ns = rows * self._context * self._kv_ns
            least_ns = max(least_ns, factor * self._calculated_ns(rows, 0) - kv_ns)
            found.append(least_ns)
        return found


@dataclass(frozen=True, slots=True)
class SimulatedReplica:
    """What one replica holds, and how long its steps take."""

    limits: ReplicaLimits
    times: ReplicaTimes


def simulated_replica(model: StepModel, load: Load) -> SimulatedReplica:
    """The replica of a deployment for requests like ``load``, which also bounds its batch.

    Raises ``NoFleet`` where the model does not fit, or not even one such request.
    """
    held, budget = places(model, load)
    deployment = model.deployment
    tokens = int(tokens_max(deployment, budget, load.lengths.resident_tokens))
    blocks = max(1, tokens // BLOCK_TOKENS)
    context = deployment.shape.context_tokens_max or CONTEXT_TOKENS_UNKNOWN
    limits = ReplicaLimits(
        context_tokens_max=min(context, blocks * BLOCK_TOKENS),
        block_size=BLOCK_TOKENS,
        blocks_total=blocks,
        sequences_max=max(1, int(held)),
    )
    return SimulatedReplica(limits, ReplicaTimes(model, load))
