"""Which memory is asked for, and that asking changes nothing but pages."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from sluice.executors import large_pages
from sluice.executors.large_pages import _anonymous_ranges, use_large_pages

MAPS = """\
200000-600000 rw-p 00000000 00:00 0
700000-d00000 rw-p 00000000 00:00 0                [heap]
1000000-1400000 rw-p 00000000 00:00 0              [stack]
2000000-2400000 rw-p 00000000 08:01 17             /usr/lib/a library.so
3000000-3400000 r--p 00000000 00:00 0
4000000-4400000 rw-s 00000000 00:01 5              /dev/zero (deleted)
5000000-51ff000 rw-p 00000000 00:00 0
"""


def test_only_private_memory_without_a_file_is_asked_for_in_whole_large_pages():
    assert list(_anonymous_ranges(MAPS)) == [(0x200000, 0x400000), (0x800000, 0x400000)]


def test_memory_keeps_its_content():
    values = np.arange(4 << 20, dtype=np.int64)
    use_large_pages()
    assert (values == np.arange(4 << 20)).all()


def test_memory_in_use_gets_large_pages_where_the_kernel_gives_them():
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.is_file() or "[never]" in enabled.read_text():
        pytest.skip("this kernel gives no large pages")
    values = np.ones(64 << 20, np.uint8)
    use_large_pages()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))
    assert values.nbytes > 16 * mmap.PAGESIZE
    assert kib >= 32 << 10


def test_a_system_without_proc_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(large_pages, "_MAPS", tmp_path / "maps")
    use_large_pages()
