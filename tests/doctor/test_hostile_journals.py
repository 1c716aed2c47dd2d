"""Journals that no writer of ours made: whole by their checksums, and wrong inside."""

import io
import time
from pathlib import Path

import msgspec
import pytest

from sluice.cli.main import run
from sluice.doctor.diagnosis import Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.telemetry import records
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.segments import FRAME_RECORDS_MAX, FrameEncoder, SegmentHeader, SegmentReader
from tests.doctor.journals import S, request, written

encode = msgspec.msgpack.encode


def slower(count: int = 200) -> list[records.AnyRecord]:
    found = []
    for number in range(count):
        found += request(number, number * 0.1, 0.4 if number >= count // 2 else 0.1)
    return found


def with_frames(folder: Path, *bodies: bytes) -> Path:
    """A journal with a further segment that has these frames."""
    written(folder, slower())
    encoder = FrameEncoder()
    header = SegmentHeader(1, "odd", 1, 0, 0, "9")
    frames = b"".join(encoder._frame(body) for body in bodies)
    (folder / "odd-1.journal").write_bytes(encoder.header(header) + frames)
    return folder


DEEP = b"\x91" * 5000 + b"\xc0"
TOO_MANY = b"\xdd" + (FRAME_RECORDS_MAX + 1).to_bytes(4) + b"\xc0" * (FRAME_RECORDS_MAX + 1)


@pytest.mark.parametrize(
    "body",
    [
        encode({"kind": "Gap"}),
        encode(7),
        encode("text"),
        encode([1, None, "x", {}, []]),
        encode([{"kind": "Step", "t_ns": "soon"}, {"kind": "Step"}, {"kind": 3}]),
        b"\x91\xa4\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"",
        b"\xc1",
        DEEP,
        b"\x91" + DEEP,
        TOO_MANY,
    ],
    ids=repr,
)
def test_a_frame_of_anything_else_is_left_out_and_told(tmp_path, body):
    journal = read_journal(with_frames(tmp_path / "j", body))
    assert len(journal.requests) == 200
    assert journal.problems


def test_numbers_of_64_bits_are_read_as_what_they_are(tmp_path):
    most = 2**64 - 1
    step = {"kind": "Step", "t_ns": most, "replica": "chat-0", "predicted_ns": most,
            "measured_ns": most, "blocks_free": most, "running": most, "waiting": most,
            "prefill": [["r1", 0, most, most]]}  # fmt: skip
    change = {"kind": "ReplicaChanged", "t_ns": most, "replica": "chat-0", "model": "chat",
              "state": "ready", "error": "", "blocks_total": most, "block_size": most}  # fmt: skip
    arrived = {"kind": "RequestArrived", "t_ns": most, "id": "z", "model": "chat",
               "arrived_ns": most, "prompt_tokens": most, "output_tokens_max": most}  # fmt: skip
    folder = with_frames(tmp_path / "j", encode([step, change, arrived]))
    found = diagnose(read_journal(folder), Wanted())
    assert found.spike.metric


def test_the_command_ends_in_words_whatever_the_journal_is(tmp_path, capsys):
    folder = with_frames(tmp_path / "j", encode({"kind": "Gap"}))
    for window in ("0001-01-01T00:00:00..", "..9999-12-31T23:59:59-12:00", "3650d", "0s..3650d"):
        assert run(["doctor", str(folder), "--window", window]) in (0, 1, 2), window
        assert "Traceback" not in capsys.readouterr().err


def test_names_in_a_journal_are_text_in_the_page(tmp_path, capsys):
    name = '<img src=x onerror="alert(1)">'
    found = []
    for record in slower():
        changed = {}
        if isinstance(record, records.RequestArrived):
            changed = {"tenant": name, "slo_class": name, "model": name, "id": f"{name}{record.id}"}
        found.append(msgspec.structs.replace(record, **changed))
    found.append(records.Deployment(9 * S, name, {name: name}, name))
    folder, page = written(tmp_path / name[:4], found), tmp_path / "page.html"
    assert run(["doctor", str(folder), "--html", str(page)]) in (0, 1)
    assert "<img" not in page.read_text()


def test_a_replica_that_restarts_all_the_time_costs_no_pass_over_all_steps_each(tmp_path):
    changes = [
        records.ReplicaChanged(number * 1000, "chat-0", "chat", "ready", "", number, 4096, 32, 500)
        for number in range(20_000)
    ]
    steps = [
        records.Step(number * 300, "chat-0", number, 1000, 1000, blocks_free=100)
        for number in range(60_000)
    ]
    folder = written(tmp_path / "j", [*slower(), *changes, *steps])
    began_s = time.process_time()
    journal = read_journal(folder)
    assert set(journal.steps.kv_blocks[1:]) == {400.0}
    assert time.process_time() - began_s < 4


def test_a_reader_of_whole_frames_stops_at_more_records_than_a_frame_has():
    encoder = FrameEncoder()
    raw = encoder.header(SegmentHeader(1, "odd", 1, 0, 0, "9")) + encoder._frame(TOO_MANY)
    reader = SegmentReader(io.BytesIO(raw), "odd")
    assert (list(reader.bodies()), reader.is_torn) == ([], True)


def test_what_is_no_file_in_a_journal_folder_is_told(tmp_path):
    folder = written(tmp_path / "j", slower())
    (folder / "folder.journal").mkdir()
    (folder / "gone.journal").symlink_to(tmp_path / "nowhere")
    (folder / "noise.journal").write_bytes(b"\0" * 4096)
    journal = read_journal(folder)
    assert len(journal.requests) == 200
    assert len(journal.problems) == 3
    assert len(list(JournalReader(folder).entries())) == 800


def test_a_replica_of_impossible_limits_is_not_replayed_and_no_limit_that_fell(tmp_path):
    ready = [
        records.ReplicaChanged(at * S, "chat-0", "chat", "ready", "", 1, limit, limit, limit, limit)
        for at, limit in ((0, -1), (11, -32), (12, 2**60))
    ]
    steps = [
        records.Step(
            number * 5_000_000, "chat-0", number, 5_000_000, 6_000_000,
            decode=((f"r{number % 200}", 0),), blocks_free=1, running=1, waiting=1,
        )
        for number in range(4000)
    ]  # fmt: skip
    found = diagnose(read_journal(written(tmp_path / "j", [*slower(), *ready, *steps])), Wanted())
    assert found.spike.confirmed
    assert not found.shares.replayed
