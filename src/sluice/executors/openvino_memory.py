"""How much memory the embedded engine may take, decided before it takes any.

Decided here: the number of KV blocks, and whether a model can be loaded at all. Called by
``openvino`` while it loads. Nothing is allocated here.
"""

from dataclasses import dataclass
from pathlib import Path

from sluice.core.errors import MemoryShort

# Share of free memory that a pool sized by us may take: the rest is for intermediate results of a
# step, the page cache and the neighbours.
_POOL_SHARE = 0.5

# Compiling holds the weights about three times: as read, as rewritten and as packed for kernels.
_LOAD_FACTOR = 3

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What is asked of a KV pool.

    ``block_bytes`` is the size of one block over all layers, ``block_size`` its tokens.
    ``kv_bytes`` is the pool that the operator asked for, ``None`` where the size is left to us.
    """

    block_bytes: int
    block_size: int
    context_tokens_max: int
    sequences_max: int
    kv_bytes: int | None


@dataclass(frozen=True, slots=True)
class KvSize:
    """A KV pool: bytes of one block over all layers, and how many blocks."""

    block_bytes: int
    blocks_total: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.block_bytes * self.blocks_total


def size_kv_pool(demand: KvDemand, free_bytes: int) -> KvSize:
    """Decide the number of blocks: as asked for, or enough for every sequence at full context.

    The latter is bounded by half of ``free_bytes``. Raises ``MemoryShort``, with the numbers, when
    the pool exceeds ``free_bytes`` or cannot hold one block.
    """
    blocks_per_sequence = -(-demand.context_tokens_max // demand.block_size)
    pool_bytes = demand.kv_bytes
    if pool_bytes is None:
        wanted_bytes = demand.sequences_max * blocks_per_sequence * demand.block_bytes
        pool_bytes = min(wanted_bytes, int(free_bytes * _POOL_SHARE))
    size = KvSize(demand.block_bytes, pool_bytes // demand.block_bytes)
    if size.blocks_total < 1 or size.pool_bytes > free_bytes:
        raise MemoryShort(
            f"a KV pool of {_told(pool_bytes)} ({size.blocks_total:,} blocks of "
            f"{_told(demand.block_bytes)}, {demand.block_size} tokens each) does not fit: "
            f"{_told(free_bytes)} are free, one block is the least; set models.NAME.kv_bytes to "
            "another value or lower models.NAME.context_tokens_max"
        )
    return size


def check_load_memory(weights: Path, free_bytes: int) -> None:
    """Raise ``MemoryShort``, with the numbers, where loading these weights would not fit."""
    needed_bytes = _LOAD_FACTOR * weights.stat().st_size if weights.is_file() else 0
    if needed_bytes > free_bytes:
        raise MemoryShort(
            f"loading {weights.parent.name} takes about {_told(needed_bytes)} and "
            f"{_told(free_bytes)} are free; choose a smaller model or free memory"
        )


def _told(size_bytes: int) -> str:
    """A size for people, with the exact number where that says less."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit} ({size_bytes} bytes)"
    return f"{size_bytes} bytes"


def free_memory_bytes() -> int:
    """Return what can be allocated without swapping.

    The machine's figure or that of the control group, whichever is less: in a container the
    machine's is no limit ("memory.max" in the kernel's description of cgroup v2).
    """
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise MemoryShort(f"{_MEMINFO} does not tell the available memory")
    limit = _CGROUP / "memory.max"
    current = _CGROUP / "memory.current"
    if limit.is_file() and current.is_file():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, max(0, int(text) - int(current.read_text())))
    return available
