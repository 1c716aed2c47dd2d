"""``sluice docs``: what is printed, as text and as JSON, and with which exit code it ends."""

import json
import os
from pathlib import Path

import pytest

from sluice.cli.main import run


@pytest.fixture
def docs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("handbook").mkdir()
    Path("handbook/reset.md").write_text("# Passwords\n\nPress Reset in Settings.")
    Path("handbook/refunds.txt").write_text("Refunds take five days.")
    Path("handbook/logo.png").write_bytes(b"\x89PNG\x00")

    def call(*words, code=0):
        assert run(["docs", *words, "--set", f"documents.dir={tmp_path / 'store'}"]) == code
        printed = capsys.readouterr()
        return json.loads(printed.out) if "--json" in words else printed.out + printed.err

    return call


def test_a_folder_is_stored_listed_searched_and_removed(docs):
    told = docs("add", "handbook")
    assert "2 documents stored in 2 passages, 0 were there" in told
    assert "skipped handbook/logo.png" in told
    assert "handbook/reset.md  1 passages" in docs("list")
    assert docs("search", "how do I get a refund? refunds").startswith("handbook/refunds.txt#1")
    assert docs("remove", "handbook/refunds.txt") == "1 documents removed\n"
    assert "nothing was found" in docs("search", "refunds", code=1)


def test_json_has_the_same(docs):
    added = docs("add", "handbook", "--json")
    assert (added["added"], added["unchanged"], added["passages"]) == (2, 0, 2)
    assert list(added["skipped"]) == ["handbook/logo.png"]
    assert docs("add", "handbook", "--json")["unchanged"] == 2
    listed = docs("list", "--json")["documents"]
    assert [one["id"] for one in listed] == ["handbook/refunds.txt", "handbook/reset.md"]
    (found,) = docs("search", "reset", "--json")["passages"]
    assert (found["id"], found["title"]) == ("handbook/reset.md#1", "Passwords")
    removed = docs("remove", "--all", "--json")
    assert removed["removed"] == ["handbook/refunds.txt", "handbook/reset.md"]


def test_a_file_whose_name_is_no_text_is_passed_over(docs):
    Path(os.fsdecode(b"handbook/caf\xe9.txt")).write_text("A fact.")
    added = docs("add", "handbook", "--json")
    assert added["added"] == 2
    assert added["skipped"]["handbook/caf\\xe9.txt"] == "has a name that is not UTF-8"


def test_bad_input_is_told_in_words(docs):
    assert "no collection default; there are: none" in docs("list", code=2)
    docs("add", "handbook/reset.md", "--collection", "mine")
    assert "there are: mine" in docs("search", "x", code=2)
    assert "not '../x'" in docs("list", "--collection", "../x", code=2)
    assert "say --all" in docs("remove", "--collection", "mine", code=2)
    assert "there is no x in mine" in docs("remove", "x", "--collection", "mine", code=1)
    assert "does not exist" in docs("add", "none.md", code=2)
    assert "is not UTF-8" in docs("add", "handbook/logo.png", code=1)
