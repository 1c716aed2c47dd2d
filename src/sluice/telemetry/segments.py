"""The format of a journal segment: one file, written by one process from front to back.

A segment is the magic bytes, then frames. A frame is the length and the CRC-32 of its body (two
little-endian uint32), then the body: zstd-compressed msgpack. The first frame holds the header,
each further one an array of records. A frame that is cut short or does not match its checksum ends
the segment: what stands before it is good, and a writer never appends after it.

``journal`` decides when segments begin and end, and which are deleted.
"""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

import msgspec
import zstandard

from sluice.telemetry.records import AnyRecord

MAGIC = b"sluicej\n"
FORMAT_VERSION = 1
SUFFIX = ".journal"
# A length beyond this is damage, not a frame; it holds compressed and decompressed.
FRAME_BYTES_MAX = 64 * 1024**2
# So is this number of records; writers put some thousands into a frame.
FRAME_RECORDS_MAX = 100_000

_FRAME_HEAD = Struct("<II")
_UNDECODABLE = (msgspec.MsgspecError, RecursionError, MemoryError)


class JournalUnreadable(Exception):
    """A file that is not a journal segment, or one written by a newer format."""


class SegmentHeader(msgspec.Struct, frozen=True):
    """Who wrote a segment, and how its monotonic times relate to the wall clock.

    ``boot_id`` names the machine's current run where the system tells: segments with the same one
    share a monotonic clock. It is empty elsewhere.
    """

    format: int
    source: str
    pid: int
    monotonic_ns: int
    wall_ns: int
    sluice_version: str
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """The records of one frame; ``skipped`` are of kinds or shapes that are not known here."""

    records: tuple[AnyRecord, ...]
    skipped: int


class FrameEncoder:
    """Turns values into frames. Not for use by two threads at a time."""

    def __init__(self) -> None:
        self._msgpack = msgspec.msgpack.Encoder()
        self._zstd = zstandard.ZstdCompressor(level=3)

    def header(self, header: SegmentHeader) -> bytes:
        """The beginning of a segment."""
        return MAGIC + self._frame(self._msgpack.encode(header))

    def records(self, records: Sequence[AnyRecord]) -> bytes:
        """A frame with these records, or several where one would be too long.

        Raises ``ValueError`` where a record cannot be encoded.
        """
        try:
            plain = self._msgpack.encode(records)
        except (TypeError, OverflowError, msgspec.MsgspecError) as error:
            raise ValueError(str(error)) from None
        if len(plain) <= FRAME_BYTES_MAX:
            return self._frame(plain)
        if len(records) == 1:
            raise ValueError(f"it has {len(plain)} bytes, more than {FRAME_BYTES_MAX}")
        half = len(records) // 2
        return self.records(records[:half]) + self.records(records[half:])

    def _frame(self, plain: bytes) -> bytes:
        body = self._zstd.compress(plain)
        return _FRAME_HEAD.pack(len(body), zlib.crc32(body)) + body


class SegmentReader:
    """Reads one segment; a file that is still being written is read as far as it goes.

    ``kinds`` is the union that records are decoded as.
    """

    def __init__(self, file: BinaryIO, name: str, kinds: Any = AnyRecord) -> None:
        self._file = file
        self._zstd = zstandard.ZstdDecompressor()
        self._whole = msgspec.msgpack.Decoder(tuple[kinds, ...])
        self._raw = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])
        self._one: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(kinds)
        self.is_torn = False
        self.header = self._read_header(name)

    def frames(self, containing: str = "") -> Iterator[Frame]:
        """The frames that are whole, in order. ``is_torn`` then tells whether bytes were left.

        Frames in which the text ``containing`` does not occur are passed over undecoded.
        """
        wanted = containing.encode()
        while (plain := self._next_body()) is not None:
            if wanted in plain:
                try:
                    frame = self._decode(plain)
                except _UNDECODABLE:
                    self.is_torn = True
                    return
                yield frame

    def bodies(self) -> Iterator[bytes]:
        """The frames that are whole as msgpack arrays of records, for who decodes them itself."""
        while (plain := self._next_body()) is not None:
            if _length_of_array(plain) > FRAME_RECORDS_MAX:
                self.is_torn = True
                return
            yield plain

    def _read_header(self, name: str) -> SegmentHeader:
        magic = self._file.read(len(MAGIC))
        body = self._next_body() if magic == MAGIC else None
        if body is None:
            raise JournalUnreadable(
                f"{name} is not a journal segment, or was cut off in its header"
            )
        try:
            header = msgspec.msgpack.decode(body, type=SegmentHeader)
        except _UNDECODABLE as error:
            raise JournalUnreadable(f"{name} has a header that cannot be read: {error}") from None
        if header.format > FORMAT_VERSION:
            raise JournalUnreadable(
                f"{name} has format {header.format}, written by sluice {header.sluice_version}; "
                f"this version reads up to format {FORMAT_VERSION}"
            )
        return header

    def _next_body(self) -> bytes | None:
        head = self._file.read(_FRAME_HEAD.size)
        if len(head) < _FRAME_HEAD.size:
            self.is_torn = bool(head)
            return None
        length, checksum = _FRAME_HEAD.unpack(head)
        body = self._file.read(length) if length <= FRAME_BYTES_MAX else b""
        if len(body) < length or zlib.crc32(body) != checksum:
            self.is_torn = True
            return None
        plain = self._decompressed(body)
        self.is_torn = plain is None
        return plain

    def _decompressed(self, body: bytes) -> bytes | None:
        """What a body holds, ``None`` where no writer of ours made it."""
        try:
            # The size that a body declares is taken at once, and never exceeded.
            size = zstandard.get_frame_parameters(body).content_size
            return self._zstd.decompress(body) if size <= FRAME_BYTES_MAX else None
        except zstandard.ZstdError:
            return None

    def _decode(self, plain: bytes) -> Frame:
        if _length_of_array(plain) > FRAME_RECORDS_MAX:
            raise msgspec.DecodeError("too many records")
        try:
            return Frame(self._whole.decode(plain), 0)
        except msgspec.ValidationError:
            return self._decode_known(plain)

    def _decode_known(self, plain: bytes) -> Frame:
        raw = self._raw.decode(plain)
        known = []
        for one in raw:
            try:
                known.append(self._one.decode(one))
            except msgspec.ValidationError:
                continue
        return Frame(tuple(known), len(raw) - len(known))


def _length_of_array(plain: bytes) -> int:
    """How many items a msgpack array says it has, 0 for a short one and for anything else."""
    width = {b"\xdc": 2, b"\xdd": 4}.get(plain[:1], 0)
    return int.from_bytes(plain[1 : 1 + width])


def segment_name(header: SegmentHeader, serial: int) -> str:
    """File name of a process's ``serial``-th segment; those of one source sort by start."""
    source = re.sub(r"[^A-Za-z0-9_.-]+", "_", header.source)
    return f"{source}-{header.wall_ns:020d}-{header.pid}-{serial:06d}{SUFFIX}"


def segment_paths(folder: Path) -> list[Path]:
    """The segments in a folder, by name; empty where there is no such folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))
