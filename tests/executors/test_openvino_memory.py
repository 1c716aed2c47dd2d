"""Sizing the KV pool: what fits, what is refused, and that refusals carry the numbers."""

from pathlib import Path

import pytest

from sluice.core.errors import MemoryShort
from sluice.executors.openvino_memory import (
    KvDemand,
    check_load_memory,
    free_memory_bytes,
    size_kv_pool,
)


def demand(kv_bytes: int | None) -> KvDemand:
    return KvDemand(
        block_bytes=1000,
        block_size=32,
        context_tokens_max=100,
        sequences_max=8,
        kv_bytes=kv_bytes,
    )


def test_an_unset_pool_holds_every_sequence_at_full_context():
    assert size_kv_pool(demand(None), 10**6).blocks_total == 8 * 4


def test_an_unset_pool_takes_at_most_half_of_free_memory():
    assert size_kv_pool(demand(None), 20_000).pool_bytes == 10_000


def test_a_given_size_is_rounded_down_to_whole_blocks():
    assert size_kv_pool(demand(5_999), 10**6).pool_bytes == 5_000


def test_a_pool_over_free_memory_is_refused_with_the_numbers():
    with pytest.raises(MemoryShort, match=r"50000 bytes .* 40000 bytes are free"):
        size_kv_pool(demand(50_000), 40_000)


def test_large_sizes_are_told_in_gib_beside_the_exact_numbers():
    with pytest.raises(
        MemoryShort,
        match=r"pool of 100\.0 GiB \(107374182400 bytes\) .* 20\.5 GiB \(22011707392 bytes\) are",
    ):
        size_kv_pool(demand(100 << 30), 41 << 29)


@pytest.mark.parametrize("kv_bytes", [999, None])
def test_a_pool_without_one_block_is_refused(kv_bytes):
    with pytest.raises(MemoryShort, match="0 blocks"):
        size_kv_pool(demand(kv_bytes), 1_500)


def test_weights_that_cannot_be_compiled_in_free_memory_are_refused(tmp_path: Path):
    weights = tmp_path / "openvino_model.bin"
    weights.write_bytes(bytes(1000))
    check_load_memory(weights, 3000)
    with pytest.raises(MemoryShort, match="3000 bytes and 2999"):
        check_load_memory(weights, 2999)


def test_free_memory_is_a_plausible_number():
    assert 2**20 < free_memory_bytes() < 2**50
