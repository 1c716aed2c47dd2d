"""A journal is read while it grows: each record once, torn ends and new segments included."""

from pathlib import Path

from sluice.telemetry.following import Follower
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter
from sluice.telemetry.records import FirstToken

WALL_NS = 1_700_000_000 * 10**9


def writer(folder: Path, source: str, **limits) -> JournalWriter:
    ticks = iter(range(10**9))
    clocks = Clocks(lambda: next(ticks), lambda: WALL_NS)
    return JournalWriter(folder, source, clocks, JournalLimits(flush_s=0.01, **limits))


def told(follower: Follower) -> list[str]:
    return [entry.record.id for entry in follower.news()]  # type: ignore[union-attr]


def test_each_record_is_given_once_and_from_all_processes(tmp_path):
    gateway, replica = writer(tmp_path, "gateway"), writer(tmp_path, "replica-m-0")
    follower = Follower(tmp_path, 0)
    assert told(follower) == []
    gateway.append(FirstToken(1, "a", 1))
    gateway.flush()
    assert told(follower) == ["a"]
    gateway.append(FirstToken(3, "c", 1))
    replica.append(FirstToken(2, "b", 1))
    gateway.flush()
    replica.flush()
    assert sorted(told(follower)) == ["b", "c"]
    assert told(follower) == []
    gateway.close()
    replica.close()
    follower.close()


def test_the_end_of_a_frame_that_is_still_being_written_is_waited_for(tmp_path):
    source = tmp_path / "source"
    one = writer(source, "gateway")
    one.append(FirstToken(1, "a", 1))
    one.flush()
    (path,) = source.iterdir()
    whole_a = path.read_bytes()
    one.append(FirstToken(2, "b", 1))
    one.flush()
    whole_b = path.read_bytes()
    one.close()
    folder = tmp_path / "folder"
    folder.mkdir()
    copy = folder / path.name
    follower = Follower(folder, 0)
    seen = []
    for length in (
        3,
        len(whole_a) - 2,
        len(whole_a),
        len(whole_a) + 5,
        len(whole_b) - 1,
        len(whole_b),
    ):
        copy.write_bytes(whole_b[:length]) if not copy.exists() else _extend(copy, whole_b[:length])
        seen.append(told(follower))
    assert seen == [[], [], ["a"], [], [], ["b"]]
    follower.close()


def _extend(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content[path.stat().st_size :])


def test_a_new_segment_is_followed_and_a_deleted_one_forgotten(tmp_path):
    one = writer(tmp_path, "gateway", bytes_max=65536)
    follower = Follower(tmp_path, 0)
    seen: list[str] = []
    for n in range(400):
        one.append(FirstToken(n, f"{n}-{'x' * 300}", n))
        if n % 20 == 0:
            one.flush()
            seen += told(follower)
    one.close()
    seen += told(follower)
    assert [int(name.split("-")[0]) for name in seen] == list(range(400))
    for path in tmp_path.iterdir():
        path.unlink()
    assert told(follower) == []
    assert follower._open == {}


def test_what_was_written_before_is_left_out(tmp_path):
    one = writer(tmp_path, "gateway")
    one.append(FirstToken(1, "old", 1))
    one.flush()
    follower = Follower(tmp_path, WALL_NS + 1000)
    one.append(FirstToken(5000, "new", 1))
    one.flush()
    assert told(follower) == ["new"]
    one.close()
    follower.close()
