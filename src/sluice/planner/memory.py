"""What fits into a device: weights, buffers, KV pool, and how many sequences that holds.

Every line of a budget is kept, so that a verdict can be shown with what it rests on. Asked by
``estimate.py`` for a load and by ``slots.py`` for a fixed number of slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sluice.planner.formats import BYTES_PER_VALUE, PRECISIONS
from sluice.planner.names import NoFleet
from sluice.planner.shapes import ModelShape
from sluice.planner.work import Deployment

GIB = 2**30
# Share of the memory that engines take by default.
MEMORY_SHARE = 0.9
# Peak of activations at 8,192 tokens per step: medians of the measured start-up profiles of vLLM.
ACTIVATION_GIB = 5.0
EXPERT_ACTIVATION_GIB = 7.4
# On small devices the engine takes smaller steps instead.
ACTIVATION_SHARE_MAX = 0.1
# What communication and runtime hold outside the engine's own allocator, alone and in a group.
RUNTIME_GIB = 0.13
GROUP_RUNTIME_GIB = 0.55
GRAPHS_GIB = 0.5
# As far as one model is spread over devices in practice.
DEVICES_TRIED_MAX = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one device by what takes it, in bytes. ``files`` are extra weights by name, such
    as a vision encoder or a draft model."""

    device_bytes: float
    margin_bytes: float
    weights_bytes: float
    buffers_bytes: float
    files_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def pool_bytes(self) -> float:
        """What is left for KV; negative where not even the weights fit."""
        taken = self.margin_bytes + self.weights_bytes + self.buffers_bytes
        return self.device_bytes - taken - sum(self.files_bytes.values())

    def lines(self) -> dict[str, float]:
        """Each line of the budget in bytes, in the order of reading."""
        return {
            "device": self.device_bytes,
            "margin": self.margin_bytes,
            "weights": self.weights_bytes,
            "buffers": self.buffers_bytes,
            **self.files_bytes,
            "left for KV": self.pool_bytes,
        }


class NoRoom(NoFleet):
    """The model, or one request beside it, does not fit; the message has each line of the budget
    and the nearest that fits."""

    def __init__(self, deployment: Deployment, budget: Budget, tokens: float) -> None:
        lines = ", ".join(f"{name} {value / GIB:.1f} GiB" for name, value in budget.lines().items())
        share = 1.0 - budget.margin_bytes / budget.device_bytes
        super().__init__(
            f"{deployment.shape.name} in {deployment.precision.weights} does not fit on "
            f"{deployment.layout.devices} x {deployment.accelerator.name} with requests of "
            f"{tokens:,.0f} tokens ({lines}, per device); {_nearest(deployment, tokens, share)}"
        )


def _nearest(deployment: Deployment, tokens: float, memory_share: float) -> str:
    """What would fit: more devices per replica, smaller formats, or else what to change."""

    def fits(tried: Deployment) -> bool:
        budget = budget_of(tried, memory_share=memory_share)
        return sequences_max(tried, budget, tokens) >= tried.layout.groups

    found = []
    tensor = 2 * deployment.layout.tensor
    while tensor <= DEVICES_TRIED_MAX and not deployment.shape.hidden % tensor:
        layout = replace(deployment.layout, tensor=tensor)
        if fits(replace(deployment, layout=layout)):
            found.append(f"--tp {tensor}")
            break
        tensor *= 2
    peaks = {"fp8": deployment.accelerator.fp8_tflops, "fp4": deployment.accelerator.fp4_tflops}
    now = BYTES_PER_VALUE[deployment.precision.weights]
    for name in ("fp8", "fp4", "int4"):
        precision = PRECISIONS[name]
        smaller = BYTES_PER_VALUE[precision.weights] < now and deployment.file_bytes is None
        if smaller and peaks.get(name, 1.0) and fits(replace(deployment, precision=precision)):
            found.append(f"--precision {name}")
            break
    if found:
        return f"it fits with {' or '.join(found)}"
    return "use a smaller format, a larger device or shorter requests"


def budget_of(deployment: Deployment, *, memory_share: float = MEMORY_SHARE) -> Budget:
    """The memory of one device of this deployment, with the buffers that engines are known to
    need."""
    device = deployment.accelerator.memory_bytes
    activations = ACTIVATION_GIB if deployment.shape.experts is None else EXPERT_ACTIVATION_GIB
    runtime = RUNTIME_GIB if deployment.layout.devices == 1 else GROUP_RUNTIME_GIB
    buffers = min(activations * GIB, ACTIVATION_SHARE_MAX * device) + (runtime + GRAPHS_GIB) * GIB
    return Budget(
        device_bytes=device,
        margin_bytes=device * (1.0 - memory_share),
        weights_bytes=deployment.weights_bytes,
        buffers_bytes=buffers,
        files_bytes=dict(deployment.beside),
    )


def kv_bytes(shape: ModelShape, kv_format: str, lengths: Sequence[float]) -> float:
    """Bytes of KV of sequences of these lengths on an undivided model."""
    values = sum(shape.kv_values(tokens) for tokens in lengths)
    return values * BYTES_PER_VALUE[kv_format]


def sequences_max(deployment: Deployment, budget: Budget, tokens: float) -> float:
    """Sequences of ``tokens`` that the KV pools of a replica hold together."""
    pool = max(0.0, budget.pool_bytes)
    each = deployment.kv_bytes(tokens)
    return deployment.layout.groups * pool / each


def tokens_max(deployment: Deployment, budget: Budget, tokens: float) -> float:
    """Tokens that the KV pools of a replica hold of sequences of ``tokens``: what a sequence takes
    whatever its length, and what a window forgets, is counted as it is at that length."""
    return sequences_max(deployment, budget, tokens) * tokens
