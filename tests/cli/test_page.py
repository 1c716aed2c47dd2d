"""Files that reports are written to: whole, or not there, or devices that stay devices."""

import os
import stat
import threading

import pytest

from sluice.cli.page import write_whole
from sluice.complexity.model_file import default_model, packed_model, write_model


def test_a_file_is_replaced_whole_or_left_as_it_was(tmp_path):
    path = tmp_path / "report.html"
    write_whole(path, "first")
    write_whole(path, "second")
    assert path.read_text() == "second"
    tmp_path.chmod(0o500)
    try:
        if os.geteuid():
            with pytest.raises(OSError, match="denied"):
                write_whole(path, "third")
            assert path.read_text() == "second"
    finally:
        tmp_path.chmod(0o700)
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("what", ["page", "model"])
def test_a_pipe_gets_what_is_written_and_stays_a_pipe(tmp_path, what):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    if what == "page":
        write_whole(path, "text")
    else:
        write_model(default_model(), path)
    reader.join(10)
    assert read == [b"text" if what == "page" else packed_model(default_model())]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]
