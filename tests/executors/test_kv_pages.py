"""Memory of the KV pool is present before it is written to."""

import ctypes
import mmap

import pytest

from sluice.executors.kv_pages import PagesAhead
from sluice.executors.large_pages import LARGE_BYTES

BLOCKS = 64
BLOCK_BYTES = LARGE_BYTES // 8


def resident(memory: mmap.mmap, address: int) -> list[bool]:
    pages = len(memory) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(address, len(memory), found) == 0
    return [bool(entry & 1) for entry in found]


@pytest.fixture
def pool():
    """Two tensors of a pool: memory, and the address of each."""
    size, flags = BLOCKS * BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memories = [mmap.mmap(-1, size, flags) for _ in range(2)]
    views = [ctypes.c_char.from_buffer(memory) for memory in memories]
    yield [(memory, ctypes.addressof(view)) for memory, view in zip(memories, views, strict=True)]
    views.clear()


def ahead_of(pool):
    return PagesAhead([(address, len(memory)) for memory, address in pool], BLOCKS)


def settled(pages):
    assert pages._thread is not None
    pages._thread.join()


def blocks_present(pool):
    """For each block: whether all its pages are present in all tensors."""
    each = BLOCK_BYTES // mmap.PAGESIZE
    maps = [resident(memory, address) for memory, address in pool]
    return [all(all(m[n * each : (n + 1) * each]) for m in maps) for n in range(BLOCKS)]


def test_the_blocks_after_the_highest_in_use_are_present_and_the_rest_is_not(pool):
    pages = ahead_of(pool)
    pages.reach(3)
    settled(pages)
    present = blocks_present(pool)
    assert all(present[: 3 + 8])
    assert pages.blocks_ready == 3 + 16
    assert not any(present[32:])


def test_what_was_written_stays(pool):
    memory, _ = pool[0]
    memory[5] = 77
    pages = ahead_of(pool)
    pages.reach(0)
    settled(pages)
    assert memory[5] == 77


def test_the_pool_is_present_to_its_end_and_no_thread_starts_after_that(pool):
    pages = ahead_of(pool)
    for block in range(BLOCKS):
        pages.reach(block)
        settled(pages)
    assert all(blocks_present(pool))
    last = pages._thread
    pages.reach(BLOCKS - 1)
    assert pages._thread is last


def test_closing_waits_for_the_thread(pool):
    pages = ahead_of(pool)
    pages.reach(40)
    pages.close()
    assert pages._thread is not None
    assert not pages._thread.is_alive()
