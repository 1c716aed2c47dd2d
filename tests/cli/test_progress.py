"""Preparations are told in one line each, with how they ended."""

import re

import pytest

from sluice.cli.progress import PreparationProgress


def test_each_thing_is_one_line_that_ends_with_done_and_time(capsys):
    with PreparationProgress() as progress:
        progress.update("fetching tiny", 0, 100)
        progress.update("fetching tiny", 100, 100)
        progress.update("converting tiny", 0, None)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d.]+ s", "N s", line) for line in lines] == [
        "fetching tiny ... done, N s",
        "converting tiny ... done, N s",
    ]


def test_what_failed_is_not_told_as_done(capsys):
    def fail() -> None:
        with PreparationProgress() as progress:
            progress.update("fetching tiny", 0, None)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "fetching tiny ... failed" in capsys.readouterr().err


def test_nothing_to_do_says_nothing(capsys):
    with PreparationProgress():
        pass
    assert capsys.readouterr().err == ""
