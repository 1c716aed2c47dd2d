"""What one embedded replica is made of; read by ``openvino``, made by ``wiring``."""

from dataclasses import dataclass
from pathlib import Path

from sluice.executors.openvino_graph import Numerics


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
