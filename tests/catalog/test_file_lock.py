"""The lock over processes: one holder, bounded waits."""

import pytest

from sluice.catalog.file_lock import file_lock
from sluice.core.errors import ModelLoadError


def test_a_second_holder_is_told_and_gives_up_at_its_deadline(tmp_path):
    lock = tmp_path / "model.lock"
    with (
        file_lock(lock, 0.0),
        pytest.raises(ModelLoadError, match="another process has held"),
        file_lock(lock, 0.0),
    ):
        raise AssertionError("two hold the lock")


def test_who_waits_says_so_once_and_gets_the_lock_when_it_is_free(tmp_path):
    lock = tmp_path / "model.lock"
    told = []
    held = file_lock(lock, 0.0)
    held.__enter__()

    def on_wait():
        told.append("waiting")
        held.__exit__(None, None, None)

    with file_lock(lock, 5.0, on_wait):
        assert told == ["waiting"]


def test_the_lock_is_free_after_an_error(tmp_path):
    lock = tmp_path / "model.lock"
    with pytest.raises(ValueError, match="broken"), file_lock(lock, 0.0):
        raise ValueError("broken")
    with file_lock(lock, 0.0):
        pass
