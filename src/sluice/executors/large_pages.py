"""Asking Linux for large pages under memory that a library has allocated.

Called by ``openvino`` once a model is loaded. Which memory is allocated, and how much, is decided
elsewhere.

A step reads all weights and the keys and values of all its rows. With pages of 4 KiB that is tens
of thousands of translations, and in a virtual machine each one that the processor does not hold is
walked twice. Where the kernel gives large pages only on request ("madvise" in
``/sys/kernel/mm/transparent_hugepage/enabled``, the default of most distributions), allocators do
not ask for them.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MAPS = Path("/proc/self/maps")
LARGE_BYTES = 2 << 20  # on x86-64, and on arm64 with pages of 4 KiB

# Numbers of madvise(2), from the kernel's "mman-common.h". The second one, since Linux 6.1,
# replaces pages in use; without it a thread of the kernel does so over some minutes.
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25


def use_large_pages() -> None:
    """Ask for large pages under all private memory of this process that has room for one.

    Without effect where there is no ``/proc`` or the kernel refuses: only speed depends on it.
    """
    if not _MAPS.is_file():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, size in _anonymous_ranges(_MAPS.read_text()):
        madvise(start, size, _MADV_HUGEPAGE)
        madvise(start, size, _MADV_COLLAPSE)


def _anonymous_ranges(maps: str) -> Iterator[tuple[int, int]]:
    """Yield start and size of private writable memory without a file, cut to whole large pages."""
    for line in maps.splitlines():
        span, access, _, _, _, *name = line.split(maxsplit=5)
        if access != "rw-p" or (name and name[0] != "[heap]"):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        start = -(-start // LARGE_BYTES) * LARGE_BYTES
        size = (end - start) // LARGE_BYTES * LARGE_BYTES
        if size > 0:
            yield start, size
