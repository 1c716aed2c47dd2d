"""Gives the KV pool its memory a little before it is written to for the first time.

Called by ``openvino``, which owns the pool. Linux hands memory out when it is first touched, a
large page (2 MiB) at a time, and clears it then. A block has a part in each of the pool's tensors,
so the first block beyond those touched before costs a large page in all of them: more than 100 MB
at once for 60 tensors, which held a step up for a quarter of a second. Here a thread touches the
pages of the next blocks while steps run. The pool is not touched as a whole: memory of blocks that
are never needed stays with the machine.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sluice.executors.large_pages import LARGE_BYTES

# madvise(2), from the kernel's "mman-common.h", since Linux 5.14: makes pages present and changes
# nothing of what they hold. Where the kernel does not know it, pages come when they are touched.
_MADV_POPULATE_WRITE = 23
# Between two large pages: steps need the memory's bandwidth too.
_PAUSE_S = 0.001


def spans_of(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """Address and size of ``openvino.Tensor`` values."""
    return [(tensor.data.ctypes.data, tensor.byte_size) for tensor in tensors]


class PagesAhead:
    """Keeps the pages of the blocks after the highest one in use present.

    ``tensors`` are the address and size of each tensor of the pool, in which blocks follow one
    another. The memory must outlive ``close``.
    """

    def __init__(self, tensors: Sequence[tuple[int, int]], blocks_total: int) -> None:
        self._tensors = tensors
        self._blocks_total = blocks_total
        widest_bytes = max(size // blocks_total for _, size in tensors)
        # So many blocks share the large pages of the widest tensor.
        self._stride = max(1, LARGE_BYTES // widest_bytes)
        self._ready = 0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def blocks_ready(self) -> int:
        """Blocks from the first on whose pages are present or about to be."""
        return self._ready

    def reach(self, block: int) -> None:
        """A block is about to be written: have those after it ready soon."""
        if self._ready > min(block + self._stride, self._blocks_total - 1):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        first, self._ready = self._ready, min(self._blocks_total, block + 2 * self._stride)
        work = (first, self._ready)
        self._thread = threading.Thread(target=self._populate, args=work, name="kv-pages")
        self._thread.start()

    def close(self) -> None:
        """Stop; the memory may go then."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _populate(self, first: int, end: int) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for block in range(first, end, self._stride):
            last = min(end, block + self._stride)
            for address, size in self._tensors:
                each = size // self._blocks_total
                start = (address + block * each) // mmap.PAGESIZE * mmap.PAGESIZE
                start = max(start, -(-address // mmap.PAGESIZE) * mmap.PAGESIZE)
                length = (address + last * each - start) // mmap.PAGESIZE * mmap.PAGESIZE
                if self._closing.is_set():
                    return
                if length > 0 and madvise(start, length, _MADV_POPULATE_WRITE) != 0:
                    return
                time.sleep(_PAUSE_S)
