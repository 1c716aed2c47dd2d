"""Files and addresses that a run cannot use are told before anything is sent."""

import gzip
import os

import pytest

from sluice.loadtest.asking import ask
from sluice.loadtest.plan_file import read_plan
from sluice.loadtest.search_record import SearchRecord
from sluice.loadtest.trial import CannotMeasure
from sluice.loadtest.wire import target_of

DEEP = b"[" * 100_000
BROKEN = bytearray(gzip.compress(os.urandom(4000)))
BROKEN[100:140] = b"x" * 40
CONTENTS = [
    b"\xff\xfe",
    DEEP,
    b"{}\n",
    b"[]\n",
    b"7\n",
    b'{"question": 7}\n',
    b'{"question": {}}\n{}\n',
    b'{"question": {}}\n[]\n',
    b'{"question": {}}\n{"wish": 1, "sample": 2, "trial": 3}\n',
    bytes(BROKEN),
    gzip.compress(b"x" * 100)[:20],
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:30]))
def test_a_file_of_something_else_holds_no_trials_and_no_plan(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CannotMeasure, match="trials"):
        SearchRecord(path, {"rate": 1})
    assert path.read_bytes() == content
    with pytest.raises(CannotMeasure, match=r"no plan|read the plan"):
        read_plan(path)


@pytest.mark.parametrize("place", [".", "missing/file", "/proc/none"])
def test_a_place_that_cannot_be_written_is_told(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / place
    with pytest.raises(CannotMeasure, match="cannot keep the trials"):
        SearchRecord(path, {"rate": 1})


def test_a_torn_last_trial_is_dropped_and_trials_of_another_search_are_left_alone(tmp_path):
    path = tmp_path / "file"
    SearchRecord(path, {"rate": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"wish": ')
    with pytest.raises(CannotMeasure, match="another search"):
        SearchRecord(path, {"rate": 2})
    assert path.read_bytes() == whole + b'{"wish": '
    assert SearchRecord(path, {"rate": 1}).trials == []
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://a b", "http://h/\r\nx: 1", "http://h/é", "http://h:99999", "", "x://h"],
)
def test_what_is_no_address_is_refused_with_the_form(url):
    with pytest.raises(CannotMeasure, match="http://HOST:PORT"):
        target_of(url, "m")


def test_a_key_that_no_header_can_carry_is_no_bug():
    target = target_of("http://127.0.0.1:1", "m")
    bad = type(target)(target.host, target.port, "m", keys={"": "a\nb"})
    with pytest.raises(CannotMeasure):
        ask(bad, "/v1/models")
