"""Arguments and files that make no sense end in words and an exit code, in every command."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.cli.main import run
from sluice.cli.options import print_json
from tests.doctor.journals import request, written

PLAN = (
    "plan --model llama-3.1-8b --gpu h100 --rps 20 --input 1000 --output 200 --ttft 1s --tpot 50ms"
)
SIMULATE = "simulate --model llama-3.1-8b --gpu h100 --rate 5 --input 100 --output 20 --requests 9"
BENCH = "bench http://127.0.0.1:1 --model m --rate 1 --duration 1s"
DEEP = "[" * 100_000


def told(capsys, line: str, *more: str) -> str:
    """What a command that is bad input says; with --json in one document."""
    capsys.readouterr()
    assert run([*line.split(), *more, "--json"]) == 2
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert "Traceback" not in printed.err
    return str(document["error"])


@pytest.fixture
def journal(tmp_path) -> str:
    found = []
    for number in range(60):
        found += request(number, number * 0.1)
    return str(written(tmp_path / "journal", found))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--seed", "-1", "--seed"),
        ("--percentile", "nan", "--percentile"),
        ("--percentile", "inf", "--percentile"),
        ("--window", "0001-01-01T00:00:00..0001-01-02T00:00:00", "no request in it"),
        ("--window", "..9999-12-31T23:59:59-12:00", "is no time"),
        ("--watch", "0s", "at least 1s"),
        ("--html", "/proc/none/page.html", "cannot write"),
    ],
)
def test_doctor(journal, capsys, option, value, words):
    assert words in told(capsys, f"doctor {journal}", option, value)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--adversary", "rate=1,input=abc", "input must be a number of tokens"),
        ("--adversary", "rate=1,output=nan", "output must be 1 to"),
        ("--body", f"a={DEEP}", "NAME=JSON"),
        ("--body", "a=NaN", "NAME=JSON"),
    ],
)
def test_bench(capsys, option, value, words):
    assert words in told(capsys, BENCH, option, value)


@pytest.mark.parametrize("value", ["²-3", "1-²", "1-99999999999", "-1-2", "nan-inf", "3-1"])
def test_simulate_ranges(capsys, value):
    assert "MIN-MAX" in told(capsys, SIMULATE, "--autoscale", value)


def test_simulate_weights_without_bound(capsys):
    weights = ("--class", "a=1e308", "--class", "b=1e308")
    assert "weight above 0, at most" in told(capsys, SIMULATE, *weights)


def test_route_scores_any_bytes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes(range(256)) * 9)))
    assert run(["route", "score", "--json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["probability"] <= 1


def broken_gzip() -> bytes:
    raw = bytearray(gzip.compress(os.urandom(4000)))
    raw[200:240] = b"x" * 40
    return bytes(raw)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(range(256)) * 9,
        DEEP.encode(),
        b'{"prompt": ' + DEEP.encode(),
        b'{"prompt": "a", "weak": ' + b"9" * 400 + b', "strong": 1}',
        b'{"prompt": "a", "weak": NaN, "strong": 1}',
        gzip.compress(b'{"prompt": "a"}' * 99)[:40],
        broken_gzip(),
        b"prompt,weak_ok,strong_ok\n" + b"x" * 5_000_000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_outcomes_of_any_content_are_refused_in_words(tmp_path, capsys, content):
    path = tmp_path / "outcomes"
    path.write_bytes(content)
    assert told(capsys, f"route eval {path}")
    assert told(capsys, f"route train --feedback {path} --out {tmp_path / 'm.route'}")
    assert told(capsys, f"bench compare {path} {path}")
    assert told(capsys, BENCH, "--prompts", str(tmp_path))


@pytest.mark.parametrize("out", ["/proc/none", "/dev/null/x"])
def test_manifests_that_cannot_be_written(tmp_path, capsys, out):
    settings = tmp_path / "s.toml"
    settings.write_text('[models.m]\nsource = "sim:llama-3.1-8b@h100"\n')
    line = f"deploy k8s -c {settings} --image sluice:1 --out {out}"
    assert "cannot write to" in told(capsys, line)


def test_a_key_file_without_a_key(tmp_path, capsys):
    key = tmp_path / "key"
    for content in (b"", b"\xff\xfe", b"a\nb"):
        key.write_bytes(content)
        assert run(["deploy", "keda-scaler", "--gateway", "http://x", "--key-file", str(key)]) == 2
        assert "--key-file" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["plan --list", "config default"])
def test_a_full_disk_behind_the_output_is_told_and_no_traceback(line):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "sluice", *line.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert b"No space left" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_an_output_without_the_characters_gets_question_marks(journal):
    ended = subprocess.run(
        [sys.executable, "-m", "sluice", "trace", "r1", "--journal", journal],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"?" in ended.stdout


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "9" * 400])
def test_plan_of_slots_with_a_share_of_memory_that_is_none(capsys, value):
    line = "plan --model llama-3.1-8b --gpu h100 --slots 4 --context 8192"
    assert "memory share must be above 0" in told(capsys, line, "--memory-share", value)


@pytest.mark.parametrize("option", ["--batch", "--chunk", "--spare", "--tp", "--simulate"])
def test_plan_of_whole_numbers_beyond_all_bounds(capsys, option):
    assert option in told(capsys, PLAN, option, "9" * 400)


def test_json_has_no_infinities(capsys):
    print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": -float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None, 1.5]], "b": {"c": None}}
