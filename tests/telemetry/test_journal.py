"""The journal survives crashes, full disks and vanished folders, and reads back in order."""

import io
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sluice.telemetry import journal as journal_module
from sluice.telemetry import segments as segments_module
from sluice.telemetry.journal import Clocks, Entry, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.records import (
    AnyRecord,
    Chunk,
    Deployment,
    FirstToken,
    Gap,
    PolicyRecord,
    RequestArrived,
    RequestText,
    Step,
)
from sluice.telemetry.segments import (
    FORMAT_VERSION,
    MAGIC,
    FrameEncoder,
    JournalUnreadable,
    SegmentHeader,
    SegmentReader,
    segment_paths,
)

WALL_NS = 1_700_000_000_000_000_000


class Time:
    """A clock that stands until it is moved. Unix time runs beside monotonic time."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.clocks = Clocks(lambda: self.now_ns, lambda: WALL_NS + self.now_ns)


Open = Callable[..., JournalWriter]


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def opened(tmp_path: Path, time: Time) -> Iterator[Open]:
    writers: list[JournalWriter] = []

    def open_writer(
        source: str = "gateway", folder: Path = tmp_path / "j", **limits: float
    ) -> JournalWriter:
        record_text = bool(limits.pop("record_text", False))
        made = JournalLimits(**{"flush_s": 60.0, **limits})  # type: ignore[arg-type]
        writer = JournalWriter(folder, source, time.clocks, made, record_text=record_text)
        writers.append(writer)
        return writer

    yield open_writer
    for writer in writers:
        writer.close()


def token(t_ns: int, name: str = "r") -> FirstToken:
    return FirstToken(t_ns, name, ttft_ns=5)


def read(folder: Path, since_ns: int | None = None) -> list[Entry]:
    reader = JournalReader(folder)
    entries = list(reader.entries(since_ns))
    assert reader.problems == []
    return entries


def records(folder: Path) -> list[AnyRecord]:
    return [entry.record for entry in read(folder)]


# ---------------------------------------------------------------------------- writing and reading


def test_records_come_back_as_they_were_appended(opened: Open, tmp_path: Path) -> None:
    writer = opened()
    written: list[AnyRecord] = [
        RequestArrived(1, "r", "m", arrived_ns=0, prompt_tokens=7, output_tokens_max=9),
        Step(2, "m-0", 1, 10, 12, decode=(("r", 0),), prefill=(Chunk("q", 1, 32, 64),)),
        PolicyRecord(3, "m-0", "event", "Submitted", b"\x00\xff"),
        Deployment(4, "started", {"model": "m"}),
    ]
    for record in written:
        writer.append(record)
    writer.close()
    assert records(tmp_path / "j") == written
    assert writer.dropped == 0


def test_flush_makes_records_readable_while_the_writer_goes_on(
    opened: Open, tmp_path: Path
) -> None:
    writer = opened()
    writer.append(token(1))
    assert writer.flush()
    assert records(tmp_path / "j") == [token(1)]
    writer.append(token(2))
    assert writer.flush()
    assert records(tmp_path / "j") == [token(1), token(2)]


def test_sources_are_merged_by_wall_time(opened: Open, tmp_path: Path) -> None:
    gateway, replica = opened("gateway"), opened("m-0")
    for t_ns in (10, 30, 50):
        gateway.append(token(t_ns))
    for t_ns in (20, 40):
        replica.append(token(t_ns))
    gateway.close()
    replica.close()
    entries = read(tmp_path / "j")
    assert [entry.record.t_ns for entry in entries] == [10, 20, 30, 40, 50]
    assert [entry.wall_ns - WALL_NS for entry in entries] == [10, 20, 30, 40, 50]
    assert [entry.source for entry in entries] == ["gateway", "m-0"] * 2 + ["gateway"]


def test_a_wall_clock_step_does_not_reorder_sources_of_one_boot(
    opened: Open, tmp_path: Path, time: Time
) -> None:
    first = opened("gateway")
    first.append(token(10))
    first.append(token(30))
    first.close()
    time.clocks = Clocks(lambda: 1_000, lambda: WALL_NS - 10**15)
    second = opened("m-0")
    second.append(token(20))
    second.close()
    if journal_module._boot_id():
        assert [entry.record.t_ns for entry in read(tmp_path / "j")] == [10, 20, 30]


def test_since_leaves_out_earlier_records(opened: Open, tmp_path: Path) -> None:
    writer = opened()
    for t_ns in (10, 20, 30):
        writer.append(token(t_ns))
    writer.close()
    assert [e.record.t_ns for e in read(tmp_path / "j", since_ns=WALL_NS + 20)] == [20, 30]


def test_text_is_recorded_only_where_it_was_turned_on(opened: Open, tmp_path: Path) -> None:
    for folder, record_text in (("off", False), ("on", True)):
        writer = opened(folder=tmp_path / folder, record_text=record_text)
        writer.append(RequestText(1, "r", prompt="secret"))
        writer.append(token(2))
        writer.close()
        assert len(records(tmp_path / folder)) == 1 + record_text


def test_files_are_private_and_named_by_their_source(opened: Open, tmp_path: Path) -> None:
    writer = opened("../m/0")
    writer.append(token(1))
    writer.close()
    (path,) = segment_paths(tmp_path / "j")
    assert path.name.startswith(".._m_0-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


# --------------------------------------------------------------------------------------- bounds


def test_segments_end_by_size_and_age_and_old_ones_go(
    opened: Open, tmp_path: Path, time: Time
) -> None:
    writer = opened(bytes_max=64 * 1024)
    for i in range(200):
        # Text that does not compress, so that sizes are known.
        writer.append(Deployment(i, "x", {"noise": random.Random(i).randbytes(750).hex()}))
        writer.flush()
    paths = segment_paths(tmp_path / "j")
    sizes = [path.stat().st_size for path in paths]
    assert len(sizes) > 3
    assert max(sizes) < 8 * 1024
    assert sum(sizes) <= 64 * 1024
    found = [record.t_ns for record in records(tmp_path / "j")]
    assert found == list(range(found[0], 200))
    assert found[0] > 0
    assert writer.dropped == 0
    time.now_ns += 3601 * 10**9
    writer.append(token(200))
    writer.flush()
    assert segment_paths(tmp_path / "j")[-1] not in paths


def test_segments_older_than_the_limit_are_deleted(
    opened: Open, tmp_path: Path, time: Time
) -> None:
    first = opened()
    first.append(token(1))
    first.close()
    (path,) = segment_paths(tmp_path / "j")
    written_ns = path.stat().st_mtime_ns
    for age_s, kept in ((86_399, True), (86_401, False)):
        time.clocks = Clocks(lambda: 0, lambda age_s=age_s: written_ns + age_s * 10**9)  # type: ignore[misc]
        writer = opened(f"at{age_s}")
        writer.append(token(2))
        writer.close()
        assert path.exists() is kept


def test_the_queue_is_bounded_and_what_does_not_fit_is_told(opened: Open, tmp_path: Path) -> None:
    writer = opened(queue_records_max=10)
    writer._thread_paused = True  # type: ignore[attr-defined]
    held: list[AnyRecord] = [token(i) for i in range(25)]
    # The writer's thread sleeps until it is woken, so nothing leaves the queue meanwhile.
    for record in held:
        writer.append(record)
    assert writer.dropped == 15
    assert writer.flush()
    writer.append(token(99))
    writer.close()
    found = records(tmp_path / "j")
    assert found[0] == Gap(0, 15, "the queue was full")
    assert found[1:] == [*held[:10], token(99)]


# ------------------------------------------------------------------------------ what goes wrong


@pytest.fixture(scope="module")
def segment() -> tuple[bytes, list[int]]:
    """A segment of five frames with two records each, and the offset at which each frame ends."""
    encoder = FrameEncoder()
    header = SegmentHeader(FORMAT_VERSION, "gateway", 1, 0, WALL_NS, "0")
    whole = encoder.header(header)
    ends = [len(whole)]
    for i in range(5):
        whole += encoder.records([token(2 * i), token(2 * i + 1)])
        ends.append(len(whole))
    return whole, ends


def read_bytes(content: bytes) -> tuple[list[int], bool]:
    reader = SegmentReader(io.BytesIO(content), "x")
    times = [record.t_ns for frame in reader.frames() for record in frame.records]
    return times, reader.is_torn


@given(cut=st.integers(0, 2000))
def test_a_segment_cut_at_any_byte_loses_only_the_torn_frame(
    cut: int, segment: tuple[bytes, list[int]]
) -> None:
    whole, ends = segment
    cut = min(cut, len(whole))
    if cut < ends[0]:
        with pytest.raises(JournalUnreadable):
            read_bytes(whole[:cut])
        return
    frames = sum(end <= cut for end in ends) - 1
    times, is_torn = read_bytes(whole[:cut])
    assert times == list(range(2 * frames))
    assert is_torn == (cut not in ends)


@given(at=st.integers(0, 2000), flip=st.integers(1, 255))
def test_a_damaged_byte_never_gives_wrong_records(
    at: int, flip: int, segment: tuple[bytes, list[int]]
) -> None:
    whole, ends = segment
    at = min(at, len(whole) - 1)
    damaged = bytearray(whole)
    damaged[at] ^= flip
    if at < ends[0]:
        with pytest.raises(JournalUnreadable):
            read_bytes(bytes(damaged))
        return
    times, is_torn = read_bytes(bytes(damaged))
    assert times == list(range(2 * (sum(end <= at for end in ends) - 1)))
    assert is_torn


def test_a_torn_tail_is_reported_and_other_segments_are_read(opened: Open, tmp_path: Path) -> None:
    for source in ("a", "b"):
        writer = opened(source)
        writer.append(token(1, source))
        writer.flush()
        writer.append(token(2, source))
        writer.close()
    (first, _) = segment_paths(tmp_path / "j")
    first.write_bytes(first.read_bytes()[:-3])
    (tmp_path / "j" / "other.journal").write_bytes(b"not a journal")
    reader = JournalReader(tmp_path / "j")
    found = [(e.source, e.record.t_ns) for e in reader.entries()]
    assert found == [("a", 1), ("b", 1), ("b", 2)]
    assert len(reader.problems) == 2
    assert "torn" in reader.problems[1]
    assert "other.journal is not a journal segment" in reader.problems[0]


def _framed(body: bytes) -> bytes:
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def _bomb() -> bytes:
    """Declares little and holds more."""
    body = zstandard.ZstdCompressor().compress(bytes(300))
    assert body[4:7] == b"\x60\x2c\x00"  # two bytes of size, less 256
    return body[:5] + b"\x00\x00" + body[7:]


ZSTD_HEAD = bytes.fromhex("28b52ffd")


@pytest.mark.parametrize(
    "body",
    [
        b"not compressed at all",
        b"",
        ZSTD_HEAD + b"\xe0" + struct.pack("<Q", 2**40) + bytes(20),
        ZSTD_HEAD + b"\xe0" + struct.pack("<Q", 2**26 + 1) + bytes(20),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\x90"),
        _bomb(),
        *(
            zstandard.ZstdCompressor().compress(plain)
            for plain in (
                b"\xc1\xc1",
                b"\x80",
                b"\xdd\xff\xff\xff\xff",
                b"\xdd\x00\x0f\x00\x00" + b"\x90" * 0xF0000,
                b"\x91" * 200_000,
            )
        ),
    ],
    ids=range(11),
)
def test_a_frame_that_no_writer_made_counts_as_torn(
    opened: Open, tmp_path: Path, body: bytes
) -> None:
    writer = opened()
    writer.append(token(1))
    writer.close()
    (path,) = segment_paths(tmp_path / "j")
    whole = path.read_bytes()
    path.write_bytes(whole + _framed(body))
    reader = JournalReader(tmp_path / "j")
    assert [entry.record for entry in reader.entries()] == [token(1)]
    assert "torn" in reader.problems[0]
    path.write_bytes(whole[: len(MAGIC)] + _framed(body))
    reader = JournalReader(tmp_path / "j")
    assert list(reader.entries()) == []
    assert path.name in reader.problems[0]


def test_records_that_are_too_long_for_one_frame_get_several(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "FRAME_BYTES_MAX", 300)
    writer = opened()
    told = [token(i, "r" * 50) for i in range(20)]
    for record in (*told[:10], token(99, "r" * 500), *told[10:]):
        writer.append(record)
    writer.close()
    assert records(tmp_path / "j") == told
    assert writer.dropped == 1


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    header = SegmentHeader(FORMAT_VERSION + 1, "g", 1, 0, 0, "9.9")
    (tmp_path / "x.journal").write_bytes(FrameEncoder().header(header))
    reader = JournalReader(tmp_path)
    assert list(reader.entries()) == []
    assert "9.9" in reader.problems[0]


def test_records_of_unknown_kinds_are_skipped_and_counted(tmp_path: Path) -> None:
    encoder = FrameEncoder()
    unknown = msgspec.msgpack.encode({"kind": "FromTheFuture", "t_ns": 1})
    content = encoder.header(SegmentHeader(FORMAT_VERSION, "g", 1, 0, 0, "0"))
    content += encoder.records([token(1), msgspec.Raw(unknown), token(2)])  # type: ignore[list-item]
    (tmp_path / "x.journal").write_bytes(content)
    reader = JournalReader(tmp_path)
    assert [entry.record for entry in reader.entries()] == [token(1), token(2)]
    assert "1 records of unknown kinds" in reader.problems[0]


def test_a_vanished_folder_is_made_again(opened: Open, tmp_path: Path) -> None:
    writer = opened()
    writer.append(token(1))
    writer.flush()
    shutil.rmtree(tmp_path / "j")
    writer.append(token(2))
    writer.flush()
    assert records(tmp_path / "j") == [token(2)]
    assert writer.dropped == 0


def test_a_folder_that_cannot_be_made_drops_and_counts_then_recovers(
    opened: Open, tmp_path: Path, time: Time
) -> None:
    (tmp_path / "j").write_text("a file is in the way")
    writer = opened()
    writer.append(token(1))
    writer.append(token(2))
    writer.flush()
    assert writer.dropped == 2
    assert writer.error
    (tmp_path / "j").unlink()
    time.now_ns += 10**9
    writer.append(token(3))
    writer.close()
    assert writer.error == ""
    gap, record = records(tmp_path / "j")
    assert isinstance(gap, Gap)
    assert (gap.t_ns, gap.dropped) == (3, 2)
    assert record == token(3)


def test_a_full_disk_in_the_middle_of_a_frame_leaves_a_readable_journal(
    opened: Open, tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened()
    writer.append(token(1))
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(journal_module._OpenSegment, "write", _write_half)
        writer.append(token(2))
        writer.flush()
    time.now_ns += 10**9
    writer.append(token(3))
    writer.close()
    reader = JournalReader(tmp_path / "j")
    found = [entry.record for entry in reader.entries()]
    assert found == [token(1), Gap(3, 1, "No space left on device"), token(3)]
    assert "torn" in reader.problems[0]
    assert writer.dropped == 1


def test_a_full_disk_leaves_no_files_behind_and_is_tried_ever_more_rarely(
    opened: Open, tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened()
    tries_s: list[int] = []
    make = journal_module._OpenSegment

    def counted(path: Path, header: bytes, opened_ns: int) -> journal_module._OpenSegment:
        tries_s.append((opened_ns - 1_000) // 10**9)
        return make(path, header, opened_ns)

    monkeypatch.setattr(journal_module, "_OpenSegment", counted)
    with monkeypatch.context() as patch:
        patch.setattr(make, "write", _write_half)
        for second in range(200):
            writer.append(token(second))
            writer.flush()
            assert segment_paths(tmp_path / "j") == []
            time.now_ns += 10**9
    assert tries_s == [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181]
    assert writer.dropped == 200
    time.now_ns += 30 * 10**9
    writer.append(token(200))
    writer.flush()
    assert records(tmp_path / "j")[1:] == [token(200)]
    assert writer.error == ""


def test_a_segment_without_a_whole_frame_of_records_is_deleted(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened()
    write = journal_module._OpenSegment.write

    def only_headers(segment: journal_module._OpenSegment, frame: bytes) -> None:
        (_write_half if segment.bytes else write)(segment, frame)

    monkeypatch.setattr(journal_module._OpenSegment, "write", only_headers)
    writer.append(token(1))
    writer.flush()
    assert segment_paths(tmp_path / "j") == []


def test_old_empty_segments_of_any_process_are_deleted(
    opened: Open, tmp_path: Path, time: Time
) -> None:
    (tmp_path / "j").mkdir()
    for name, age_s in (("old", 61), ("new", 59)):
        path = tmp_path / "j" / f"{name}.journal"
        path.touch()
        written_ns = WALL_NS + time.now_ns - age_s * 10**9
        os.utime(path, ns=(written_ns, written_ns))
    writer = opened()
    writer.append(token(1))
    writer.flush()
    names = [path.name for path in segment_paths(tmp_path / "j")]
    assert "new.journal" in names
    assert "old.journal" not in names


def _write_half(segment: journal_module._OpenSegment, frame: bytes) -> None:
    segment._file.write(frame[: len(frame) // 2])
    raise OSError("No space left on device")


def test_a_record_that_cannot_be_encoded_is_dropped_alone(opened: Open, tmp_path: Path) -> None:
    writer = opened()
    writer.append(token(1))
    writer.append(FirstToken(2, "\ud800", ttft_ns=1))
    writer.append(FirstToken(1 << 70, "r", ttft_ns=1))
    writer.append(token(3))
    writer.close()
    assert [r for r in records(tmp_path / "j") if not isinstance(r, Gap)] == [token(1), token(3)]
    assert writer.dropped == 2


def test_appending_after_close_is_counted_not_raised(opened: Open) -> None:
    writer = opened()
    writer.close()
    writer.append(token(1))
    writer.close()
    assert writer.dropped == 1


def test_a_process_that_dies_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    script = f"""
import os, time, pathlib
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter
from sluice.telemetry.records import FirstToken
clocks = Clocks(time.monotonic_ns, lambda: {WALL_NS})
writer = JournalWriter(pathlib.Path({str(tmp_path)!r}), "m-0", clocks, JournalLimits(flush_s=60))
for i in range(5000):
    writer.append(FirstToken(i, "r", 1))
assert writer.flush()
writer.append(FirstToken(5000, "r", 1))
os.abort()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert [record.t_ns for record in records(tmp_path)] == list(range(5000))


def test_a_missing_folder_reads_as_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == []
