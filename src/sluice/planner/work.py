"""What a device has to do in one step, at the peak rates of its specification.

Counts bytes, operations and launches of a batch for a model on an accelerator; ``coefficients.py``
turns them into time. The terms follow roofline accounting with the refinements that serving needs:
weights of experts are read as far as tokens touch them, KV is counted per class of layers, and
multiplication uses the peak of the activations' format, not of the weights'.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sluice.planner.formats import BYTES_PER_VALUE, Precision
from sluice.planner.hardware import Accelerator
from sluice.planner.names import CannotPlan, Indivisible
from sluice.planner.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    """How one replica is spread: ``tensor`` devices share attention, ``groups`` of them share
    the experts, which are divided over all devices of the replica."""

    tensor: int = 1
    groups: int = 1

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.groups


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model in a precision on devices: everything that a step's work depends on but the batch.

    ``file_bytes`` is the size of the weights where their files are at hand; ``beside`` names other
    weights that lie on every device, such as a vision encoder or a draft model, with their bytes.
    """

    shape: ModelShape
    accelerator: Accelerator
    precision: Precision
    layout: Layout
    file_bytes: float | None = None
    beside: tuple[tuple[str, float], ...] = ()

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of KV that one device keeps for a sequence of ``tokens``."""
        values = self.shape.kv_values(tokens, self.layout.tensor)
        return values * BYTES_PER_VALUE[self.precision.kv]

    @property
    def outside_format(self) -> str:
        """Format of the weights outside dense feed-forward and experts."""
        return self.shape.attention_weights or self.precision.attention or self.precision.weights

    @property
    def dense_bytes(self) -> float:
        """Bytes of weights on one device that every step reads."""
        outside = self.shape.attention_params + self.shape.head_params
        inside = self.shape.feed_forward_params
        total = outside * BYTES_PER_VALUE[self.outside_format]
        total += inside * BYTES_PER_VALUE[self.precision.weights]
        return total / self.layout.tensor

    @property
    def expert_bytes(self) -> float:
        """Bytes of routed experts on one device."""
        total = self.shape.expert_params * BYTES_PER_VALUE[self.precision.weights]
        return total / self.layout.devices

    @property
    def weights_bytes(self) -> float:
        """Bytes of all weights on one device; the embeddings stay in 16 bits."""
        if self.file_bytes is not None:
            return self.file_bytes / self.layout.devices
        embeddings = 0 if self.shape.tied_embeddings else self.shape.head_params * 2.0
        return self.dense_bytes + self.expert_bytes + embeddings / self.layout.tensor


class Batch(NamedTuple):
    """One step of one group: decode rows with their mean context, and prefill tokens that come in
    prompts of ``prompt_tokens`` behind ``past_tokens`` that are cached."""

    rows: float
    context_tokens: float
    prefill_tokens: float = 0.0
    prompt_tokens: float = 0.0
    past_tokens: float = 0.0


class Work(NamedTuple):
    """Counts, and seconds at peak rates (``_s``), of one device in one step."""

    layers: float
    expert_layers: float
    latent_layers: float
    state_layers: float
    rows: float
    dense_read_s: float
    expert_read_s: float
    dense_multiply_s: float
    expert_multiply_s: float
    dense_prefill_s: float
    expert_prefill_s: float
    kv_read_s: float
    scores_s: float
    reductions: float
    reduce_s: float
    pcie_reductions: float
    pcie_reduce_s: float
    exchanges: float
    exchange_s: float


def checked_layout(shape: ModelShape, layout: Layout) -> Layout:
    """``layout``, if the model can be spread so; raises ``CannotPlan`` otherwise."""
    for name, count in (("tensor", layout.tensor), ("data", layout.groups)):
        if not 1 <= count <= 1024:
            raise CannotPlan(f"{name} parallelism must be 1 to 1024, not {count}")
    if shape.hidden % layout.tensor:
        near = max(d for d in range(1, layout.tensor) if shape.hidden % d == 0)
        raise Indivisible(
            f"{shape.name} cannot be divided by {layout.tensor}: its hidden size is "
            f"{shape.hidden}; the nearest below is {near}"
        )
    return layout


def work_of(deployment: Deployment, batch: Batch) -> Work:
    """What one device does for this batch in one step."""
    shape, device = deployment.shape, deployment.accelerator
    tensor, groups = deployment.layout.tensor, deployment.layout.groups
    tokens = batch.rows + batch.prefill_tokens
    dense_s, expert_s = _multiply_s_per_token(deployment)
    scores = shape.prefill_attention_flops(batch.past_tokens, batch.prompt_tokens)
    prompts = batch.prefill_tokens / batch.prompt_tokens if batch.prompt_tokens else 0.0
    kv_bytes = batch.rows * deployment.kv_bytes(batch.context_tokens)
    slow = float(tensor > 1 and device.link == "pcie")
    fast = float(tensor > 1 and device.link != "pcie")
    reduced_bytes = 2 * shape.layers * tokens * shape.hidden * 2.0
    reduce_s = 2 * (tensor - 1) / tensor * reduced_bytes / device.link_bytes_s
    experts = shape.experts
    spread = float(experts is not None and groups > 1)
    moved = 0.0
    if experts is not None:
        # Out in 8 bits and back in 16, as fast expert-parallel kernels do.
        moved = tokens * experts.per_token * shape.hidden * 3.0 * experts.layers
    return Work(
        layers=shape.layers,
        expert_layers=0 if experts is None else experts.layers,
        latent_layers=shape.latent_layers,
        state_layers=shape.state_layers,
        rows=batch.rows,
        dense_read_s=deployment.dense_bytes / device.bandwidth_bytes_s,
        expert_read_s=touched(shape, tokens * groups)
        * deployment.expert_bytes
        / device.bandwidth_bytes_s,
        dense_multiply_s=batch.rows * dense_s,
        expert_multiply_s=batch.rows * expert_s,
        dense_prefill_s=batch.prefill_tokens * dense_s,
        expert_prefill_s=batch.prefill_tokens * expert_s,
        kv_read_s=kv_bytes / device.bandwidth_bytes_s,
        scores_s=prompts * scores / tensor / device.peak_flops_s("bf16"),
        reductions=fast * 2 * shape.layers,
        reduce_s=fast * reduce_s,
        pcie_reductions=slow * 2 * shape.layers,
        pcie_reduce_s=slow * reduce_s,
        exchanges=spread * 2 * (0 if experts is None else experts.layers),
        exchange_s=spread * moved * (groups - 1) / groups / device.link_bytes_s,
    )


def touched(shape: ModelShape, tokens: float) -> float:
    """Share of the experts that ``tokens`` reach when they choose evenly."""
    if shape.experts is None:
        return 0.0
    left_alone = 1.0 - shape.experts.per_token / shape.experts.count
    return 1.0 - float(left_alone**tokens)


def _multiply_s_per_token(deployment: Deployment) -> tuple[float, float]:
    """Seconds per token of dense and of expert multiplication on one device, at peak."""
    shape, device = deployment.shape, deployment.accelerator
    inside = device.peak_flops_s(deployment.precision.activations)
    outside = inside
    if deployment.outside_format in {"bf16", "fp16", "fp32"}:
        outside = device.peak_flops_s("bf16")
    dense_s = 2.0 * (shape.attention_params + shape.head_params) / outside
    dense_s += 2.0 * shape.feed_forward_params / inside
    if shape.experts is None:
        return dense_s / deployment.layout.tensor, 0.0
    used = shape.expert_params * shape.experts.per_token / shape.experts.count
    # Each group brings its own tokens, and all devices share the experts.
    expert_s = 2.0 * used / inside / deployment.layout.tensor
    return dense_s / deployment.layout.tensor, expert_s
